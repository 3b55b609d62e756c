"""What a wrong result looks like: a mistake is an op's reference with one rule broken.

A folder's cases list the mistakes that kernels of its ops are known for (``MISTAKES`` by op, name
and functions of the op's signature; ``SCALE_MISTAKES`` by name, functions of a block-scaled
matrix). They do two things. A case *guards* a rule when the mistake changes its result beyond what
is allowed, and every mistake must be seen by some case. A failed case is *named* by the mistake
that gives what the implementation gave.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from metainfer.formats.block_codecs import BlockTensor
from metainfer.ops.case import DTYPES, Case, Weight, errors
from metainfer.ops.catalog import op_cases
from metainfer.ops.qualify import Outcome, truth

Mistake = Callable[..., Any]
Mistakes = Mapping[str, tuple[Mistake, ...]]

#: How near a result must be to a mistake's to be called by its name, relative to the values.
NEAR: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
)


def mistakes_of(op: str) -> Mistakes:
    """Known mistakes of `op` by name."""
    found: Mistakes = getattr(op_cases(op), "MISTAKES", {}).get(op, {})
    return found


def names_of(op: str) -> tuple[str, ...]:
    """Every rule of `op` that has a name."""
    return tuple(dict.fromkeys([*mistakes_of(op), *_scale_mistakes(op_cases(op), op)]))


def name(outcomes: Iterable[Outcome], dtype: str, more: Mistakes | None = None) -> tuple[str, ...]:
    """What the failed ones of `outcomes` (of one implementation) have in common.

    The mistakes that explain most failures; nothing when none explains any. `more`: mistakes that
    only the caller can know.
    """
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if not outcome.verdict.accepted and outcome.results:
            counts.update(explaining(outcome, dtype, more))
    most = max(counts.values(), default=0)
    return tuple(found for found, count in counts.items() if count == most)


def explaining(outcome: Outcome, dtype: str, more: Mistakes | None = None) -> set[str]:
    """The mistakes whose result is what this outcome's implementation gave."""
    case, kind = outcome.case, DTYPES[dtype]
    found = set()
    for label, wrong in _wrong_results(case, outcome.args, kind, more or {}):
        if len(wrong) == len(outcome.results) and all(
            _near(case, mine, theirs, NEAR[kind])
            for mine, theirs in zip(outcome.results, wrong, strict=True)
        ):
            found.add(label)
    return found


def _wrong_results(
    case: Case, args: tuple[Any, ...], kind: torch.dtype, more: Mistakes
) -> Iterator[tuple[str, list[Tensor]]]:
    """(name, results) of every mistake and every legal arithmetic."""
    module = op_cases(case.op)
    for label, functions in (*mistakes_of(case.op).items(), *more.items()):
        for function in functions:
            yield from _tried(label, case, args, function, kind, kind)
    blocks = any(isinstance(raw, BlockTensor) for raw in _raws(args))
    rounded = getattr(module, "ROUNDED", {}).get(case.op) if blocks else None
    for label, change in _scale_mistakes(module, case.op).items() if blocks else ():
        changed = tuple(_changed(arg, change) for arg in args)
        yield from _tried(label, case, changed, module.REFERENCES[case.op], kind, kind)
        if rounded is not None:
            stored = torch.float64 if kind == torch.float64 else torch.float32
            yield from _tried(label, case, changed, rounded[0], kind, stored)


def _tried(
    label: str,
    case: Case,
    args: tuple[Any, ...],
    function: Mistake,
    kind: torch.dtype,
    weights: torch.dtype,
) -> Iterator[tuple[str, list[Tensor]]]:
    """Some mistakes have no meaning in some cases."""
    try:
        yield label, truth(case, args, function, kind, weights)
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return


def _near(case: Case, mine: Tensor, theirs: Tensor, limit: float) -> bool:
    if mine.shape != theirs.shape:
        return False
    if case.rows is not None and mine.shape[0] > case.rows:
        mine, theirs = mine[: case.rows], theirs[: case.rows]
    if not theirs.is_floating_point():
        return torch.equal(mine.to(theirs.dtype), theirs)
    hole = theirs.isnan()
    if not torch.equal(hole, mine.isnan()):
        return False
    mean, _ = errors(mine.masked_fill(hole, 0), theirs.masked_fill(hole, 0))
    return mean <= limit


def _scale_mistakes(module: ModuleType, op: str) -> Mapping[str, Callable[..., BlockTensor]]:
    if op not in getattr(module, "ROUNDED", {}):
        return {}
    found: Mapping[str, Callable[..., BlockTensor]] = getattr(module, "SCALE_MISTAKES", {})
    return found


def _raws(args: tuple[Any, ...]) -> list[Any]:
    return [raw for arg in args if isinstance(arg, Weight) for raw in arg.raws]


def _changed(arg: Any, change: Callable[..., BlockTensor]) -> Any:
    if not isinstance(arg, Weight):
        return arg
    raws = tuple(change(raw) if isinstance(raw, BlockTensor) else raw for raw in arg.raws)
    return dataclasses.replace(arg, raws=raws)
