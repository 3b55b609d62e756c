"""The vendor seam: what a platform plug-in provides, version 0 until two vendors use it.

A plug-in is a package with an entry point in the group ``metainfer.platforms``; its attribute is a
callable without arguments (a class will do) that returns one `Platform`. The built-in platforms go
through the same interface. There are no hooks and no patching: a vendor who needs one has found a
missing seam here. The core asks for facts and for declared implementations, and never names a
device. torch and vendor libraries are imported inside methods, not with the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from metainfer.core.verdict import Verdict
from metainfer.platform.facts import Facts

API_VERSION = 0


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Bytes of one device now. `reserved`: held by our own allocator, in use or not."""

    free: int
    total: int
    reserved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a platform suggests where neither the user nor a record has spoken; None: no opinion."""

    chunk_tokens: int | None = None
    page_multiple: int | None = None
    graph_buckets: tuple[int, ...] | None = None


class Declaration(Protocol):
    """An `Impl` or a `Layout` of the kernels room, which lies above this one."""

    @property
    def id(self) -> str: ...


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None: ...

    def seconds_since(self, earlier: Event) -> float:
        """Device time between two recorded events that have completed."""
        ...


class Stream(Protocol):
    """A queue of device work. Entering it makes it current."""

    def __enter__(self) -> Stream: ...

    def __exit__(self, *error: object) -> None: ...

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Later work of this stream starts after `event`; the host does not wait."""
        ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Recorded device work. Graphs captured with the same `pool` share memory."""

    def capture(self, pool: object | None = None) -> AbstractContextManager[None]: ...

    def replay(self) -> None: ...

    @property
    def pool(self) -> object: ...


@runtime_checkable
class Platform(Protocol):
    """One kind of device, its facts and its extra implementations.

    `name` is what ``--platform`` takes and must equal the entry point's name. `api_version` must
    equal `API_VERSION`.
    """

    name: str
    vendor: str
    api_version: int

    def detect(self) -> Verdict:
        """Whether this machine has such a device; the reasons when not. Cheap, takes no memory."""
        ...

    def facts(self) -> Facts:
        """The whole machine as seen by this platform. Unknown is None."""
        ...

    def memory(self, index: int = 0) -> MemoryState:
        """Device memory; for host memory what a container may use, never the whole machine's."""
        ...

    def trim(self) -> None:
        """Give cached, unused memory back."""
        ...

    def torch_device(self, index: int = 0) -> str:
        """The device string that torch takes."""
        ...

    def guard(self, index: int) -> AbstractContextManager[None]:
        """Makes device `index` current."""
        ...

    def synchronize(self, index: int = 0) -> None:
        """Wait for all work of one device."""
        ...

    def stream(self, index: int = 0, *, priority: int = 0) -> Stream | None:
        """A new stream, or None where there is one queue; lanes then run in order, on record."""
        ...

    def graph(self, index: int = 0) -> Graph | None:
        """A new graph, or None where there are none; steps then run eagerly, on record."""
        ...

    def providers(self) -> Sequence[Declaration]:
        """Further `Impl` declarations (torch-free to import)."""
        ...

    def layouts(self) -> Sequence[Declaration]:
        """Further `Layout` declarations."""
        ...

    def weight_formats(self) -> Mapping[str, frozenset[str]]:
        """Storage scheme -> ops that consume it natively."""
        ...

    def defaults(self, plan: Mapping[str, object]) -> Defaults:
        """Suggestions for the plan so far; the user's word wins."""
        ...


#: What `discovery` checks for, so that an incomplete plug-in is named at start, not at first use.
MEMBERS = (
    "name",
    "vendor",
    "api_version",
    "detect",
    "facts",
    "memory",
    "trim",
    "torch_device",
    "guard",
    "synchronize",
    "stream",
    "graph",
    "providers",
    "layouts",
    "weight_formats",
    "defaults",
)
