"""What is computed beside what: off until it is asked for or measured, an error where it cannot."""

from __future__ import annotations

import pytest
from test_spread_contexts import planned

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import Origin
from metainfer.planner.resolve import Resolved

V4 = "random:deepseek-v4-flash?layers=4"
DENSE = "random:qwen3-8b?layers=4"


def said(found: Resolved, key: str) -> tuple[object, Origin, list[str]]:
    (each,) = (each for each in found.plan.decisions if each.key == key)
    return each.value, each.origin, [r.code for loser in each.losers for r in loser.reasons]


def test_nothing_takes_turns_unmeasured() -> None:
    found = planned(V4, context=8192, parallel="tp8")
    for key in ("halves", "shared_beside"):
        assert said(found, key) == (0, Origin.SEED, ["unmeasured"])


def test_who_asks_gets_it_and_it_is_said() -> None:
    found = planned(V4, context=8192, parallel="tp8", halves=4096, shared_beside=64)
    assert (found.plan.halves, found.plan.shared_beside) == (4096, 64)
    assert said(found, "halves")[:2] == (4096, Origin.FLAG)
    assert said(found, "shared_beside")[:2] == (64, Origin.FLAG)
    off = planned(V4, context=8192, parallel="cp8/tp8", halves=0)
    assert said(off, "halves")[:2] == (0, Origin.FLAG)


@pytest.mark.parametrize(
    ("model", "wish", "reason"),
    [
        (DENSE, {"parallel": "single", "halves": 1}, "no rank waits"),
        (DENSE, {"parallel": "8x", "halves": 1}, "no rank waits"),
        (V4, {"parallel": "cp8/tp8", "halves": 1}, "rows or a cache"),
        (V4, {"parallel": "tp8cs8", "halves": 1}, "rows or a cache"),
        (DENSE, {"parallel": "tp8", "shared_beside": 8}, "no shared expert"),
        (V4, {"parallel": "dp8ep8", "shared_beside": 8}, "domains meet"),
    ],
)
def test_what_cannot_be_is_an_error_with_its_reasons(
    model: str, wish: dict[str, object], reason: str
) -> None:
    with pytest.raises(RefusedError, match=reason):
        planned(model, context=8192, **wish)


def test_a_bound_is_a_number_of_tokens() -> None:
    with pytest.raises(UsageError, match="--halves is -1"):
        planned(DENSE, context=8192, parallel="tp8", halves=-1)
