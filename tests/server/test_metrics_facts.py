"""Metrics of what was decided and found: present where known, absent where not; the document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import metainfer
from metainfer.engine.protocol import EngineInfo, EngineStats
from metainfer.platform.facts import LinkFacts
from metainfer.server.metrics import Metrics
from metainfer.server.metrics_reference import families, reference

ROOT = Path(__file__).parents[2]
OPS = {
    f"{site}@{phase}": {"impl": "x/y", "quality": quality, "evidence": "ran on this card"}
    for phase in ("chunk", "decode")
    for site, quality in (("norm", "native"), ("linear.qkv", "native"), ("moe", "reference"))
}
LEDGER = [
    {"item": "embed", "kind": "weights", "bytes": 100},
    {"item": "kv", "kind": "kv", "bytes": 700},
    {"item": "linear", "kind": "weights", "bytes": 50},
    {"item": "activations", "kind": "transient", "bytes": 30},
    {"item": "left", "kind": "free", "bytes": 10_000},
]
LINKS = (
    LinkFacts(source=-1, target=0, kind="pcie", width=8, max_width=16, max_generation=5),
    LinkFacts(source=0, target=1, peer_read=True, peer_write=False),
)
INFO = EngineInfo(
    "m", 300, 2048, 4096, 4, (1,), {"plan": {"ops": OPS}, "ledger": LEDGER},
    (("weights", 1.5), ("warm-up", 0.25)), {"weights": 150, "kv": 704}, LINKS,
)  # fmt: skip


def samples(info: EngineInfo | None) -> dict[tuple[str, ...], float]:
    """(name, labels in alphabetical order without the model's name ...) -> value."""
    metrics = Metrics("m", EngineStats, lambda: "ready")
    metrics.info, metrics.fingerprint = info, "f00d"
    return {
        (
            sample.name.removeprefix("metainfer_"),
            *(text for label, text in sorted(sample.labels.items()) if label != "model_name"),
        ): sample.value
        for family in text_string_to_metric_families(metrics.page().decode())
        for sample in family.samples
    }


def test_what_is_known_has_a_sample() -> None:
    found = samples(INFO)
    assert found["build_info", "f00d", metainfer.__version__] == 1
    assert found["start_phase_seconds", "warm-up"] == 0.25
    assert [found["ops", q] for q in ("native", "compatible", "reference")] == [4, 0, 2]
    assert found["kv_cache_tokens",] == 4096
    assert found["memory_planned_bytes", "weights"] == found["memory_held_bytes", "weights"] == 150
    assert (found["memory_planned_bytes", "kv"], found["memory_held_bytes", "kv"]) == (700, 704)
    assert (found["link_lanes", "host", "0"], found["link_max_lanes", "host", "0"]) == (8, 16)
    assert (found["link_peer_read", "0", "1"], found["link_peer_write", "0", "1"]) == (1, 0)


def test_what_is_unknown_has_none() -> None:
    found = samples(INFO)
    assert ("memory_held_bytes", "transient") not in found
    assert found["memory_planned_bytes", "transient"] == 30
    assert ("memory_planned_bytes", "free") not in found
    assert ("link_generation", "host", "0") not in found
    assert ("link_max_generation", "host", "0") in found
    assert not any(key[0] == "link_bytes_per_second" for key in found)
    starting = samples(None)
    assert not any(key[0].startswith(("build", "ops", "memory", "link", "kv_cache_tokens", "start"))
                   for key in starting)  # fmt: skip


@pytest.mark.parametrize("alarms", [(), ("0 of 64 eligible look-ups hit",)])
def test_b25_a_cache_that_never_hits_shows(alarms: tuple[str, ...]) -> None:
    page = Metrics("m", lambda: EngineStats(cache_alarms=alarms), lambda: "ready").page().decode()
    assert f'metainfer_prefix_cache_alarm{{model_name="m"}} {float(bool(alarms))}' in page


def test_the_document_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference(), (
        "python -m metainfer.server.metrics_reference > docs/metrics.md"
    )


def test_every_family_of_a_real_page_is_in_the_document() -> None:
    known = {family.name for family in families()}
    metrics = Metrics("m", EngineStats, lambda: "ready")
    metrics.info = INFO
    page: Any = text_string_to_metric_families(metrics.page().decode())
    assert {family.name for family in page} == known
    assert len(known) > 40
    assert all(family._labelnames[0] == "model_name" for family in families())
