"""A closed engine holds no weights: on a card the next one of the process needs their place."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine


@pytest.mark.parametrize("model", ["random:tiny-llama", "random:tiny-deepseek-v4"])
def test_weights_and_caches_go_when_an_engine_is_closed(model: str) -> None:
    engine = Engine(Intent(model=model, platform="cpu", context=64, concurrency=1))
    engine.start()
    engine.submit(Request("a", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=2)))
    while engine.has_work:
        engine.step()
    executor: Any = engine._executor
    parts = executor._parts
    held = [weakref.ref(tensor) for tensor in vars(parts.model)["ends"].head.data.values()]
    held.append(weakref.ref(parts.store))
    assert held and all(ref() is not None for ref in held)
    del parts
    engine.close()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
    assert engine.resolved is not None and executor is not None  # whoever still asks what ran
