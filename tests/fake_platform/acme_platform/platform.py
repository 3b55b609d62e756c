"""The platform object of a device that runs on CPU tensors under another name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from metainfer.core.verdict import Verdict, require
from metainfer.platform.base import Declaration, Defaults, Graph, MemoryState, Stream
from metainfer.platform.facts import DeviceFacts, Facts
from metainfer.platform.origins import VENDOR, Origins
from metainfer.platform.probe_host import probe_host
from metainfer.platform.software import versions

MEMORY = 8 << 30


class AcmePlatform:
    name = "acme"
    vendor = "acme"
    api_version = 0

    def detect(self) -> Verdict:
        present = os.environ.get("ACME_DEVICE", "1") != "0"
        return require(present, "device", "no Acme board answers (ACME_DEVICE is 0)")

    def facts(self) -> Facts:
        host = probe_host()
        board = DeviceFacts(
            kind="fake",
            name="Acme One",
            vendor="acme",
            units=16,
            memory_bytes=MEMORY,
            shared_bytes_per_block=64 * 1024,
            warp=64,
            dot_types=frozenset({"float32", "float16", "bfloat16", "int8"}),
            storage_types=frozenset({"float32", "float16", "bfloat16", "int8"}),
            features=frozenset(),
            read_bytes_s=4.0e11,
            dot_flops={"float32": 2e13, "bfloat16": 8e13},
            hardware_queues=1,
        )
        origins = Origins()
        origins.merge(host.origins)
        origins.note("devices.0", VENDOR, "Acme One data sheet, revision 3")
        return Facts(
            platform="acme",
            devices=(board,),
            host=host.facts,
            software={**versions(), "triton": None},
            origins=origins.freeze(),
        )

    def memory(self, index: int = 0) -> MemoryState:
        return MemoryState(free=MEMORY - (1 << 28), total=MEMORY)

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
        from acme_platform.impls import IMPLS

        return IMPLS

    def layouts(self) -> Sequence[Declaration]:
        return ()

    def weight_formats(self) -> Mapping[str, frozenset[str]]:
        return {"BF16": frozenset({"linear"})}

    def defaults(self, plan: Mapping[str, object]) -> Defaults:
        return Defaults(chunk_tokens=512, page_multiple=64)
