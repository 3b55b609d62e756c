"""B-22: what is asked of speculation becomes one value on the record, or a refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from metainfer.comm import model as links
from metainfer.core.errors import RefusedError, UsageError, UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Decision, Origin
from metainfer.core.plan import DraftPlan
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.kernels.audit import target_facts
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import Evidence
from metainfer.kv.book.form import plain
from metainfer.kv.book.spec import CacheSpec, GroupKind, Rewind, form_groups
from metainfer.models.deepseek_v4.cost import Costs
from metainfer.ops.catalog import builtin_registry
from metainfer.planner.drafts import MOST, DraftModule, check_rewind
from metainfer.planner.exchange import Exchange, Sent
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved, resolve
from metainfer.planner.work import RankWork

REFERENCE = "random:qwen3-8b?layers=2"
MODEL = open_model(REFERENCE).facts
ARCH = MODEL.arch
ANY_DEPTH, BLOCK = DraftModule(), DraftModule(block=5)


def resolved(
    draft: str | None, module: DraftModule | None = None, arch: Any = ARCH, **intent: Any
) -> Resolved:
    facts = target_facts("sm_120", {"triton": "3.7.1", "torch": "2.13.0"})
    facts = replace(facts, devices=(replace(facts.device, memory_bytes=96 << 30),))
    policy = Policy(min_evidence=Evidence.NONE, allow_fallback=frozenset({"all"}))
    wish = Intent(model=REFERENCE, draft=draft, **intent)
    model = replace(MODEL, draft=module, arch=arch)
    return resolve(wish, model, facts, builtin_registry(), policy)


def decision(found: Resolved) -> Decision:
    (only,) = [d for d in found.plan.decisions if d.key == "draft"]
    return only


@pytest.mark.parametrize(
    ("wish", "module", "method", "depth", "said"),
    [
        (None, None, "off", 0, "off by default"),
        (None, ANY_DEPTH, "off", 0, "off by default"),
        ("off", None, "off", 0, "asked for"),
        ("ngram", None, "ngram", 4, "the depth is a seed, 4"),
        ("ngram:1", None, "ngram", 1, "asked for 'ngram:1'"),
        ("ngram:7", None, "ngram", 7, "asked for 'ngram:7'"),
        ("3", None, "ngram", 3, "asked for '3'"),
        ("ngram:6", BLOCK, "ngram", 6, "asked for 'ngram:6'"),
        ("mtp", ANY_DEPTH, "mtp", 4, "the depth is a seed, 4"),
        ("mtp:2", ANY_DEPTH, "mtp", 2, "asked for 'mtp:2'"),
        ("mtp", BLOCK, "mtp", 5, "the depth is the module's block, 5"),
        ("mtp:5", BLOCK, "mtp", 5, "block, 5"),
    ],
)
def test_b22_wish_to_effective(
    wish: str | None, module: DraftModule | None, method: str, depth: int, said: str
) -> None:
    found = resolved(wish, module)
    assert found.plan.draft == DraftPlan(method=method, depth=depth)
    assert said in decision(found).why
    assert decision(found).origin is (Origin.DEFAULT if wish is None else Origin.FLAG)
    assert decision(found).value == (f"{method}:{depth}" if depth else "off")


@pytest.mark.parametrize(
    ("wish", "module", "kind", "said"),
    [
        ("", None, UsageError, "not known"),
        ("eagle", None, UsageError, "'eagle' is not known"),
        ("NGRAM:4", None, UsageError, "not known"),
        ("off:1", None, UsageError, "not known"),
        ("ngram:", None, UsageError, "no tokens; it must be 1 to 7"),
        ("ngram:0", None, UsageError, "1 to 7"),
        ("0", None, UsageError, "1 to 7"),
        ("ngram:8", None, UsageError, "asks for 8"),
        ("ngram:-1", None, UsageError, "1 to 7"),
        ("ngram:two", None, UsageError, "1 to 7"),
        ("ngram:4:2", None, UsageError, "1 to 7"),
        ("mtp", None, RefusedError, "no draft module"),
        ("mtp:4", BLOCK, RefusedError, "proposes 5 tokens at once, not 4"),
        ("mtp:7", BLOCK, RefusedError, "proposes 5 tokens at once, not 7"),
    ],
)
def test_b22_refused(
    wish: str, module: DraftModule | None, kind: type[UserError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        resolved(wish, module)
    assert "--draft" in caught.value.remedy


@pytest.mark.parametrize(
    ("module", "plan", "shown"),
    [
        (None, DraftPlan(method="ngram", depth=7, adaptive=True), "ngram, at most 7"),
        (ANY_DEPTH, DraftPlan(method="mtp", depth=7, adaptive=True), "mtp, at most 7"),
        (BLOCK, DraftPlan(method="mtp", depth=5), "mtp:5"),  # a block has one depth
    ],
)
def test_b24_auto_is_the_best_drafter_there_is(
    module: DraftModule | None, plan: DraftPlan, shown: str
) -> None:
    found = resolved("auto", module)
    assert found.plan.draft == plan and decision(found).value == shown
    assert set(found.plan.phase_layout) >= {"verify"}
    with pytest.raises(UsageError, match="'auto:3' is not known"):
        resolved("auto:3", module)


def test_b22_what_does_not_fit_is_lowered_on_the_record() -> None:
    found = resolved("ngram:6", chunk_tokens=4, concurrency=2)
    assert found.plan.draft.depth == 3
    assert "6 lowered to 3: a step of 4 tokens holds no more" in decision(found).why
    assert "lowered to 2: a context of 4 tokens" in decision(resolved("ngram:6", context=4)).why
    with pytest.raises(UsageError, match="a step of 1 tokens has no room"):
        resolved("ngram:6", chunk_tokens=1, concurrency=1)
    with pytest.raises(UsageError, match="has no room for 5"):  # a block cannot be lowered
        resolved("mtp", BLOCK, chunk_tokens=4, concurrency=2)


@pytest.mark.parametrize("depth", [0, 1, MOST])
def test_b22_every_consumer_reads_the_effective_value(depth: int) -> None:
    """Width of verify ops, logits rows in the memory ledger, the phases that exist."""
    # Steps so short that logits take more than layers.
    found = resolved(f"ngram:{depth}" if depth else None, concurrency=8, chunk_tokens=64)
    off = resolved(None, concurrency=8, chunk_tokens=64)
    asked = {c.request.phase: c.request for c in found.selection.bundle.choices}
    assert (Phase.VERIFY in asked) is bool(depth)
    if depth:
        sampled = [
            c.request.shape["rows"]
            for c in found.selection.bundle.choices
            if c.request.op == "sample" and c.request.phase is Phase.VERIFY
        ]
        assert sampled == [8 * (1 + depth)]
    (transient,) = [row.bytes for row in found.plan.ledger if row.kind == "transient"]
    (plain_one,) = [row.bytes for row in off.plan.ledger if row.kind == "transient"]
    step = found.plan.limits.step_tokens
    assert transient == found.arch.activation_bytes(step, 8 * (1 + depth), 2)
    assert plain_one == found.arch.activation_bytes(step, 8, 2)
    assert transient > plain_one or depth == 0


def test_graphs_that_drafts_cost_are_on_the_record() -> None:
    """Law 1: verify runs are captured at the depth in force; a draft model's own steps are not."""

    def graphs(found: Resolved) -> Decision:
        (only,) = [d for d in found.plan.decisions if d.key == "graph_buckets"]
        return only

    assert not graphs(resolved(None)).losers
    drafted = resolved("ngram:3")
    assert drafted.plan.graph_buckets == resolved(None).plan.graph_buckets != ()
    assert not graphs(drafted).losers
    verify = [g for g in drafted.plan.graphs if g.phase == "verify"]
    assert [g.runs for g in verify] == list(drafted.plan.graph_buckets)
    assert all(g.tokens == 4 * g.runs for g in verify)
    module = resolved("mtp", ANY_DEPTH)
    assert module.plan.graph_buckets == drafted.plan.graph_buckets
    (loser,) = graphs(module).losers
    assert loser.value == "draft graphs"


def states(ring: int, rewind: Rewind = Rewind.CURSOR) -> CacheSpec:
    return CacheSpec(
        layer=0, name="rows", kind=GroupKind.STATE, form=plain("rows@1", 8, "float32"), rows=8,
        rewind=rewind, ring_tokens=ring,
    )  # fmt: skip


def test_b22_a_ring_must_take_back_every_draft() -> None:
    deep = DraftPlan(method="ngram", depth=7)
    check_rewind(deep, form_groups((states(7),), page_tokens=16))
    check_rewind(deep, form_groups((states(0, Rewind.SNAPSHOT),), page_tokens=16))
    with pytest.raises(RefusedError, match="take back 6") as caught:
        check_rewind(deep, form_groups((states(6),), page_tokens=16))
    assert "ngram:6" in caught.value.remedy
    with pytest.raises(RefusedError) as caught:
        check_rewind(deep, form_groups((states(0),), page_tokens=16))
    assert "--draft off" in caught.value.remedy


class ShortRing:
    """The model with a state beside its pages that takes back three tokens."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ARCH, name)

    def with_options(self, *given: Any) -> ShortRing:
        return self

    def cache_specs(self, *given: Any) -> tuple[CacheSpec, ...]:
        return (*ARCH.cache_specs(*given), states(3))


def test_b22_the_plan_is_refused_when_a_ring_is_too_short() -> None:
    assert resolved("ngram:3", arch=ShortRing()).plan.draft.depth == 3
    with pytest.raises(RefusedError, match="take back 3"):
        resolved("ngram:4", arch=ShortRing())


@pytest.mark.parametrize("layout", ["cp2/tp2", "cp2/dp2ep2"])
def test_ends_of_prompts_are_sent_to_where_drafts_go_on(layout: str) -> None:
    """Each is four streams of the model's width, where ranks share a chunk's rows."""
    reference = "random:deepseek-v4-flash?layers=12"
    intent = Intent(model=reference, parallel=layout, context=4096)
    cost = describe("2x-h200-nop2p").resolve(open_model(reference), intent).chosen.cost
    assert cost is not None and cost.prompts is not None and cost.tree is not None
    work = cost.prompts.work
    assert isinstance(work.costs, Costs)
    drafting = replace(work, costs=Costs(work.costs.arch.with_draft()))

    def more(work: RankWork) -> float:
        exchange = Exchange(work, cost.tree)
        return exchange.seconds(Sent(2048, 2, new=4096)) - exchange.seconds(Sent(2048, 1, new=4096))

    one, two = (links.direct(cost.tree, n * 4 * 4096 * 2, through_host=True) for n in (1, 2))
    assert more(work) == 0 and more(drafting) * 1e6 == pytest.approx(two - one, abs=1e-6)
