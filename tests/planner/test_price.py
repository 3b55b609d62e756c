"""What tokens cost on a machine whose file says its price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.core.intent import Intent
from metainfer.engine.elsewhere import describe
from metainfer.planner.opening import open_model
from metainfer.planner.predict import Prediction
from metainfer.platform.machine_catalog import find_machine

MODEL = "random:deepseek-v4-flash?layers=12"


def predicted(price: float | None) -> Prediction:
    machine = find_machine("1x-h200")
    host = replace(machine.facts.host, price_hour=price)
    intent = Intent(model=MODEL, concurrency=4)
    there = replace(describe(machine.name, intent), facts=replace(machine.facts, host=host))
    found = there.resolve(open_model(MODEL), intent).chosen.prediction
    assert found is not None
    return found


def test_a_machine_s_price_is_that_of_its_tokens() -> None:
    """3,600 an hour is 1 a second: a million tokens cost a million over the rate."""
    free, priced = predicted(None), predicted(3600.0)
    assert free.price(1.0) is None and priced.price(None) is None
    assert free.decode_tok_s == priced.decode_tok_s
    said = priced.to_json()
    rates = {"answer_price": priced.decode_tok_s, "prompt_price": priced.prefill_tok_s}
    for key, rate in rates.items():
        assert rate is not None and said[key] == pytest.approx(1e6 / rate, rel=1e-3)
