"""Every host implementation passes its cases; planted faults do not."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.kernels.evidence import Qualification, evidence_for
from metainfer.kernels.impl import Evidence, Impl
from metainfer.ops.attn_paged import ref as attention
from metainfer.ops.case import DTYPES, allowed, errors, poisoned
from metainfer.ops.case_caches import held
from metainfer.ops.catalog import builtin_registry, op_cases
from metainfer.ops.qualify import applies, qualify, qualify_all
from metainfer.platform.facts import DeviceFacts, Facts, HostFacts

REGISTRY = builtin_registry()
HOST = Facts(
    platform="cpu",
    devices=(DeviceFacts(kind="cpu", name="cpu"),),
    host=HostFacts(compiler="cc"),
    software={"torch": torch.__version__},
)
ON_HOST = [
    (impl, dtype)
    for impl in REGISTRY.impls()
    if impl.provider in ("torch", "reference")
    for dtype in sorted(impl.dtypes)
]


@pytest.mark.parametrize(
    ("impl", "dtype"), ON_HOST, ids=lambda v: v.id if isinstance(v, Impl) else v
)
def test_torch_implementations_pass(impl: Impl, dtype: str, seed: int) -> None:
    verdict = qualify(impl, dtype, "cpu", HOST, REGISTRY, seed=seed)
    assert verdict.accepted, [reason.message for reason in verdict.reasons]


@pytest.mark.parametrize(
    "impl", [i for i in REGISTRY.impls() if i.provider == "c"], ids=lambda i: i.id
)
def test_compiled_c_passes_as_declared(impl: Impl, seed: int) -> None:
    from metainfer.kernels import native

    if native.find_compiler() is None:
        pytest.skip("no C compiler")
    verdict = qualify(impl, "float32", "cpu", HOST, REGISTRY, seed=seed)
    assert verdict.accepted, [reason.message for reason in verdict.reasons]


@pytest.mark.parametrize("op", REGISTRY.ops())
def test_cases_are_named_once_and_drawn_from_the_seed(op: str, seed: int) -> None:
    make = op_cases(op).CASES[op]
    first, again, other = make(seed), make(seed), make(seed + 1)
    names = [case.name for case in first]
    assert len(set(names)) == len(names)

    def floats(cases: list[Any]) -> list[Tensor]:
        return [
            a for c in cases for a in c.args
            if isinstance(a, Tensor) and a.dtype == torch.float64 and a.numel()
        ]  # fmt: skip

    same = [
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(floats(first), floats(again), strict=True)
    ]
    assert all(same)
    if floats(first):
        moved = zip(floats(first), floats(other), strict=True)
        assert any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in moved)


def test_every_implementation_has_a_case_in_every_phase_class() -> None:
    """In each of chunk, mixed, decode: attention's cases are split by phase."""
    for impl in REGISTRY.of("attn_paged"):
        if impl.provider not in ("torch", "reference"):
            continue
        for phase in (Phase.CHUNK, Phase.MIXED, Phase.DECODE, Phase.VERIFY):
            cases = op_cases("attn_paged").CASES["attn_paged"](0)
            fitting = [c for c in cases if applies(impl, c, "float32", HOST, frozenset({phase}))]
            assert len(fitting) >= 1, phase


def test_impl_without_a_fitting_case_is_not_qualified() -> None:
    import dataclasses

    draft = dataclasses.replace(REGISTRY.of("attn_paged")[-1], phases=frozenset({Phase.DRAFT}))
    verdict = qualify(draft, "float32", "cpu", HOST, REGISTRY)
    assert [r.code for r in verdict.reasons] == ["cases"]


# ---- planted faults ------------------------------------------------------------------------------


def wrong_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return op_cases("rmsnorm").REFERENCES["rmsnorm"](x, weight, eps * 100)


def unwritten_tail(gate_up: Tensor) -> Tensor:
    good = op_cases("swiglu").REFERENCES["swiglu"](gate_up)
    out = torch.empty_like(good)
    out[..., : good.shape[-1] - 1] = good[..., :-1]
    return out


def lucky_memory(gate_up: Tensor) -> Tensor:
    """Right unless uninitialised memory is NaN: what poisoning is for."""
    good = op_cases("swiglu").REFERENCES["swiglu"](gate_up)
    stale = torch.empty_like(good)
    return torch.where(stale.isnan(), stale, good)


def double_rounding(gate_up: Tensor) -> Tensor:
    """Three roundings more than the recipe has."""
    gate, up = gate_up.chunk(2, -1)
    out = gate * torch.sigmoid(gate)
    return ((out * up) * 1.01 / 1.01) if gate_up.dtype == torch.bfloat16 else out * up * (1 + 1e-5)


def forgets_window(*args: Any, scale: float, window: int = 0) -> Tensor:
    return attention.attn_paged(*args, scale=scale)


def window_off_by_one(*args: Any, scale: float, window: int = 0) -> Tensor:
    return attention.attn_paged(*args, scale=scale, window=window + 1 if window else 0)


def sees_the_future(q: Tensor, *args: Any, scale: float, window: int = 0) -> Tensor:
    keep = attention.visible
    attention.visible = lambda *a: torch.ones_like(keep(*a))  # type: ignore[assignment]
    try:
        return attention.attn_paged(q, *args, scale=scale, window=window)
    finally:
        attention.visible = keep


def head_mix(q: Tensor, *args: Any, scale: float, window: int = 0) -> Tensor:
    return attention.attn_paged(q.flip(1), *args, scale=scale, window=window).flip(1)


def writes_minus_one(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    op_cases("kv_write").REFERENCES["kv_write"](
        k, v, k_cache, v_cache, slots % (k_cache.shape[0] * k_cache.shape[1])
    )


def swaps_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    op_cases("kv_write").REFERENCES["kv_write"](v, k, k_cache, v_cache, slots)


def always_neox(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False
) -> Any:
    return op_cases("rope").REFERENCES["rope"](q, k, positions, table)


def next_position(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False
) -> Any:
    return op_cases("rope").REFERENCES["rope"](
        q, k, (positions - 1).clamp_min(0), table, interleaved
    )


def no_bias(x: Tensor, weight: Any) -> Tensor:
    return x @ weight.data["weight"].T


def last_tie(logits: Tensor, inputs: Any) -> Any:
    import dataclasses

    good = op_cases("sample").REFERENCES["sample"](logits, inputs)
    if not inputs.greedy or logits.shape[0] == 0:
        return good
    top = logits.flip(1).max(1).indices
    return dataclasses.replace(good, tokens=logits.shape[1] - 1 - top)


def stores_padding(*args: Any, **kwargs: Any) -> Any:
    reference = op_cases("latent_qkv").REFERENCES["latent_qkv"]
    return reference(*args[:6], args[6].clamp_min(0), **kwargs)


def turns_the_entry_late(*args: Any, **kwargs: Any) -> None:
    table = args[4].roll(1, 0)
    op_cases("compress").REFERENCES["compress"](*args[:4], table, *args[5:], **kwargs)


def forgets_raw_rows(*args: Any, **kwargs: Any) -> None:
    import dataclasses

    state = dataclasses.replace(args[5], data=args[5].data.clone())
    op_cases("compress").REFERENCES["compress"](*args[:5], state, *args[6:], **kwargs)


def unmixed_query(*args: Any) -> Tensor:
    import dataclasses

    form = dataclasses.replace(args[3], hadamard=False)
    return op_cases("index_query").REFERENCES["index_query"](*args[:3], form)


def sees_an_open_window(*args: Any, **kwargs: Any) -> Tensor:
    later = (*args[:4], args[4] + 1, *args[5:])
    return op_cases("index_select").REFERENCES["index_select"](*later, **kwargs)


def no_sink(*args: Any, **kwargs: Any) -> Tensor:
    weak = (*args[:6], args[6] - 1e4, *args[7:])
    return op_cases("attn_sparse").REFERENCES["attn_sparse"](*weak, **kwargs)


def raises(*args: Any) -> Tensor:
    raise RuntimeError("illegal memory access\nmore")


FAULTS: list[tuple[str, Callable[..., Any], str]] = [
    ("rmsnorm", wrong_eps, "float32"),
    ("swiglu", unwritten_tail, "float32"),
    ("swiglu", lucky_memory, "float32"),
    ("swiglu", double_rounding, "float32"),
    ("attn_paged", forgets_window, "float32"),
    ("attn_paged", window_off_by_one, "bfloat16"),
    ("attn_paged", sees_the_future, "bfloat16"),
    ("attn_paged", head_mix, "float32"),
    ("kv_write", writes_minus_one, "float32"),
    ("kv_write", swaps_kv, "bfloat16"),
    ("rope", always_neox, "float32"),
    ("rope", next_position, "bfloat16"),
    ("linear", no_bias, "bfloat16"),
    ("sample", last_tie, "float32"),
    ("latent_qkv", stores_padding, "float32"),
    ("compress", turns_the_entry_late, "float32"),
    ("compress_index", turns_the_entry_late, "bfloat16"),
    ("compress", forgets_raw_rows, "float32"),
    ("index_query", unmixed_query, "float32"),
    ("index_select", sees_an_open_window, "float32"),
    ("attn_sparse", no_sink, "bfloat16"),
    ("swiglu", raises, "float32"),
]


@pytest.mark.parametrize(("op", "fault", "dtype"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_planted_faults_are_refused(
    op: str, fault: Callable[..., Any], dtype: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    monkeypatch.setattr(sys.modules[__name__], "PLANTED", fault, raising=False)
    impl = dataclasses.replace(REGISTRY.of(op)[-1], load=f"{__name__}:PLANTED")
    verdict = qualify(impl, dtype, "cpu", HOST, REGISTRY, seed=seed)
    assert not verdict.accepted
    assert {reason.code for reason in verdict.reasons} <= {"error", "raised", "result"}
    (record,) = qualify_all([impl], dtype, "cpu", HOST, REGISTRY, seed=seed)
    assert not record.passed and record.reasons


# ---- arguments have effect (conformance kit) -----------------------------------------------------

FREE = ("torch",)
EXACT = [i for i in REGISTRY.impls() if i.provider in FREE and "float64" in i.dtypes]
SHAPES = {("attn_weigh", 0)}
"""(op, place) of tensors that give their shape and type alone."""


@pytest.mark.parametrize(
    "impl",
    # Choices may stand although an argument changed.
    [impl for impl in EXACT if impl.op not in ("sample", "index_select")],
    ids=lambda i: i.id,
)
def test_every_float_argument_has_effect(impl: Impl, seed: int) -> None:
    """Change one tensor or number at a time: the result must change."""
    from metainfer.ops.qualify import _flat, _pack, _placed, _results

    module = op_cases(impl.op)
    case = next(
        c for c in module.CASES[impl.op](seed)
        if c.shape.get("rows", 0) > 1 and applies(impl, c, "float64", HOST, frozenset(Phase))
        and (c.semantics or impl.op not in ("linear",))
    )  # fmt: skip
    function, given = impl.resolve(), held(case.args, impl.requires_layout, "float64")

    def run(change: int | None) -> list[Tensor]:
        args = list(_placed(given, "cpu", lambda w: _pack(w, impl, REGISTRY, torch.float64, "cpu")))
        if change is not None:
            old = args[change]
            if isinstance(old, Tensor) and old.is_floating_point():
                args[change] = old * 1.5 + 0.25
            elif isinstance(old, float):
                args[change] = old + 0.5
        return _flat(_results(function, case, tuple(args)))

    base = run(None)
    for place, arg in enumerate(case.args):
        if place in case.outputs or (impl.op, place) in SHAPES:
            continue
        if isinstance(arg, float) or (isinstance(arg, Tensor) and arg.is_floating_point()):
            changed = run(place)
            pairs = zip(base, changed, strict=True)
            assert any(not torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs), place


# ---- judging -------------------------------------------------------------------------------------


def test_errors_are_relative_and_infinite_for_nan() -> None:
    truth = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert errors(truth * 1.01, truth) == (pytest.approx(0.01), pytest.approx(0.01))
    assert errors(torch.tensor([3.0, float("nan")]), truth) == (float("inf"), float("inf"))
    assert errors(torch.empty(0), torch.empty(0)) == (0.0, 0.0)


def test_allowed_is_the_recipe_s_error_or_the_floor() -> None:
    assert allowed((0.1, 0.4), torch.bfloat16) == (pytest.approx(0.125), pytest.approx(0.5))
    eps = torch.finfo(torch.float32).eps
    assert allowed((0.0, 0.0), torch.float32) == (8 * eps, 32 * eps)


def test_poison_fills_what_is_not_written() -> None:
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# ---- evidence ------------------------------------------------------------------------------------


def test_evidence_rule() -> None:
    ids = [impl.id for impl in REGISTRY.impls()]
    found = evidence_for(HOST, ids=ids)
    assert found["rope/torch"] is Evidence.OTHER_CARD  # shipped, never claimed for this machine
    records = [Qualification("rope/torch", True), Qualification("rope/ref", False, ("x",))]
    found = evidence_for(HOST, records)
    assert found["rope/torch"] is Evidence.THIS_CARD and found["rope/ref"] is Evidence.NONE
    later = evidence_for(HOST, [*records, Qualification("rope/torch", False)])
    assert later["rope/torch"] is Evidence.NONE
    assert "nobody/x" not in evidence_for(HOST, ids=["rope/torch"])


def test_shipped_evidence_names_existing_implementations() -> None:
    from metainfer.kernels.evidence import shipped

    ids = {impl.id for impl in REGISTRY.impls()}
    assert set(shipped()) <= ids
    for runs in shipped().values():
        assert runs and all(run.arch and run.how and run.versions for run in runs)


def test_dtypes_cover_the_declared_ones() -> None:
    declared = set(itertools.chain.from_iterable(impl.dtypes for impl in REGISTRY.impls()))
    assert declared <= set(DTYPES)
