"""This machine as the planner sees it: facts, registry, evidence, fingerprint. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from metainfer.core.records import Fingerprint
from metainfer.kernels.evidence import evidence_for
from metainfer.kernels.impl import Evidence
from metainfer.kernels.registry import Registry
from metainfer.ops.catalog import builtin_registry
from metainfer.platform import software
from metainfer.platform.facts import DeviceFacts, Facts
from metainfer.platform.probe_host import probe_host

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    facts: Facts
    registry: Registry
    evidence: Mapping[str, Evidence]
    fingerprint: str

    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.facts.device.kind)


def open_machine(platform: str = "auto") -> Machine:
    host = probe_host()
    device = DeviceFacts(
        kind="cpu",
        name=host.facts.processor or "cpu",
        features=host.cpu_features,
        read_bytes_s=2e10,
        dot_flops={"float32": 1.5e11},
    )
    facts = Facts(platform="cpu", devices=(device,), host=host.facts, software=software.versions())
    return Machine(
        facts=facts,
        registry=builtin_registry(),
        evidence=evidence_for(facts),
        fingerprint=Fingerprint({"device": device.name}).id,
    )
