"""The page of predictions: every published row is there, and its sums are those of its rows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import published  # noqa: E402
import stated_models  # noqa: E402

PAGE = (ROOT / "docs" / "predictions.md").read_text()


def test_every_published_row_is_on_the_page() -> None:
    assert len(published.ALL) == 29 + 8 + 34 + 7
    for row in published.ALL:
        (line,) = [
            each for each in PAGE.splitlines() if each.startswith(f"| {row.box} | {row.what} ")
        ]
        assert row.phase or f"none: {row.why}" in line
    for figure in ("141.6", "46.6", "33,937", "60,486", "22,584", "contradiction"):
        assert figure in PAGE


def test_coverage_is_counted_over_all_predicted_rows() -> None:
    hits, rows = map(int, re.findall(r"All rows in the band: (\d+) of (\d+)", PAGE)[0])
    assert rows == sum(bool(row.phase) for row in published.ALL)
    assert hits == len(re.findall(r"\| yes \|$", PAGE, re.MULTILINE))
    assert rows - hits == len(re.findall(r"\| \*\*no\*\* \|$", PAGE, re.MULTILINE))


def test_stated_models_are_those_of_their_documents() -> None:
    """40.3 billion active parameters of GLM-5.2, 753.3 with all experts; 22 GFLOP of attention and
    180 of scores at a million tokens."""
    one = stated_models.glm(1)
    assert (one.dense + one.head + one.routed) / 1e9 == pytest.approx(40.3, rel=0.02)
    experts = one.expert_bytes / 0.5625
    assert (one.dense_bytes / 2 + experts) / 1e9 == pytest.approx(753.3 - 10, rel=0.02)
    heads, whole = one.costs.decode_attention_flops(stated_models.MILLION)
    assert (heads / 1e9, whole / 1e9) == pytest.approx((22.2, 180.4), rel=0.01)
    costs = stated_models.V41Costs()
    assert costs.decode_attention_flops(8192)[0] == pytest.approx(3.19e9, rel=0.01)
    assert costs.decode_attention_flops(131_072)[1] == pytest.approx(3.2e9, rel=0.02)
    decode = stated_models.v41(1, prompt=False)
    assert (decode.dense + decode.head + decode.routed) / 1e9 == pytest.approx(16.13, rel=0.01)
