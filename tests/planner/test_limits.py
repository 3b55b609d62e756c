"""B-20, B-21: limits that a cache keeps, advice that passes the same check, ledgers that add up."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RefusedError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Decision, Origin
from metainfer.engine.elsewhere import describe
from metainfer.kv.book.capacity import check_limits
from metainfer.kv.book.form import plain
from metainfer.kv.book.spec import CacheSpec, GroupKind, GroupSpec, form_groups
from metainfer.planner.limits import (
    MIB,
    Advice,
    CacheAsk,
    CacheTooSmall,
    advice_for,
    fit_cache,
    held_bytes,
    longest_context,
    most_running,
    most_sequences,
    passes,
)
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved

TINY = "random:tiny-deepseek-v4"


def groups(kv: int, window: int, state: int, page: int = 16) -> tuple[GroupSpec, ...]:
    """Paged entries of `kv` elements, a window and a state of `state` rows, where not 0."""
    specs = [CacheSpec(layer=0, name="kv", kind=GroupKind.PAGED, form=plain("kv@1", kv, "float32"))]
    if window:
        form = plain("kv@1", 8, "float32")
        specs.append(
            CacheSpec(layer=1, name="local", kind=GroupKind.WINDOW, form=form, window=window)
        )
    if state:
        form = plain("rows@1", 64, "float32")
        specs.append(CacheSpec(layer=2, name="rows", kind=GroupKind.STATE, form=form, rows=state))
    return form_groups(tuple(specs), page_tokens=page)


asks = st.builds(
    CacheAsk,
    groups=st.builds(
        groups, st.sampled_from((1, 8, 64)), st.sampled_from((0, 1, 40)), st.integers(0, 40)
    ),
    budget_bytes=st.integers(0, 40_000_000),
    context=st.integers(1, 20_000),
    running=st.integers(1, 1100),
    step_tokens=st.sampled_from((1, 64, 4096)),
    caching=st.booleans(),
    most_bytes=st.none() | st.integers(0, 200_000_000),
)


def changed(ask: CacheAsk, advice: Advice) -> list[CacheAsk]:
    """The ask after each single piece of advice."""
    found = []
    if advice.context is not None:
        found.append(replace(ask, context=advice.context))
    if advice.running is not None:
        found.append(replace(ask, running=advice.running))
    if advice.both is not None:
        found.append(replace(ask, context=advice.both[0], running=advice.both[1]))
    if advice.budget_bytes is not None:
        assert advice.budget_bytes <= (ask.most_bytes or 0)
        found.append(replace(ask, budget_bytes=advice.budget_bytes))
    return found


@settings(max_examples=400, deadline=None)
@given(asks)
def test_b21_advice_applied_passes_the_same_check(ask: CacheAsk) -> None:
    if passes(ask):
        sized = fit_cache(ask)
        assert sized.sizes.bytes() <= ask.budget_bytes and sized.sizes.slots == ask.running
        return
    with pytest.raises(CacheTooSmall) as caught:
        fit_cache(ask)
    assert caught.value.reasons and caught.value.code == "does_not_fit"
    advice = advice_for(ask)
    tried = changed(ask, advice)
    for each in tried:
        assert passes(each), advice
    if not tried:  # nothing helps: not even one token of one sequence, whatever may be asked
        assert not passes(replace(ask, context=1, running=1))
        most = (ask.most_bytes or 0) // MIB * MIB
        assert not passes(replace(ask, budget_bytes=max(most, ask.budget_bytes)))


def test_b21_more_sequences_than_states() -> None:
    """1,024 sequences asked, memory for 939 states: lower it to 939; memory is said where it is."""
    held = groups(1, 0, 40)
    state = held[1].slot_bytes
    budget = 940 * state + 1001 * held[0].page_bytes  # a page a sequence, and padding's
    ask = CacheAsk(groups=held, budget_bytes=budget, context=16, running=1024, step_tokens=64)
    advice = advice_for(replace(ask, caching=False))
    assert advice.running == 939 and advice.budget_bytes is None
    assert advice.text(8) == "Lower --concurrency to 7,512."
    wider = advice_for(replace(ask, caching=False, most_bytes=1 << 40))
    assert wider.budget_bytes is not None and "--kv-memory" in wider.text()
    assert not passes(replace(ask, caching=False, running=940))


def test_b21_a_page_for_every_sequence() -> None:
    """Pages, not states: the account's own check, with its numbers."""
    held = groups(64, 0, 0)
    ask = CacheAsk(groups=held, budget_bytes=11 * held[0].page_bytes, context=160, running=11,
                   step_tokens=64)  # fmt: skip
    with pytest.raises(CacheTooSmall) as caught:
        fit_cache(ask)
    (reason,) = caught.value.reasons
    assert reason.data == {"asked": 11, "allowed": 10}
    assert caught.value.advised().remedy == "Lower --concurrency to 10."
    assert most_running(ask) == 10 and most_running(replace(ask, running=10)) == 10


def test_b21_both_where_neither_is_enough() -> None:
    held = groups(64, 0, 0)
    ask = CacheAsk(groups=held, budget_bytes=3 * held[0].page_bytes, context=160, running=11,
                   step_tokens=64)  # fmt: skip
    assert advice_for(ask) == Advice(both=(32, 2))
    assert advice_for(ask).text(2) == "Lower --context to 32 and --concurrency to 4."
    assert not passes(replace(ask, context=32, running=3))
    assert not passes(replace(ask, context=33, running=2))


@settings(max_examples=100, deadline=None)
@given(asks, st.integers(1, 4096))
def test_capacity_pairs_are_the_edge(ask: CacheAsk, limit: int) -> None:
    """One more sequence, or one more token, would not fit."""
    held, budget, step = ask.groups, ask.budget_bytes, ask.step_tokens
    n = most_sequences(held, budget, ask.context, step, limit)
    assert n == 0 or held_bytes(held, ask.context, n, step) <= budget
    assert n == limit or held_bytes(held, ask.context, n + 1, step) > budget
    reach = longest_context(held, budget, step, ask.context)
    assert reach == 0 or held_bytes(held, reach, 1, step) <= budget
    assert reach == ask.context or held_bytes(held, reach + 1, 1, step) > budget


# -- the plan --------------------------------------------------------------------------------------


def resolved(reference: str, machine: str = "8x-rtx-pro-6000d", **wishes: Any) -> Resolved:
    intent = Intent(model=reference, **wishes)
    return describe(machine, intent).resolve(open_model(reference), intent)


def decision(found: Resolved, key: str) -> Decision:
    (only,) = [each for each in found.plan.decisions if each.key == key]
    return only


def applied(wishes: dict[str, Any], remedy: str) -> list[dict[str, Any]]:
    """The wishes after each way that a remedy names."""
    flags = {"--context": "context", "--concurrency": "concurrency", "--kv-memory": "kv_bytes"}
    found = []
    for way in remedy.rstrip(".").split(", or "):
        named = re.findall(r"(--[a-z-]+) to ([\d,]+)(MiB)?", way)
        assert named, remedy
        found.append(
            wishes | {flags[f]: int(n.replace(",", "")) * (MIB if m else 1) for f, n, m in named}
        )
    return found


def test_b20_the_printed_advice_works_for_the_plan(seed: int) -> None:
    """Random plans that fail: each way that the refusal names is tried on the plan itself."""
    dice, failed = random.Random(seed), 0
    while failed < 10:
        wishes: dict[str, Any] = {
            "context": dice.choice((64, 500, 4096)),
            "concurrency": dice.randint(1, 96),
            "kv_bytes": int(10 ** dice.uniform(4.5, 6.5)),
            "chunk_tokens": 128,
            "prefix_cache": dice.random() < 0.5,
            "parallel": dice.choice((None, "single", "8x", "tp2")),
        }
        machine = "cpu" if wishes["parallel"] is None else "2x-h200-nop2p"
        if machine != "cpu":
            wishes["parallel"] = "single"
        try:
            resolved(TINY, machine, **wishes)
        except RefusedError as error:
            failed += 1
            assert error.code == "does_not_fit", error
            for wish in applied(wishes, error.remedy):
                resolved(TINY, machine, **wish)


def test_b20_a_concurrency_that_nobody_asked_for_gives_way_on_the_record() -> None:
    wishes: dict[str, Any] = {"machine": "cpu", "kv_bytes": 700_000, "context": 256}
    wishes["chunk_tokens"] = 128
    found = resolved(TINY, **wishes)
    running = found.plan.limits.max_running
    assert 1 <= running < 32 and found.sizes.slots == running
    said = decision(found, "limits.max_running")
    assert said.origin is Origin.SEED
    assert said.why == f"seed 32 lowered to {running}: the cache holds no more"
    with pytest.raises(RefusedError) as caught:
        resolved(TINY, **wishes, concurrency=32)
    assert f"--concurrency to {running}" in caught.value.remedy
    assert resolved(TINY, **wishes, concurrency=running).plan.limits.max_running == running


def test_b20_the_cache_of_thrifty_weights_is_what_the_advice_is_about() -> None:
    """Weights unpacked to sixteen bits lack a little, those as stored lack some cache: advice on
    the cache can be followed, advice on the weights cannot."""
    flash = open_model("random:deepseek-v4-flash")
    there = describe("8x-5090")
    device = replace(there.facts.device, memory_bytes=34_000_000_000)
    there = replace(there, facts=replace(there.facts, devices=(device,) * 8))
    wishes: dict[str, Any] = {"model": flash.source.reference, "parallel": "ep8"}
    wishes["concurrency"] = 512
    with pytest.raises(RefusedError) as caught:
        there.resolve(flash, Intent(**wishes))
    assert "--concurrency to" in caught.value.remedy or "--context to" in caught.value.remedy
    for wish in applied(wishes, caught.value.remedy):
        found = there.resolve(flash, Intent(**wish))
        assert found.plan.layouts[0].name == "ep8" and found.plan.bundle["weight"] == "stored@1"


@pytest.mark.parametrize("reference", ["random:deepseek-v4-flash", "random:qwen3-8b"])
@pytest.mark.parametrize("name", ["2xtp4", "tp8", "ep8", "4xtp2"])
def test_b20_the_ledger_is_the_card(reference: str, name: str) -> None:
    """Every item apart, none left out, for several layouts; within the limits it promises."""
    if reference.endswith("8b") and name == "ep8":
        name = "8x"
    if reference.endswith("flash") and name == "4xtp2":
        name = "tp4ep8"
    found = resolved(reference, parallel=name)
    ledger = found.plan.ledger
    device = [row.bytes for row in ledger if row.memory == "device"]
    assert sum(device) == 84_000_000_000 and min(device) >= 0
    kv = [row for row in ledger if row.kind == "kv"]
    assert sum(row.bytes for row in kv) == found.sizes.bytes()
    assert all(row.logical_bytes is not None and row.logical_bytes <= row.bytes for row in kv)
    limits = replace(found.plan.limits, max_running=found.sizes.slots)
    assert check_limits(found.sizes, limits).accepted


def test_b20_a_larger_group_shows_in_the_ledger() -> None:
    """A refreshed checkpoint with wider index keys: the row grows, the tokens shrink."""
    wishes: dict[str, Any] = {"machine": "cpu", "kv_bytes": 8 * MIB, "chunk_tokens": 128}
    narrow = resolved(TINY, **wishes, context=512)
    model = open_model(TINY)
    wide = replace(model.facts, arch=replace(model.facts.arch, index_dim=128))  # type: ignore[type-var]
    intent = Intent(model=TINY, context=512, kv_bytes=8 * MIB, chunk_tokens=128)
    there = describe("cpu")
    found = there.resolve(replace(model, facts=wide), intent)

    def each(of: Resolved) -> dict[str, float]:
        return {g.name: g.page_bytes / g.page_tokens for g in of.plan.kv_groups if g.pages}

    grown = {name for name, size in each(found).items() if size > each(narrow)[name]}
    assert len(grown) == 1 and next(iter(grown)).startswith("index")


def test_b20_a_context_that_cannot_be_kept_is_an_error() -> None:
    """Never shrunk in silence: 1,048,576 declared, some thousands possible."""
    with pytest.raises(RefusedError) as caught:
        resolved("random:deepseek-v4-flash", parallel="ep8", kv_bytes=64 * MIB, concurrency=1)
    assert caught.value.code == "does_not_fit" and "1,048,576" in caught.value.cause
    assert "--kv-memory to" in caught.value.remedy
