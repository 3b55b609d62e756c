"""Metrics of what does not change while serving: start-up, kernels, memory, links.

Only what is known has a sample: an unread link or an uncounted pool is absent, never zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import metainfer
from metainfer.engine.protocol import EngineInfo
from metainfer.platform.facts import LinkFacts

Samples = Iterable[tuple[tuple[str, ...], float]]
HOST = "host"


def gauge(name: str, text: str, model: str, samples: Samples, labels: tuple[str, ...] = ()) -> Any:
    """The family ``metainfer_<name>``; a sample is (values of `labels`, value)."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"metainfer_{name}", text, labels=["model_name", *labels])
    for values, value in samples:
        family.add_metric([model, *values], value)
    return family


def planned_bytes(info: EngineInfo) -> dict[str, int]:
    """Bytes per kind of the plan's memory ledger, what is left free not counted."""
    found: dict[str, int] = {}
    for row in info.plan.get("ledger", ()):
        if row["kind"] != "free":
            found[row["kind"]] = found.get(row["kind"], 0) + row["bytes"]
    return found


def op_counts(info: EngineInfo) -> dict[str, int]:
    """Places of the plan where an op runs, phase by phase, per quality of the chosen kernel."""
    found = {"native": 0, "compatible": 0, "reference": 0}
    for op in info.plan.get("plan", {}).get("ops", {}).values():
        found[op["quality"]] = found.get(op["quality"], 0) + 1
    return found


def facts(model: str, info: EngineInfo | None, fingerprint: str) -> Iterator[Any]:
    """The families; without samples until the engine is ready (`info` None)."""
    version = [] if info is None else [((metainfer.__version__, fingerprint), 1.0)]
    yield gauge(
        "build_info", "1; version and the plan in use.", model, version, ("version", "plan")
    )
    verdict = {} if info is None else info.plan.get("verification", {})
    yield gauge(
        "plan_verified",
        "1 if verify passed for this very plan on this machine, else 0.",
        model,
        [((), float(verdict["verified"]))] if "verified" in verdict else [],
    )
    phases = () if info is None else info.start_phases
    yield gauge(
        "start_phase_seconds",
        "Duration of a start-up phase.",
        model,
        [((name,), seconds) for name, seconds in phases],
        ("phase",),
    )
    counts = {} if info is None else op_counts(info)
    yield gauge(
        "ops",
        "Ops of the plan, phase by phase, by quality of the chosen kernel; reference: a fallback.",
        model,
        [((quality,), float(count)) for quality, count in counts.items()],
        ("quality",),
    )
    yield gauge(
        "kv_cache_tokens",
        "Tokens that the cache can hold.",
        model,
        [] if info is None else [((), float(info.kv_tokens))],
    )
    planned = {} if info is None else planned_bytes(info)
    held = {} if info is None else info.held_bytes
    for name, text, pools in (
        ("memory_planned_bytes", "Memory by the plan's ledger, per pool.", planned),
        ("memory_held_bytes", "Memory in fact held after the start, where counted.", held),
    ):
        yield gauge(
            name, text, model, [((pool,), float(size)) for pool, size in pools.items()], ("pool",)
        )
    yield from _links(model, () if info is None else info.links)


def end(index: int) -> str:
    """The name of a link's end: a device's number, or the host's memory."""
    return HOST if index < 0 else str(index)


def _links(model: str, links: tuple[LinkFacts, ...]) -> Iterator[Any]:
    read: tuple[tuple[str, str, str], ...] = (
        ("link_lanes", "PCIe lanes of a link, as trained at the start.", "width"),
        ("link_max_lanes", "PCIe lanes that both ends of a link could use.", "max_width"),
        ("link_generation", "PCIe generation of a link at the start.", "generation"),
        ("link_max_generation", "PCIe generation that both ends could use.", "max_generation"),
        ("link_bytes_per_second", "Rate of a link, where known.", "bytes_s"),
        ("link_peer_read", "1 if the driver says that peers can read.", "peer_read"),
        ("link_peer_write", "1 if the driver says that peers can write.", "peer_write"),
    )
    for name, text, field in read:
        samples = [
            ((end(link.source), end(link.target)), float(value))
            for link in links
            if (value := getattr(link, field)) is not None
        ]
        yield gauge(name, text, model, samples, ("source", "target"))
