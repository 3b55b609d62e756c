"""Every mistake that has a name is seen by a case, and a result made by it is called by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from metainfer.core.verdict import ACCEPT, reject
from metainfer.formats.block_codecs import BlockTensor
from metainfer.kernels.registry import Registry
from metainfer.ops.case import DTYPES, Case, errors
from metainfer.ops.case_caches import held
from metainfer.ops.catalog import builtin_registry, op_cases
from metainfer.ops.mistakes import mistakes_of, name, names_of
from metainfer.ops.qualify import Outcome, truth

REGISTRY: Registry = builtin_registry()
OPS = [op for op in REGISTRY.ops() if names_of(op)]
KIND = DTYPES["float32"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rounded(case: Case) -> tuple[Any, ...]:
    reference = next(impl for impl in REGISTRY.of(case.op) if impl.provider == "reference")
    return held(case.args, reference.requires_layout, "float32")


def outcome(case: Case, function: Callable[..., Any]) -> Outcome | None:
    """What an implementation that makes a mistake gives; None where it gives nothing."""
    args = rounded(case)
    right = truth(case, args, op_cases(case.op).REFERENCES[case.op], KIND, KIND)
    try:
        wrong = truth(case, args, function, KIND, KIND)
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return None
    differ = any(
        not torch.equal(a.isnan(), b.isnan()) or errors(b.nan_to_num(), a.nan_to_num())[0] > 1e-3
        for a, b in zip(right, wrong, strict=True)
    )
    verdict = reject("error", "differs") if differ else ACCEPT
    return Outcome(case, verdict, args, tuple(wrong))


@pytest.mark.parametrize("op", OPS)
def test_cases_see_every_mistake_and_name_it(op: str, seed: int) -> None:
    cases = [case for case in op_cases(op).CASES[op](seed) if case.shape.get("rows", 1) < 40]
    for label, functions in mistakes_of(op).items():
        for function in functions:
            made = [outcome(case, function) for case in cases]
            failed = [found for found in made if found and not found.verdict.accepted]
            assert failed, f"no case sees {label}"
            assert label in name(failed[:3], "float32")


@pytest.mark.parametrize("label", ["stale scale column", "scale group"])
def test_a_scale_read_wrong_is_seen(label: str, seed: int) -> None:
    module = op_cases("linear")
    change: Callable[[BlockTensor], BlockTensor] = module.SCALE_MISTAKES[label]
    seen = 0
    for case in module.CASES["linear"](seed):
        args = rounded(case)
        blocks = [raw for arg in args for raw in getattr(arg, "raws", ())]
        if not any(isinstance(raw, BlockTensor) for raw in blocks):
            continue
        seen += any(not torch.equal(change(raw).scale, raw.scale) for raw in blocks)
    assert seen


def test_what_is_right_is_called_nothing(seed: int) -> None:
    for op in ("swiglu_clamp", "attn_sparse", "rope"):
        reference = op_cases(op).REFERENCES[op]
        for case in op_cases(op).CASES[op](seed):
            found = outcome(case, reference)
            assert found is not None and found.verdict.accepted
            assert name([found], "float32") == ()


def test_another_error_has_no_name(seed: int) -> None:
    cases = op_cases("swiglu").CASES["swiglu"](seed)
    wrong = [outcome(case, lambda x: torch.tanh(x.chunk(2, -1)[0])) for case in cases]
    assert name([found for found in wrong if found is not None], "float32") == ()
