"""On a card: every implementation that says it runs there passes its cases, in all its types."""

from __future__ import annotations

import pytest
import torch

from metainfer.core.step import Phase
from metainfer.kernels.audit import TARGETS, target_facts
from metainfer.kernels.impl import Context, Impl, OpRequest
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.qualify import qualify

REGISTRY = builtin_registry()
RUNS = [
    (impl, dtype)
    for impl in REGISTRY.impls()
    if impl.provider in ("triton", "cuda", "torch", "reference")
    for dtype in sorted(impl.dtypes - {"float64"})
]


@pytest.mark.gpu
@pytest.mark.parametrize(("impl", "dtype"), RUNS, ids=lambda v: v.id if isinstance(v, Impl) else v)
def test_implementation_passes_on_this_card(impl: Impl, dtype: str, seed: int) -> None:
    import triton

    major, minor = torch.cuda.get_device_capability()
    target = f"sm_{major}{minor}"
    if target not in TARGETS:
        pytest.skip(f"no facts for {target}")
    facts = target_facts(target, {"triton": triton.__version__, "torch": torch.__version__})
    request = OpRequest(impl.op, impl.op, Phase.DECODE, dtype, {})
    reasons = [r for c in impl.conditions for r in c(Context(request, facts)).reasons]
    if any(reason.code in ("device", "capability") for reason in reasons):
        pytest.skip("not for this card")
    verdict = qualify(impl, dtype, "cuda", facts, REGISTRY, seed=seed)
    assert verdict.accepted, [reason.message for reason in verdict.reasons]
