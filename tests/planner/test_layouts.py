"""Layouts over several cards: which exist, what one card holds of each, which the goal takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import GOALS, Intent
from metainfer.core.ledger import Decision, Origin
from metainfer.core.plan import DraftPlan, LayoutPlan, Limits
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import Elsewhere, describe
from metainfer.models.registry import random_config, read_arch
from metainfer.ops.catalog import builtin_registry
from metainfer.planner.candidate import Candidate
from metainfer.planner.cards import Cards
from metainfer.planner.goals import best_for
from metainfer.planner.held import Held
from metainfer.planner.layouts import (
    enumerate_layouts,
    of_decodes,
    of_prompts,
    runs,
)
from metainfer.planner.opening import OpenedModel, open_model
from metainfer.planner.predict import Prediction, predict
from metainfer.planner.resolve import Resolved
from metainfer.planner.steps import step_cost
from metainfer.planner.weights import Census, census
from metainfer.platform.facts import Facts, LinkFacts
from metainfer.platform.machine_catalog import find_machine

REGISTRY = builtin_registry()
FLASH, QWEN = "random:deepseek-v4-flash", "random:qwen3-8b"
SIX = "8x-rtx-pro-6000d"
MILLION = 1_048_576
STORED = {"weight": "stored@1", "experts": "experts-stored@1", "kv": "latent-fp8@1"}


@cache
def opened(reference: str) -> OpenedModel:
    return open_model(reference)


def elsewhere(facts: Facts | None = None, machine: str = SIX) -> Elsewhere:
    there = describe(machine)
    return there if facts is None else replace(there, facts=facts)


def resolved(
    reference: str = FLASH, facts: Facts | None = None, machine: str = SIX, **wishes: Any
) -> Resolved:
    intent = Intent(model=reference, **wishes)
    return elsewhere(facts, machine).resolve(opened(reference), intent)


@cache
def flash() -> Resolved:
    """DeepSeek-V4-Flash on eight cards, as asked for without wishes."""
    return resolved()


def by_name(found: Resolved) -> dict[str, Candidate]:
    return {each.layout.name: each for each in found.layouts}


def decision(found: Resolved, key: str) -> Decision:
    (only,) = [each for each in found.plan.decisions if each.key == key]
    return only


def with_cards(facts: Facts, count: int, **device: Any) -> Facts:
    return replace(facts, devices=(replace(facts.device, **device),) * count)


@cache
def counted(reference: str) -> Census:
    return census(opened(reference).arch, opened(reference).facts.scheme_of)


def cards(reference: str = FLASH, running: int = 8, **device: Any) -> Cards:
    model = opened(reference)
    facts = find_machine(SIX).facts
    limits = Limits(
        max_context=min(MILLION, model.arch.max_context),
        max_running=running,
        step_tokens=4096,
        mixed_prefill_tokens=512,
        max_waiting=1,
    )
    return Cards(
        intent=Intent(model=reference),
        arch=model.arch,
        counted=counted(reference),
        facts=with_cards(facts, 8, **device) if device else facts,
        dtype="bfloat16",
        limits=limits,
        page_tokens=256,
        draft=DraftPlan(),
    )


def hold(layout: LayoutPlan, given: Cards | None = None) -> Held:
    names = {**STORED, "index": "index-fp4@1"}
    return (given or cards()).hold(layout, {r: REGISTRY.layout(n) for r, n in names.items()})


def layout(name: str, devices: int = 8) -> LayoutPlan:
    return next(each for each in enumerate_layouts(devices, 256) if each.name == name)


# -- which exist -----------------------------------------------------------------------------------


def test_eight_cards() -> None:
    assert [each.name for each in enumerate_layouts(8, 256)] == [
        "single",
        "8x", "4xep2", "2xep4", "ep8",
        "4xtp2", "4xtp2ep2", "2xtp2ep4", "tp2ep8",
        "2xtp4", "2xtp4ep4", "tp4ep8",
        "tp8", "tp8ep8",
        "4xtp2cs2", "4xtp2ep2cs2", "2xtp2ep4cs2", "tp2ep8cs2",
        "2xtp4cs2", "2xtp4cs4", "2xtp4ep4cs2", "2xtp4ep4cs4", "tp4ep8cs2", "tp4ep8cs4",
        "tp8cs2", "tp8cs4", "tp8cs8", "tp8ep8cs2", "tp8ep8cs4", "tp8ep8cs8",
        "cp8/dp8ep8", "cp8/tp8", "cp8/tp8cs2", "cp8/tp8cs4", "cp8/tp8cs8",
    ]  # fmt: skip
    assert [each.name for each in enumerate_layouts(8, 0)] == [
        "single", "8x", "4xtp2", "2xtp4", "tp8",
        "4xtp2cs2", "2xtp4cs2", "2xtp4cs4", "tp8cs2", "tp8cs4", "tp8cs8",
        "cp8/dp8", "cp8/tp8", "cp8/tp8cs2", "cp8/tp8cs4", "cp8/tp8cs8",
    ]  # fmt: skip
    assert [each.name for each in enumerate_layouts(1, 256)] == ["single"]


@given(st.integers(1, 24), st.sampled_from((0, 8, 256)))
def test_every_layout_is_whole_and_named_once(devices: int, experts: int) -> None:
    found = enumerate_layouts(devices, experts)
    assert len({each.name for each in found}) == len(found)
    largest = max(n for n in (1, 2, 4, 8, 16) if n <= devices)
    assert {each.ranks for each in found} == {1, largest, devices}
    for each in found:
        assert each.ranks % each.expert == 0 and each.context == 1
        assert each.expert == 1 or each.expert % each.tensor == 0
        assert each.ranks % max(each.tensor, each.expert, each.prefill) == 0
        assert experts or each.expert == 1
        assert each.tensor % each.shards == 0 and each.prefill in (1, each.ranks)
        for half in (of_prompts(each), of_decodes(each)):
            assert half.ranks == each.ranks and half.expert == each.expert


def test_b04_chunks_of_a_pair_ask_for_kernels_of_the_parts_that_a_rank_holds() -> None:
    for name, heads, parts in (("cp8/tp8", 64, 8), ("cp8/dp8ep8", 64, 1), ("tp8", 8, 1)):
        choices = resolved(parallel=name).selection.bundle.choices
        asked = {c.request.site: c.request for c in choices if c.request.phase is Phase.CHUNK}
        each = 64 * 512 // (8 if "tp8" in name else 1)
        wq_b = asked["linear.wq_b"]
        assert (wq_b.shape["n"], wq_b.count) == (each, 43 * parts)
        assert asked["attn_sparse.csa"].shape["hq"] == heads  # attention sees all heads at once
        assert asked["linear.wqkv"].count == 43


def test_over_cards_only_what_was_asked_for_by_name_runs() -> None:
    for name in ("tp2", "cp2/tp2"):
        (found,) = [each for each in enumerate_layouts(2, 0) if each.name == name]
        assert runs(found, "cpu").accepted and runs(found, "cuda", asked=True).accepted
        (reason,) = runs(found, "cuda").reasons
        assert reason.code == "not-built"


# -- what a card holds -----------------------------------------------------------------------------


def sites(held: Held) -> dict[str, int]:
    return {row.item: row.bytes for row in held.weights}


def gigabytes(held: Held) -> tuple[float, float, float]:
    """Routed experts, embedding, the rest as the table counts it: without tables of positions and
    token ids."""
    found = sites(held)
    routed = found.pop("experts.w13") + found.pop("experts.w2")
    embed = found.pop("embed")
    del found["rotary tables"]
    apart = 3 * 129280 * 6 * 8
    return routed / 1e9, embed / 1e9, (sum(found.values()) - apart) / 1e9


def test_weights_of_one_of_eight_cards_are_those_of_the_table() -> None:
    """Routed 18.4 GB, dense and head 7.8 GB replicated, embedding 1.06 GB."""
    routed, embed, rest = gigabytes(hold(layout("ep8")))
    assert (round(routed, 1), round(rest, 1), round(embed, 2)) == (18.4, 7.8, 1.06)
    routed, embed, rest = gigabytes(hold(layout("tp8")))
    assert (round(routed, 1), round(embed, 2)) == (18.4, 0.13) and 1.7 < rest < 2.8
    routed, _, rest = gigabytes(hold(layout("2xep4")))
    assert (round(routed, 1), round(rest, 1)) == (36.8, 7.8)


def test_how_each_site_is_shared() -> None:
    shares = {row.item: row.share for row in hold(layout("tp2ep8")).weights}
    assert shares["experts.w13"] == shares["experts.w2"] == "experts/8"
    assert shares["linear.wq_b"] == shares["embed"] == shares["linear.lm_head"] == "rows/2"
    assert shares["linear.wo_b"] == shares["linear.shared2"] == "columns/2"
    assert shares["linear.wqkv"] == shares["linear.index_q"] == shares["linear_f32.csa"] == "whole"
    both = sites(hold(layout("tp2ep8"))), sites(hold(layout("ep8")))
    for site, share in shares.items():
        parts = int(share.split("/")[1]) if "/" in share else 1
        before = 8 if site.startswith("experts.") else 1
        assert both[0][site] * parts == both[1][site] * before, site


@pytest.mark.parametrize(
    ("kv", "index", "each"),
    [
        ("latent@1", "index@1", 6880.0),
        ("latent-fp8@1", "index-fp8@1", 3850.25),
        ("latent-fp8@1", "index-fp4@1", 3514.25),
    ],
)
@pytest.mark.parametrize("name", ["tp8", "ep8"])
def test_the_cache_is_that_of_the_table(kv: str, index: str, each: float, name: str) -> None:
    """Bytes a token of 3.3, under tensor parallelism too: there is one latent head."""
    names = {**STORED, "kv": kv, "index": index}
    held = cards().hold(layout(name), {role: REGISTRY.layout(n) for role, n in names.items()})
    tokens = held.cache.tokens
    assert tokens % 256 == 0
    rows = {row.item: row.logical_bytes for row in held.ledger() if row.kind == "kv"}
    paged = sum(rows[item] or 0 for item in ("entries-1of4", "index-1of4", "entries-1of128"))
    assert paged == each * tokens
    assert rows["local-window128"] == held.cache.sizes.slots * 43 * 128 * (
        1024 if kv == "latent@1" else 584
    )


def test_attention_domains_multiply_the_cache() -> None:
    many = cards(running=128)
    tp, ep = hold(layout("tp8"), many), hold(layout("ep8"), many)
    assert (tp.cache.sizes.slots, ep.cache.sizes.slots) == (128, 16)
    assert ep.kv_tokens == 8 * ep.cache.tokens and tp.kv_tokens == tp.cache.tokens
    assert 5 < ep.kv_tokens / tp.kv_tokens < 8  # an expert rank holds more weights


def test_kv_heads_are_shared_by_tensor_ranks() -> None:
    found = by_name(resolved(QWEN))
    for name, parts in (("single", 1), ("4xtp2", 2), ("2xtp4", 4), ("tp8", 8)):
        held = found[name].held
        assert held is not None
        assert held.groups[0].form.bytes == 2 * 8 // parts * 128 * 2, name
        assert sites(held)["linear.down"] * parts == 36 * 4096 * 12288 * 2


def test_slabs_stand_where_peers_can_meet() -> None:
    """And what copy engines carry lies on each card: a step's rows, of all domains that meet."""

    def memory(peer: bool | None, name: str = "tp8") -> dict[str, int]:
        facts = find_machine(SIX).facts
        links = (*facts.links, LinkFacts(source=0, target=1, peer_write=True))
        links = tuple(replace(x, peer_write=peer) if x.source >= 0 else x for x in links)
        held = hold(layout(name), replace(cards(), facts=replace(facts, links=links)))
        found = [row for row in held.ledger() if row.kind == "communication"]
        return {row.memory: row.bytes for row in found}

    apart, near = memory(False), memory(True)
    assert apart == memory(None) and set(apart) == set(near) == {"device", "pinned"}
    assert apart["device"] == 4096 * 4096 * 2 + 8 * 4096  # rows and width of a step in bfloat16
    assert near["pinned"] == apart["pinned"]
    assert near["device"] - apart["device"] > 2 * 8 << 20  # two slots of 1 MiB for each of eight
    assert memory(False, "ep8")["device"] == 8 * (4096 * 4096 * 2 + 4096)
    for alone in ("single", "8x"):
        held = by_name(resolved(QWEN))[alone].held
        assert held is not None and "communication" not in {row.kind for row in held.ledger()}


# -- what cannot be --------------------------------------------------------------------------------


def test_every_blocker_comes_in_one_pass() -> None:
    """Three cards cut groups, vocabulary, blocks and experts, and are too small besides."""
    facts = with_cards(find_machine("8x-4090").facts, 3)
    with pytest.raises(RefusedError) as caught:
        resolved(facts=facts, machine="8x-4090")
    told = [r for r in caught.value.reasons if r.data["layout"] == "tp3ep3"]
    assert [r.code for r in told].count("memory") == 1
    text = " ".join(r.message for r in told)
    for part in (
        "output groups",
        "vocabulary",
        "experts",
        "linear.shared13",
        "linear.wo_b",
        "need",
    ):
        assert part in text, part
    alone = [r for r in caught.value.reasons if r.data["layout"] == "single"]
    assert [r.code for r in alone] == ["memory"]


def test_a_share_of_half_a_block_is_refused_for_the_plan() -> None:
    """512 channels of an expert over 8 cards are 64: two MXFP4 groups, half an FP8 block."""
    config = {**random_config("deepseek-v4-flash", {"layers": "2"}), "moe_intermediate_size": 512}
    arch = read_arch(config, "narrow")
    narrow = replace(cards(), arch=arch)
    blocks = {**narrow.counted.blocks()}
    assert blocks["experts.w2"] == (1, 32) and blocks["linear.shared2"] == (128, 128)
    verdict = arch.layout_objections(layout("tp8"), blocks)
    assert {r.data["site"] for r in verdict.reasons} == {"linear.shared13", "linear.shared2"}


def test_uneven_kv_heads_are_refused_for_now() -> None:
    facts = with_cards(find_machine(SIX).facts, 12)
    found = by_name(resolved(QWEN, facts))["tp12"]
    assert not found.feasible
    said = "8 KV heads, with their query heads, over 12 ranks, 1 each, leave a rank without any"
    assert said in [reason.message for reason in found.reasons]


def test_kv_heads_are_copied_where_ranks_are_a_multiple_of_them() -> None:
    """8 KV heads of 128 channels over 16 cards: one on each of two, two query heads beside it."""
    facts = with_cards(find_machine(SIX).facts, 16)
    found = by_name(resolved(QWEN, facts))["tp16"].held
    assert found is not None
    assert found.groups[0].form.bytes == 2 * 128 * 2
    assert sites(found)["linear.qkv"] == 36 * (2 + 1 + 1) * 128 * 4096 * 2
    assert sites(found)["linear.o"] == 36 * 2 * 128 * 4096 * 2


def test_a_context_that_does_not_fit_says_what_would() -> None:
    """Weights fit one card of 96 GB in 22 layers, a million tokens of sixteen sequences do not."""
    facts = with_cards(find_machine(SIX).facts, 1, memory_bytes=24_000_000_000)
    with pytest.raises(RefusedError) as caught:
        resolved(QWEN, facts)
    advised = int(caught.value.remedy.split("--context to ")[1].rstrip(".").replace(",", ""))
    assert resolved(QWEN, facts, context=advised).plan.limits.max_context == advised
    with pytest.raises(RefusedError):  # tried with what a shorter context copies, so to the token
        resolved(QWEN, facts, context=advised + 1)


# -- which is taken --------------------------------------------------------------------------------


def test_goals_take_different_layouts() -> None:
    found, context = resolved(goal="latency"), resolved(goal="context")
    assert found.plan.layouts[0].name == "tp8" != context.plan.layouts[0].name
    assert decision(found, "layouts").origin is Origin.COST_MODEL
    speed = {n: c.prediction.one_tok_s for n, c in by_name(found).items() if c.prediction}
    assert max(speed, key=lambda n: speed[n] or 0) in ("tp8", "tp8ep8", "cp8/tp8")
    losers = {loser.value: loser.reasons for loser in decision(found, "layouts").losers}
    assert set(losers) == set(by_name(found)) - {"tp8"}
    assert [r.code for r in losers["ep8"]] == ["worse", "not-built"]
    assert [r.code for r in losers["single"]] == ["memory"]
    assert [r.code for r in losers["tp8ep8"]] == ["rank", "not-built"]
    most = max(c.held.kv_tokens for c in context.layouts if c.held is not None)
    assert context.plan.kv_tokens == most and decision(context, "layouts").origin is not Origin.SEED


def test_what_is_asked_for_is_planned_or_refused() -> None:
    found = resolved(parallel="2xep4")
    assert found.plan.layouts[0] == layout("2xep4") and found.plan.kv_domains == 8
    assert decision(found, "layouts").origin is Origin.FLAG
    assert set(found.plan.phase_layout.values()) == {"2xep4"}
    with pytest.raises(RefusedError) as caught:
        resolved(parallel="single")
    assert [reason.code for reason in caught.value.reasons] == ["memory"]
    with pytest.raises(UsageError, match="'tp3' does not exist"):
        resolved(parallel="tp3")


def test_unasked_one_card_or_the_best_of_all_where_none_holds_the_model() -> None:
    found, alone = flash(), resolved(QWEN)
    assert found.refusal() is None and alone.refusal() is None
    chosen = found.plan.layouts[0]
    assert chosen.ranks > 1
    assert [c.layout.name for c in found.layouts if c.built] == ["single", chosen.name]
    assert [c.layout.name for c in alone.layouts if c.built] == ["single"]


# -- how fast --------------------------------------------------------------------------------------


def test_cache_bytes_that_a_step_reads_are_those_of_the_table() -> None:
    """5.3 at a million tokens: CSA 7.85 MB, index keys 374 MB in FP4, HCA 97 MB; two windows."""
    costs, specs = opened(FLASH).arch.costs(), hold(layout("tp8")).specs
    assert costs is not None
    csa, index, hca = 21 * 640 * 584, 21 * (MILLION // 4) * 68, 20 * (8192 + 128) * 584
    assert costs.cache_reads(specs, MILLION) == csa + index + hca + 2 * 128 * 584
    assert (round(csa / 1e6, 2), round(index / 1e6), round(hca / 1e6)) == (7.85, 374, 97)


def test_nothing_is_predicted_of_what_is_not_known() -> None:
    unread = with_cards(find_machine(SIX).facts, 8, read_bytes_s=None)
    unknown = resolved(facts=unread, kv_bytes=40 << 30)
    assert all(each.prediction is None for each in unknown.layouts)
    assert decision(unknown, "goal_layout").origin is Origin.DERIVED
    for each in flash().layouts:
        if each.prediction is not None:
            assert each.prediction.prefill_tok_s is None and each.prediction.decode_tok_s
            assert any("seed" in said for said in each.prediction.assumed)
    for each in resolved(QWEN).layouts:
        if each.held is not None:
            assert each.prediction is not None and each.prediction.prefill_tok_s is None


def told(held: Held, facts: Facts, batch: int) -> Prediction | None:
    """Of steps that are captured as far as there is room."""
    cost, like = step_cost(counted(FLASH), held, facts, "bfloat16"), counted(FLASH)
    return predict(like, held, facts, "bfloat16", running=batch, step_tokens=4096, cost=cost)


def linked(rate: float) -> Facts:
    facts = find_machine(SIX).facts
    links = tuple(replace(x, bytes_s=rate) if x.source < 0 else x for x in facts.links)
    return replace(facts, links=links)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from((4e9, 8e9, 12e9, 26e9, 54e9)), st.sampled_from(GOALS), st.integers(1, 256))
@example(26e9, "throughput", 10)  # two that fail when groups do not share host memory
@example(54e9, "throughput", 64)
def test_a_slower_link_never_raises_the_tensor_degree(rate: float, goal: str, batch: int) -> None:
    def taken(rate: float) -> LayoutPlan:
        facts = linked(rate)
        predicted = [
            replace(each, prediction=told(each.held, facts, batch))
            for each in flash().layouts
            if each.held is not None
        ]
        return best_for(predicted, goal).layout

    assert taken(rate / 2).tensor <= taken(rate).tensor


NAMES = ("ep8", "tp8", "tp2ep8", "tp8cs4", "tp2ep8cs2", "cp8/dp8ep8", "cp8/tp8cs8")


@settings(max_examples=30, deadline=None)
@given(st.integers(70, 95), st.integers(1, 40), st.sampled_from(NAMES))
def test_more_memory_never_lowers_capacity(size: int, more: int, name: str) -> None:
    def held(gigabytes: int) -> Held:
        return hold(layout(name), cards(running=64, memory_bytes=gigabytes * 10**9))

    small, large = held(size), held(size + more)
    assert large.longest(4096, MILLION) >= small.longest(4096, MILLION)
    assert large.kv_tokens >= small.kv_tokens
    assert large.pairs(4096, MILLION) >= small.pairs(4096, MILLION)


@settings(max_examples=20, deadline=None)
@given(st.integers(70, 96), st.sampled_from(("tp8", "tp4ep8")), st.integers(1, 64))
def test_more_shards_hold_more_and_decode_no_faster(size: int, name: str, batch: int) -> None:
    """A cache of a few thousand tokens is read in no time: dealing it out only costs exchanges."""
    facts = find_machine(SIX).facts
    names = [name, *(f"{name}cs{n}" for n in (2, 4, 8) if n <= int(name[2]))]
    found = [hold(layout(each), cards(running=64, memory_bytes=size * 10**9)) for each in names]
    rates = []
    for held in found:
        prediction = told(held, facts, batch)
        assert prediction is not None
        rates.append(prediction.decode_tok_s)
    assert rates == sorted(rates, reverse=True)
    tokens = [held.kv_tokens for held in found[1:]]
    assert (
        tokens == sorted(tokens) and [h.layout.shards for h in found] == [1, 2, 4, 8][: len(found)]
    )
    longest = [held.longest(4096, 1 << 40) for held in found[1:]]
    assert longest == sorted(longest)
