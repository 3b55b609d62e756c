"""NVIDIA GPUs as a platform. torch is imported inside methods that touch the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from metainfer.core.verdict import ACCEPT, Verdict, reject
from metainfer.platform.base import (
    API_VERSION,
    Declaration,
    Defaults,
    Event,
    Graph,
    MemoryState,
    Stream,
)
from metainfer.platform.facts import CUDA, Facts
from metainfer.platform.origins import PROBED, Origins
from metainfer.platform.probe_cuda import CudaProbe, probe_cuda
from metainfer.platform.probe_host import HostProbe, probe_host
from metainfer.platform.software import versions


class CudaPlatform:
    """NVIDIA GPUs through torch's CUDA device."""

    name = CUDA
    vendor = "nvidia"
    api_version = API_VERSION

    def __init__(self, probe: Callable[[], CudaProbe] = probe_cuda) -> None:
        self._probe_once = probe
        self._probed: CudaProbe | None = None
        self._facts: Facts | None = None

    def _probe(self) -> CudaProbe:
        if self._probed is None:
            self._probed = self._probe_once()
        return self._probed

    def detect(self) -> Verdict:
        probe = self._probe()
        if not probe.devices:
            return reject("device", probe.reason or "no NVIDIA device")
        return ACCEPT

    def facts(self) -> Facts:
        if self._facts is None:
            self._facts = cuda_facts(self._probe(), probe_host(), versions())
        return self._facts

    def memory(self, index: int = 0) -> MemoryState:
        torch = _torch()
        free, total = torch.cuda.mem_get_info(index)
        return MemoryState(free, total, torch.cuda.memory_reserved(index))

    def trim(self) -> None:
        torch = _torch()
        torch.cuda.empty_cache()

    def torch_device(self, index: int = 0) -> str:
        return f"cuda:{index}"

    @contextmanager
    def guard(self, index: int) -> Iterator[None]:
        torch = _torch()
        with torch.cuda.device(index):
            yield

    def synchronize(self, index: int = 0) -> None:
        torch = _torch()
        torch.cuda.synchronize(index)

    def stream(self, index: int = 0, *, priority: int = 0) -> Stream | None:
        torch = _torch()
        return CudaStream(torch.cuda.Stream(device=index, priority=priority))

    def graph(self, index: int = 0) -> Graph | None:
        return CudaGraph(index)

    def providers(self) -> Sequence[Declaration]:
        return ()

    def layouts(self) -> Sequence[Declaration]:
        return ()

    def weight_formats(self) -> Mapping[str, frozenset[str]]:
        return {}

    def defaults(self, plan: Mapping[str, object]) -> Defaults:
        return Defaults()


def cuda_facts(probe: CudaProbe, host: HostProbe, software: Mapping[str, str | None]) -> Facts:
    """Host and device readings as one `Facts`. Pure."""
    origins = Origins()
    origins.merge(host.origins)
    origins.merge(probe.origins)
    origins.note("software", PROBED, "package metadata, NVML, CUDA driver")
    return Facts(
        platform=CUDA,
        devices=probe.devices,
        host=host.facts,
        links=probe.links,
        software={**software, **probe.software},
        origins=origins.freeze(),
    )


def _torch() -> Any:
    """torch, imported on first use; untyped, since half of its CUDA interface is."""
    import torch

    return torch


class CudaEvent:
    """A timing event."""

    def __init__(self, event: Any) -> None:
        self.raw = event

    def synchronize(self) -> None:
        self.raw.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        if not isinstance(earlier, CudaEvent):
            raise TypeError("events of two platforms have no time between them")
        return float(earlier.raw.elapsed_time(self.raw)) / 1e3


class CudaStream:
    """A CUDA stream; entering it makes it current on its device."""

    def __init__(self, stream: Any) -> None:
        self.raw = stream
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> CudaStream:
        torch = _torch()
        scope = torch.cuda.stream(self.raw)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().__exit__(None, None, None)

    def record(self) -> CudaEvent:
        torch = _torch()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.raw)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise TypeError("a stream waits for events of its own platform")
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        self.raw.synchronize()


class CudaGraph:
    """A CUDA graph. Work inside `capture` is recorded, not run."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._graph: Any = None

    @contextmanager
    def capture(self, pool: object | None = None) -> Iterator[None]:
        torch = _torch()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._index), torch.cuda.graph(self._graph, pool=pool):
            yield

    def replay(self) -> None:
        self._graph.replay()

    @property
    def pool(self) -> object:
        return self._graph.pool()
