"""A case: one call of an op on made-up inputs, with what its answer is judged by.

Cases are shared by tests, first-start qualification and benchmarks. Their float64 tensors stand
for activations and are rounded to the dtype under test; float32 tensors (tables, parameters) keep
their type; `Weight` is packed into the layout of the implementation under test.

Judgement: the truth is the reference in float64 on the *rounded* inputs. An implementation's error
may be `FACTOR` times that of the recipe (what the checkpoint's own code does in that dtype), plus a
floor of rounding noise, in the two norms of `errors`. With block-scaled weights there are two
truths, activations as they are or rounded as the checkpoint's recipe does (``ROUNDED`` of a
folder's cases: reference and recipe by op); a result must meet one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.formats.quant import Stored
from metainfer.kernels.impl import ALL_PHASES

FACTOR = 1.25

#: Floor of the error relative to the truth, in units of the dtype's epsilon: (mean, worst).
#: Wide types: other summation orders. Half types: one rounding of the result.
FLOORS: Mapping[torch.dtype, tuple[float, float]] = MappingProxyType(
    {
        torch.float64: (16.0, 64.0),
        torch.float32: (8.0, 32.0),
        torch.float16: (0.35, 1.0),
        torch.bfloat16: (0.35, 1.0),
    }
)

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
    }
)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as the checkpoint holds it: parts along N, and a bias in float64. `role`: whose
    layout packs it."""

    raws: tuple[Stored, ...]
    bias: Tensor | None = None
    role: str = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`shape`, `semantics`, `schemes`, `phases` say who must serve it (as in `OpRequest`).

    `outputs`: positions of arguments written in place, judged like results. `rows`: only that many
    leading rows of the result count. `exact`: equal to the reference in the dtype, bit for bit.
    `fused`: positions of arguments [T, heads, D] that the implementation under test gets as slices
    of one tensor, as a fused projection leaves them. `ahead`: positions of rows and of a weight; an
    implementation that takes rows rounded ahead (`Impl.rounds`) gives the same bits for them.
    """

    op: str
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=dict)
    semantics: frozenset[str] = frozenset()
    schemes: tuple[str, ...] = ()
    phases: frozenset[Phase] = ALL_PHASES
    outputs: tuple[int, ...] = ()
    rows: int | None = None
    exact: bool = False
    fused: tuple[int, ...] = ()
    ahead: tuple[int, int] | None = None


Cases = Callable[[int], list[Case]]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(g: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """float64 noise on CPU."""
    return torch.randn(*shape, generator=g, dtype=torch.float64) * scale


def integers(g: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=g)


def errors(candidate: Tensor, truth: Tensor) -> tuple[float, float]:
    """Root mean square and largest deviation, each relative to that of the truth."""
    if truth.numel() == 0:
        return 0.0, 0.0
    want = truth.double()
    off = candidate.double().to(want.device) - want
    if not torch.isfinite(off).all():
        return float("inf"), float("inf")
    mean = off.square().mean().sqrt() / want.square().mean().sqrt().clamp_min(1e-30)
    worst = off.abs().amax() / want.abs().amax().clamp_min(1e-30)
    return mean.item(), worst.item()


def allowed(recipe: tuple[float, float], dtype: torch.dtype) -> tuple[float, float]:
    """The error that a candidate may have, given the recipe's."""
    eps = torch.finfo(dtype).eps
    mean, worst = FLOORS[dtype]
    return (
        max(FACTOR * recipe[0], mean * eps),
        max(FACTOR * recipe[1], worst * eps),
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """Uninitialised tensors hold NaN (integers their maximum) inside: an output that is not
    written in full shows. Uses torch's deterministic mode, which may warn for a few ops."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
