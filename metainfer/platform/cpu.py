"""The host processor as a platform: one device, no streams, no graphs; always present."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from metainfer.core.verdict import ACCEPT, Verdict
from metainfer.platform.base import API_VERSION, Declaration, Defaults, Graph, MemoryState, Stream
from metainfer.platform.capability import BFLOAT16, FLOAT16, FLOAT32, INT8
from metainfer.platform.facts import CPU, DeviceFacts, Facts
from metainfer.platform.origins import DERIVED, PROBED, Origins
from metainfer.platform.probe_host import HostProbe, available_memory, probe_host
from metainfer.platform.software import versions

#: Element type -> any of these processor features gives it matrix or dot instructions.
_DOT = {
    BFLOAT16: frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    INT8: frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}),
    FLOAT16: frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


class CpuPlatform:
    """This host's processor through torch's CPU device."""

    name = "cpu"
    vendor = ""
    api_version = API_VERSION

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._facts: Facts | None = None

    def detect(self) -> Verdict:
        return ACCEPT

    def facts(self) -> Facts:
        if self._facts is None:
            self._facts = cpu_facts(probe_host(self._root), versions())
        return self._facts

    def memory(self, index: int = 0) -> MemoryState:
        total = self.facts().device.memory_bytes or 0
        free = available_memory(self._root)
        # An unreadable machine has no memory to give, never all of it.
        return MemoryState(min(free or 0, total), total)

    def trim(self) -> None:
        pass

    def torch_device(self, index: int = 0) -> str:
        return "cpu"

    def guard(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, index: int = 0) -> None:
        pass

    def stream(self, index: int = 0, *, priority: int = 0) -> Stream | None:
        return None

    def graph(self, index: int = 0) -> Graph | None:
        return None

    def providers(self) -> Sequence[Declaration]:
        return ()

    def layouts(self) -> Sequence[Declaration]:
        return ()

    def weight_formats(self) -> Mapping[str, frozenset[str]]:
        return {}

    def defaults(self, plan: Mapping[str, object]) -> Defaults:
        return Defaults()


def cpu_facts(host: HostProbe, software: Mapping[str, str | None]) -> Facts:
    """Facts of a machine whose only device is its processor. Pure."""
    features = host.cpu_features
    dots = None
    if features is not None:
        dots = frozenset({FLOAT32} | {kind for kind, any_of in _DOT.items() if any_of & features})
    device = DeviceFacts(
        kind=CPU,
        name=host.facts.processor or "unknown processor",
        vendor="",
        units=host.facts.usable_cores,
        memory_bytes=host.facts.memory_bytes,
        dot_types=dots,
        storage_types=frozenset({FLOAT32, FLOAT16, BFLOAT16, INT8}),
        features=features,
        hardware_queues=1,
    )
    origins = Origins()
    origins.merge(host.origins)
    for name in ("name", "features"):
        origins.note(f"devices.0.{name}", PROBED, "/proc/cpuinfo")
    for name, source in (("units", "usable_cores"), ("memory_bytes", "memory_bytes")):
        origins.note(f"devices.0.{name}", DERIVED, f"host.{source}")
    origins.note("devices.0.dot_types", DERIVED, "processor features")
    origins.note("devices.0.storage_types", DERIVED, "torch's CPU device")
    origins.note("devices.0.hardware_queues", DERIVED, "calls on a processor run one after another")
    origins.note("software", PROBED, "package metadata")
    return Facts(
        platform="cpu",
        devices=(device,),
        host=host.facts,
        software=dict(software),
        origins=origins.freeze(),
    )
