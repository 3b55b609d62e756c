"""The fastest bundle that fits: tried in order, on the record, and a refusal that helps."""

from __future__ import annotations

import pytest

from metainfer.core.errors import RefusedError
from metainfer.core.verdict import Reason
from metainfer.kernels.choice import Bundle, RefusedBundle, Selection
from metainfer.planner.fitting import DOES_NOT_FIT, first_that_fits

SIZES = {"wide@1": 90, "middle@1": 60, "narrow@1": 20}
BUNDLES = tuple(Bundle({"weight": name}, (), None) for name in SIZES)
SELECTION = Selection(
    BUNDLES[0],
    (
        RefusedBundle({"weight": "odd@1"}, (Reason("device", "another device"),)),
        *(RefusedBundle(b.layouts, (Reason("slower", "slower"),)) for b in BUNDLES[1:]),
    ),
    BUNDLES[1:],
)


def within(memory: int):
    def attempt(bundle: Bundle) -> int:
        need = SIZES[bundle.layouts["weight"]]
        if need > memory:
            reason = Reason("memory", f"{need} B needed", {"need": need, "have": memory})
            raise RefusedError("too large", reasons=(reason,), code=DOES_NOT_FIT)
        return need

    return attempt


@pytest.mark.parametrize(
    ("memory", "winner", "large"),
    [(100, "wide@1", []), (70, "middle@1", ["wide@1"]), (20, "narrow@1", ["wide@1", "middle@1"])],
)
def test_first_that_fits_wins(memory: int, winner: str, large: list[str]) -> None:
    selection, held = first_that_fits(SELECTION, within(memory))
    assert selection.bundle.name == winner and held == SIZES[winner]
    codes = {lost.name: lost.reasons[0].code for lost in selection.refused}
    assert [name for name, code in codes.items() if code == "memory"] == large
    assert codes["odd@1"] == "device" and winner not in codes
    assert set(codes) == {*SIZES, "odd@1"} - {winner}


def test_refusal_is_that_of_the_thriftiest() -> None:
    with pytest.raises(RefusedError) as caught:
        first_that_fits(SELECTION, within(10))
    assert caught.value.reasons[0].data == {"need": 20, "have": 10}


def test_other_refusals_are_not_swallowed() -> None:
    def attempt(bundle: Bundle) -> int:
        raise RefusedError("a state takes back fewer drafts", code="draft_rewind")

    with pytest.raises(RefusedError, match="fewer drafts"):
        first_that_fits(SELECTION, attempt)
