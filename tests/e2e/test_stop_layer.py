"""A segment that stops at a layer runs those below it alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.core.step import ALL_LAYERS, StepPlan
from metainfer.engine.engine import Engine

PROMPTS = [tuple(range(20, 20 + 7 * n, 1 + n)) for n in (5, 9, 14)]


def answers(model: str, stop: int = ALL_LAYERS, held: int | None = None) -> dict[str, list[int]]:
    """Greedy tokens by request, every segment planned to stop at `stop`; of a model that has lost
    its layers from `held` on."""
    engine = Engine(
        Intent(model=model, platform="cpu", dtype="float64", context=128, concurrency=3)
    )
    engine.start()
    executor: Any = engine._executor
    submit, built = executor.submit, executor._parts.model
    if held is not None:
        _cut(built, held)

    def stopped(plan: StepPlan) -> Any:
        parts = tuple(msgspec.structs.replace(each, stop_layer=stop) for each in plan.segments)
        return submit(msgspec.structs.replace(plan, segments=parts))

    executor.submit = stopped
    found: dict[str, list[int]] = {f"{at}": [] for at in range(len(PROMPTS))}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    try:
        for name, prompt in zip(found, PROMPTS, strict=True):
            engine.submit(Request(name, prompt, params))
        while engine.has_work:
            outputs, _ = engine.step()
            for output in outputs:
                found[output.request_id].extend(output.tokens)
    finally:
        engine.close()
    return found


def _cut(model: Any, held: int) -> None:
    """Take layers away; a dense model norms its last sum as the layer behind it would."""
    if hasattr(model, "parts"):
        model.norm = model._norm_of(held)
        model.parts = [part[:held] for part in model.parts]
    else:
        model.layers = model.layers[:held]


@pytest.mark.parametrize("model", ["random:tiny-llama", "random:tiny-deepseek-v4"])
def test_layers_from_the_stop_on_do_not_run(model: str) -> None:
    short, whole = answers(model, held=2), answers(model)
    assert answers(model, stop=2) == short != whole
    assert all(len(tokens) == 12 for tokens in short.values())
