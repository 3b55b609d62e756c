"""B-24: what drafts brought, and the alarm, are on the metrics page."""

from __future__ import annotations

import pytest

from metainfer.engine.protocol import EngineStats
from metainfer.server.metrics import Metrics


@pytest.mark.parametrize("alarm", ["", "none of the last 512 drafted tokens was accepted"])
def test_b24_drafts_are_counted_and_the_alarm_shows(alarm: str) -> None:
    stats = EngineStats(
        drafted_tokens=40, accepted_drafts=7, draft_alarm=alarm, draft_depth=3, draft_gain=1.25
    )
    page = Metrics("m", lambda: stats, lambda: "ready").page().decode()
    assert 'metainfer_drafted_tokens_total{model_name="m"} 40.0' in page
    assert 'metainfer_accepted_draft_tokens_total{model_name="m"} 7.0' in page
    assert 'metainfer_draft_depth{model_name="m"} 3.0' in page
    assert 'metainfer_draft_gain{model_name="m"} 1.25' in page
    assert f'metainfer_draft_alarm{{model_name="m"}} {float(bool(alarm))}' in page
