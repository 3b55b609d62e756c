"""Two-stage selection: capability predicates, semantics, pins, bundles, degraded states."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import LAYOUT_A, LAYOUT_B, SHARED, TABLE, card, host, kernel, request, trusted

from metainfer.core.errors import InternalError, RefusedError, UsageError
from metainfer.core.step import Phase
from metainfer.kernels import explain
from metainfer.kernels.choice import Choice, Policy, Unserved
from metainfer.kernels.conditions import (
    at_most,
    capability,
    compiler,
    device_kind,
    feature,
    multiple_of,
    one_of,
    package,
    shared_memory,
    weight_schemes,
)
from metainfer.kernels.evidence import evidence_for
from metainfer.kernels.impl import Context, Evidence, Impl, Numerics, OpRequest, Quality
from metainfer.kernels.registry import Registry
from metainfer.kernels.select import Outcomes, select
from metainfer.kernels.select_op import objections, select_op
from metainfer.ops.catalog import builtin_registry
from metainfer.platform.facts import DeviceFacts, Facts

ACCEPTED = {
    (8, 0): {"marlin", "big-tile"},
    (8, 6): {"marlin"},
    (8, 9): {"marlin", "ada", "fp8"},
    (9, 0): {"marlin", "ada", "fp8", "wgmma", "big-tile"},
    (10, 0): {"marlin", "ada", "fp8", "tcgen05", "big-tile"},
    (12, 0): {"marlin", "ada", "fp8", "block-scaled"},
    (12, 1): {"marlin", "ada", "fp8", "block-scaled"},
}


def chosen(outcome: Choice | Unserved) -> str:
    assert isinstance(outcome, Choice)
    return outcome.impl.name


def pick(registry: Registry, facts: Facts | None = None, **policy: object) -> Choice | Unserved:
    policy.setdefault("evidence", trusted(registry))
    return select_op(registry, request(), facts or card((9, 0)), {}, Policy(**policy))  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", list(SHARED))
def test_b01_simulated_cards_accept_the_expected_kernels(pair: tuple[int, int]) -> None:
    context = Context(request(), card(pair))
    accepted = {i.name for i in TABLE.impls() if objections(i, context).accepted}
    assert accepted == ACCEPTED[pair]


def test_b01_every_failing_predicate_is_listed_with_both_numbers() -> None:
    outcome = pick(TABLE, card((12, 0)))
    assert isinstance(outcome, Choice)
    reasons = {loser.impl: loser.reasons for loser in outcome.rejected}
    assert [r.code for r in reasons["tcgen05"]] == ["capability", "feature"]
    assert (
        "12.0" in reasons["tcgen05"][0].message and "10.0 to 10.3" in reasons["tcgen05"][0].message
    )
    (tile,) = reasons["big-tile"]
    assert "147,456" in tile.message and "101,376" in tile.message
    assert dict(tile.data) == {"needed": 147_456, "limit": 101_376}


def test_b01_unknown_facts_reject() -> None:
    unknown = Facts(platform="cuda", devices=(DeviceFacts(kind="cuda", name="unknown"),))
    context = Context(request(), unknown)
    for condition in (
        capability((7, 0)),
        shared_memory(1),
        feature("graphs"),
        package("triton"),
        compiler(),
        multiple_of("d", 1),
        one_of("d", (64,)),
        at_most("d", 10**9),
    ):
        assert not condition(context).accepted


def test_b01_installed_package_does_not_make_a_card_capable() -> None:
    needs = kernel("x", conditions=(package("triton", (3, 6)), capability((10, 0))))
    verdict = objections(needs, Context(request(), card((9, 0))))
    assert [r.code for r in verdict.reasons] == ["capability"]


@pytest.mark.parametrize(
    ("version", "minimum", "fits"),
    [
        ("3.6.0", (3, 6), True),
        ("3.5.9", (3, 6), False),
        ("3.10.0", (3, 9), True),
        ("2.13.0+cpu", (2, 11), True),
    ],
)
def test_package_versions_compare_as_numbers(
    version: str, minimum: tuple[int, ...], fits: bool
) -> None:
    facts = Facts(platform="cpu", devices=host().devices, software={"p": version})
    assert package("p", minimum)(Context(request(), facts)).accepted is fits


def test_phase_and_dtype_are_reasons() -> None:
    only = kernel("x", phases=frozenset({Phase.CHUNK}), dtypes=frozenset({"float16"}))
    verdict = objections(only, Context(request(), card((9, 0))))
    assert [r.code for r in verdict.reasons] == ["phase", "dtype"]


def test_b06_semantics_choose_the_backend_that_honours_them() -> None:
    registry = Registry([kernel("a", 1.0), kernel("b", 9.0, honours=frozenset({"clamp"}))])
    asked = request(semantics=frozenset({"clamp"}))
    policy = Policy(evidence=trusted(registry))
    outcome = select_op(registry, asked, card((9, 0)), {}, policy)
    assert chosen(outcome) == "b"
    forced = Policy(evidence=trusted(registry), pins={"gemm": "a"})
    with pytest.raises(RefusedError, match="clamp"):
        select_op(registry, asked, card((9, 0)), {}, forced)


def test_order_is_measured_then_cost_then_priority_then_declared() -> None:
    registry = Registry([kernel("a", 2.0), kernel("b", 1.0), kernel("c", None, priority=9)])
    assert chosen(pick(registry)) == "b"
    assert chosen(pick(registry, measured={("gemm/a", "decode"): 0.5})) == "a"
    assert chosen(pick(registry, measured={("gemm/a", "chunk"): 0.5})) == "b"
    level = Registry([kernel("a", 1.0), kernel("b", 1.0, priority=1), kernel("c", 1.0)])
    assert chosen(pick(level)) == "b"
    assert chosen(pick(Registry([kernel("a", 1.0), kernel("b", 1.0)]))) == "a"


def test_slowdown_counts_rejected_ones() -> None:
    """A faster kernel that this card refuses shows what is lost; another device's does not."""
    too_new = kernel("b", 1.0, conditions=(capability((99, 0)),))
    outcome = pick(Registry([kernel("a", 4.0), too_new]))
    assert isinstance(outcome, Choice) and outcome.slowdown == 4.0
    foreign = kernel("b", 1.0, conditions=(device_kind("abacus"),))
    outcome = pick(Registry([kernel("a", 4.0), foreign]))
    assert isinstance(outcome, Choice) and outcome.slowdown == 1.0


def test_a_kernel_that_costs_nothing_is_no_measure() -> None:
    """Beside work of no bytes, another is slower by no number."""
    outcome = pick(Registry([kernel("a", 0.0), kernel("b", 0.0)]))
    assert isinstance(outcome, Choice) and outcome.slowdown == 1.0
    free = kernel("b", 0.0, conditions=(capability((99, 0)),))
    outcome = pick(Registry([kernel("a", 4.0), free]))
    assert isinstance(outcome, Choice) and outcome.slowdown is None


def test_what_failed_its_cases_here_is_refused_even_when_asked_for() -> None:
    registry = Registry([kernel("a", 1.0), kernel("b", 2.0)])
    outcome = pick(registry, disproven={"gemm/a": ("case 3: error 1e-1",)})
    assert chosen(outcome) == "b"
    assert isinstance(outcome, Choice)
    assert [r.code for r in outcome.rejected[0].reasons] == ["disproven"]
    with pytest.raises(RefusedError, match="case 3"):
        pick(registry, disproven={"gemm/a": ("case 3: error 1e-1",)}, pins={"gemm": "a"})


def test_auto_needs_evidence_permission_and_no_loss() -> None:
    registry = Registry(
        [
            kernel("new", 1.0),
            kernel("lossy", 2.0, numerics=Numerics.LOSSY),
            kernel("ref", 3.0, provider="reference"),
            kernel("good", 4.0),
        ]
    )
    evidence = {**trusted(registry), "gemm/new": Evidence.COMPILED}
    outcome = pick(registry, evidence=evidence)
    assert isinstance(outcome, Choice) and outcome.impl.name == "good"
    codes = {loser.impl: [r.code for r in loser.reasons] for loser in outcome.rejected}
    assert codes == {"new": ["evidence"], "lossy": ["lossy"], "ref": ["reference"]}
    assert (
        chosen(pick(registry, evidence=evidence, allow_lossy=frozenset({"gemm/lossy"}))) == "lossy"
    )
    assert chosen(pick(registry, evidence=evidence, min_evidence=Evidence.COMPILED)) == "new"


def test_reference_is_last_even_when_it_is_cheapest() -> None:
    registry = Registry([kernel("ref", 1.0, provider="reference"), kernel("good", 5.0)])
    assert chosen(pick(registry, allow_fallback=frozenset({"all"}))) == "good"
    alone = Registry([kernel("ref", 1.0, provider="reference")])
    assert isinstance(pick(alone), Unserved)
    outcome = pick(alone, allow_fallback=frozenset({"gemm"}))
    assert isinstance(outcome, Choice) and outcome.quality is Quality.REFERENCE


def test_quality_follows_native_when() -> None:
    conditional = kernel("x", native_when=(capability((9, 0)),))
    for pair, quality in (((9, 0), Quality.NATIVE), ((8, 9), Quality.COMPATIBLE)):
        outcome = pick(Registry([conditional]), card(pair))
        assert isinstance(outcome, Choice) and outcome.quality is quality
    outcome = pick(Registry([kernel("y")]))
    assert isinstance(outcome, Choice) and outcome.quality is Quality.COMPATIBLE


def test_pins() -> None:
    registry = Registry(
        [kernel("a", 1.0), kernel("b", 9.0), kernel("c", conditions=(device_kind("cpu"),))]
    )
    outcome = pick(registry, pins={"gemm": "b"})
    assert isinstance(outcome, Choice)
    assert outcome.impl.name == "b" and outcome.why == "asked for" and outcome.slowdown == 9.0
    assert all(loser.reasons[-1].code == "pin" for loser in outcome.rejected)
    with pytest.raises(RefusedError) as refused:
        pick(registry, pins={"gemm": "c"})
    assert [r.code for r in refused.value.reasons] == ["device"]
    with pytest.raises(UsageError, match="a, b, c"):
        pick(registry, pins={"gemm": "d"})
    # A pin overrides missing evidence: the user's word.
    assert chosen(pick(registry, evidence={}, pins={"gemm": "b"})) == "b"


def test_site_pin_beats_op_pin() -> None:
    registry = Registry([kernel("a", 1.0), kernel("b", 9.0)])
    policy = Policy(evidence=trusted(registry), pins={"gemm": "a", "gemm.down": "b"})
    assert chosen(select_op(registry, request(site="gemm.down"), card((9, 0)), {}, policy)) == "b"
    assert chosen(select_op(registry, request(site="gemm.up"), card((9, 0)), {}, policy)) == "a"
    pins = {"gemm": "a", f"gemm@{request().phase}": "b", f"gemm@{Phase.VERIFY}": "c"}
    assert chosen(pick(registry, pins=pins)) == "b"  # and one phase's beats every phase's


def places(error: RefusedError) -> list[str]:
    """``site@phase`` of every reason."""
    return [str(site) for reason in error.reasons for site in reason.data["sites"]]  # type: ignore


# ---- bundles -------------------------------------------------------------------------------------


def bundled() -> Registry:
    """`linear` is faster in a@1, `embed` exists in b@1 only unless added."""
    return Registry(
        [
            kernel("fast", 1.0, op="linear", requires_layout={"weight": "a@1"}),
            kernel("slow", 3.0, op="linear", requires_layout={"weight": "b@1"}),
            kernel("rows", 1.0, op="embed", requires_layout={"weight": "b@1"}),
        ],
        [LAYOUT_A, LAYOUT_B],
    )


REQUESTS = (request("linear", site="linear.up"), request("embed"))


def test_ops_cannot_choose_layouts_alone() -> None:
    registry = bundled()
    selection = select(registry, REQUESTS, card((9, 0)), Policy(evidence=trusted(registry)))
    assert selection.bundle.name == "b@1"
    assert [c.impl.name for c in selection.bundle.choices] == ["slow", "rows"]
    (lost,) = selection.refused
    assert lost.name == "a@1" and lost.reasons[0].code == "unserved"
    assert "embed" in lost.reasons[0].message and "b@1" in lost.reasons[0].message


def test_cheapest_bundle_wins_over_all_sites_and_counts() -> None:
    registry = bundled()
    registry.add(kernel("gather", 4.0, op="embed", requires_layout={"weight": "a@1"}))
    policy = Policy(evidence=trusted(registry))
    selection = select(registry, REQUESTS, card((9, 0)), policy)
    assert selection.bundle.name == "b@1"  # 3 + 1 against 1 + 4
    assert selection.refused[0].reasons[0].code == "slower"
    many = (request("linear", site="linear.up", count=10), REQUESTS[1])
    assert select(registry, many, card((9, 0)), policy).bundle.name == "a@1"


def test_layouts_share_the_outcomes_of_equal_requests_and_of_no_others() -> None:
    """Per rank, products are narrower and the table is the same: that one is looked at once."""
    registry = bundled()
    policy = Policy(evidence=trusted(registry))
    narrow = (request("linear", site="linear.up", shape={"n": 8}), REQUESTS[1])
    known: Outcomes = {}
    for requests in (REQUESTS, narrow, REQUESTS):
        fresh = select(registry, requests, card((9, 0)), policy)
        assert select(registry, requests, card((9, 0)), policy, None, known) == fresh
    assert Counter(key[1] for key, _ in known) == {"linear.up": 4, "embed": 2}  # by two bundles


def test_layout_pins_schemes_and_conditions() -> None:
    registry = bundled()
    registry.add(kernel("gather", 4.0, op="embed", requires_layout={"weight": "a@1"}))
    evidence = trusted(registry)
    pinned = Policy(evidence=evidence, layout_pins={"weight": "a@1"})
    assert select(registry, REQUESTS, card((9, 0)), pinned).bundle.name == "a@1"
    with pytest.raises(UsageError, match="a@1, b@1"):
        select(registry, REQUESTS, card((9, 0)), Policy(layout_pins={"weight": "c@1"}))
    with pytest.raises(UsageError, match=r"linear\.up"):
        select(registry, REQUESTS, card((9, 0)), Policy(pins={"attn": "x"}))


def test_pin_that_no_bundle_can_run_is_an_error() -> None:
    registry = bundled()
    policy = Policy(evidence=trusted(registry), pins={"linear": "fast"})
    with pytest.raises(RefusedError, match="fast"):
        select(registry, REQUESTS, card((9, 0)), policy)
    impossible = Policy(
        evidence=trusted(registry), pins={"linear": "fast"}, layout_pins={"weight": "b@1"}
    )
    with pytest.raises(RefusedError, match="a@1"):
        select(registry, REQUESTS, card((9, 0)), impossible)


def test_duplicates_are_bugs() -> None:
    with pytest.raises(InternalError):
        Registry([kernel("a"), kernel("a")])
    with pytest.raises(InternalError):
        Registry([], [LAYOUT_A, LAYOUT_A])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["made", "reference"]),
            st.one_of(st.none(), st.floats(0.1, 9)),
            st.booleans(),
            st.sampled_from(list(Evidence)),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_loser_has_reasons_and_nobody_is_lost(
    rows: list[tuple[str, float | None, bool, Evidence]],
) -> None:
    impls = [
        kernel(
            f"k{i}",
            seconds,
            provider=provider,
            conditions=(device_kind("cuda" if runs else "cpu"),),
        )
        for i, (provider, seconds, runs, _) in enumerate(rows)
    ]
    evidence = {impl.id: row[3] for impl, row in zip(impls, rows, strict=True)}
    outcome = pick(Registry(impls), evidence=evidence)
    losers = {loser.impl for loser in outcome.rejected}
    winner = {outcome.impl.name} if isinstance(outcome, Choice) else set()
    assert losers | winner == {impl.name for impl in impls} and not losers & winner
    assert all(loser.reasons for loser in outcome.rejected)
    if isinstance(outcome, Choice):
        assert outcome.evidence.strength >= Evidence.OTHER_CARD.strength
        assert outcome.quality is not Quality.REFERENCE


# ---- degraded states -----------------------------------------------------------------------------


def dense_requests(
    dtype: str = "float32", scheme: str = "F32", context: int = 512
) -> list[OpRequest]:
    """What a small dense model asks for in two phases."""
    shapes = {
        "embed": {"v": 100, "d": 64},
        "rmsnorm": {"d": 64},
        "add_rmsnorm": {"d": 64},
        "swiglu": {"f": 128},
        "rope": {"hq": 4, "hkv": 2, "d": 64, "rotated": 64},
        "kv_write": {"hkv": 2, "d": 64, "page": 16},
        "attn_paged": {"hq": 4, "hkv": 2, "d": 64, "page": 16, "seqs": 4, "context": context},
        "sample": {"v": 100},
    }
    found = []
    for phase, rows in ((Phase.CHUNK, 256), (Phase.DECODE, 4)):
        for op, shape in shapes.items():
            schemes = (scheme,) if op == "embed" else ()
            found.append(
                request(op, phase, dtype=dtype, shape={"rows": rows, **shape}, schemes=schemes)
            )
        for site, n, k in (("linear.qkv", 128, 64), ("linear.down", 64, 128)):
            shape = {"rows": rows, "n": n, "k": k}
            found.append(
                request("linear", phase, site=site, dtype=dtype, shape=shape, schemes=(scheme,))
            )
    return found


OPS = (
    "embed",
    "rmsnorm",
    "add_rmsnorm",
    "swiglu",
    "rope",
    "kv_write",
    "attn_paged",
    "sample",
    "linear",
)


def fast_ids(registry: Registry, op: str) -> list[str]:
    return [impl.id for impl in registry.of(op) if impl.provider != "reference"]


def degraded(*removed: str) -> tuple[Registry, Policy]:
    """The shipped registry without the fast kernels of some ops; references are permitted."""
    registry = builtin_registry()
    registry = registry.without(*(i for op in removed for i in fast_ids(registry, op)))
    return registry, Policy(evidence=trusted(registry), allow_fallback=frozenset({"all"}))


@pytest.mark.parametrize("op", OPS)
def test_b05_one_missing_kernel_shows_as_reference_with_a_price(op: str) -> None:
    registry, policy = degraded(op)
    selection = select(registry, dense_requests(), host(), policy)
    on_reference = {
        c.request.op for c in selection.bundle.choices if c.quality is Quality.REFERENCE
    }
    # Without fast weight readers the whole bundle changes, never another op's quality.
    assert on_reference == {op}
    assert "reference" in explain.text(selection)


@pytest.mark.parametrize("pair", list(itertools.combinations(OPS, 2))[::5])
def test_b05_several_missing_kernels_are_listed_in_one_pass(pair: tuple[str, str]) -> None:
    registry, policy = degraded(*pair)
    strict = Policy(evidence=policy.evidence)
    with pytest.raises(RefusedError) as refused:
        select(registry, dense_requests(), host(), strict)
    sites = {site.split("@")[0].split(".")[0] for site in places(refused.value)}
    assert sites >= set(pair)
    again = select(registry, dense_requests(), host(), policy)
    rows = explain.rows(again)
    assert rows == explain.rows(select(registry, dense_requests(), host(), policy))
    assert [row["op"] for row in rows] == [r.site for r in dense_requests()]


def test_b05_policy_may_permit_one_op_only() -> None:
    registry, policy = degraded("rope", "sample")
    partial = Policy(evidence=policy.evidence, allow_fallback=frozenset({"rope"}))
    with pytest.raises(RefusedError) as refused:
        select(registry, dense_requests(), host(), partial)
    assert {place.split("@")[0] for place in places(refused.value)} == {"sample"}


# ---- the registry that ships ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_shipped_registry_serves_a_cpu_without_compiler(dtype: str) -> None:
    facts = host(compiler=None)
    policy = Policy(evidence=evidence_for(facts))
    selection = select(builtin_registry(), dense_requests(dtype), facts, policy)
    assert {c.quality for c in selection.bundle.choices} == {Quality.NATIVE}


def test_block_quantised_weights_stay_blocks_where_a_compiler_exists() -> None:
    registry = builtin_registry()
    policy = Policy(evidence=trusted(registry))
    selection = select(registry, dense_requests(scheme="Q4_1"), host(), policy)
    assert selection.bundle.layouts["weight"] == "c-rows16@1"
    dense = select(registry, dense_requests(), host(), policy)
    assert dense.bundle.layouts["weight"] == "onednn-f32@1"


@pytest.mark.parametrize("pair", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_shipped_registry_is_native_on_cards_once_qualified(pair: tuple[int, int]) -> None:
    registry = builtin_registry()
    policy = Policy(evidence=trusted(registry))
    requests = dense_requests("bfloat16", context=8192)
    choices = select(registry, requests, card(pair), policy).bundle.choices
    decode = {c.request.op: c.impl.id for c in choices if c.request.phase is Phase.DECODE}
    assert decode["attn_paged"] == "attn_paged/triton-split" and decode["linear"] == "linear/torch"
    assert not [c.request.op for c in choices if c.quality is not Quality.NATIVE]


def test_weight_schemes_name_the_foreigner() -> None:
    verdict = weight_schemes("F32")(Context(request(schemes=("F32", "Q4_0")), host()))
    assert "Q4_0" in verdict.reasons[0].message


def test_declared_implementations_resolve() -> None:
    """Every `load` of the host's implementations and layouts names something that exists."""
    registry = builtin_registry()
    for impl in registry.impls():
        if impl.provider != "triton":
            assert callable(impl.resolve())
    for layout in registry.layouts("weight"):
        assert callable(layout.resolve())
    assert isinstance(registry.impls()[0], Impl)
