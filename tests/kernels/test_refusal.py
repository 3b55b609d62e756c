"""No bundle serves: every blocker shows, once, whatever else stands against the model."""

from __future__ import annotations

import pytest
from machines import card
from test_select import REQUESTS, bundled, kernel, request, trusted

from metainfer.core.errors import RefusedError
from metainfer.kernels.choice import Policy
from metainfer.kernels.conditions import device_kind
from metainfer.kernels.select import select


def test_no_bundle_lists_every_reason_once() -> None:
    """All blockers of all bundles in one pass; the text names each (implementation, reason) once,
    the data says where it holds."""
    registry = bundled().without("embed/rows")
    registry.add(kernel("other", op="embed", conditions=(device_kind("cpu"),)))
    both = (*REQUESTS, request("embed", site="embed.again"))
    with pytest.raises(RefusedError) as refused:
        select(registry, both, card((9, 0)), Policy(evidence=trusted(registry)))
    error = refused.value
    assert error.code == "no_bundle" and error.exit_code == 1
    (reason,) = error.reasons
    assert reason.code == "device" and reason.data["impl"] == "embed/other"
    assert reason.data["sites"] == ["embed@decode", "embed.again@decode"]
    assert reason.data["bundles"] == ["a@1", "b@1"]
    assert str(error).count("runs on cpu") == 1
    none = bundled().without("embed/rows")
    with pytest.raises(RefusedError, match="embed: no implementation is declared"):
        select(none, REQUESTS, card((9, 0)), Policy(evidence=trusted(none)))


def test_a_refused_pin_hides_no_other_blocker() -> None:
    """The pin fails in one bundle, another site in the other; both show."""
    registry = bundled()
    policy = Policy(evidence=trusted(registry), pins={"linear": "fast"})
    with pytest.raises(RefusedError) as refused:
        select(registry, REQUESTS, card((9, 0)), policy)
    found = {(r.data["impl"], tuple(r.data["bundles"])) for r in refused.value.reasons}
    assert found == {("linear/fast", ("b@1",)), ("embed/rows", ("a@1",))}
    assert refused.value.code == "pin_refused" and "linear=fast" in refused.value.cause
