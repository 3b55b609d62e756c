"""A Hopper card seen as a consumer-class one: what the target cards will run, executed here.

Kernels are compiled for capability 8.9 (no wgmma, no bulk copies: `mma.sync` and `cp.async`) and
may take 101,376 bytes of shared memory a block; ptxas assembles that code for the card that is
here. Clocks, memory rate and multiprocessors stay the card's own: this proves the code, and says
what it takes on this card, not what a consumer card takes.

As a program it is the child that proves kernels for such a process: it sees the card alike. Tests
do as a plug-in: ``PYTHONPATH=benchmarks pytest -p lane -m gpu tests/ops/test_gpu_kernels.py``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

CAPABILITY = (8, 9)
SHARED_BYTES = 101_376
MULTIPROCESSOR_SHARED_BYTES = 102_400


class _Properties:
    """The card's properties but for what the class lacks."""

    def __init__(self, found: Any) -> None:
        self._found = found
        self.major, self.minor = CAPABILITY
        self.shared_memory_per_block_optin = SHARED_BYTES
        self.shared_memory_per_multiprocessor = MULTIPROCESSOR_SHARED_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


def consumer_class() -> None:
    """Call before anything is compiled or probed. Compiled kernels go to a cache of their own, and
    so do records: a failure kept by an earlier run would be believed."""
    os.environ["TRITON_OVERRIDE_ARCH"] = "sm89"
    if "CONSUMER_CLASS" not in os.environ:  # a child has its parent's
        os.environ["CONSUMER_CLASS"] = tempfile.mkdtemp()
    for name in ("TRITON_CACHE_DIR", "METAINFER_CACHE"):
        os.environ[name] = str(Path(os.environ["CONSUMER_CLASS"], name.lower()))

    import torch
    import triton

    from metainfer.engine import machine
    from metainfer.platform.capability import instructions
    from metainfer.platform.cuda import CudaPlatform
    from metainfer.platform.machine_catalog import find_machine

    # torch's capability is read from the properties that are replaced below; ptxas gets the card's.
    own = torch.cuda.get_device_capability()
    triton.runtime.driver.active.get_device_capability = lambda device=None: own
    found, probed = torch.cuda.get_device_properties, CudaPlatform.facts
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY  # type: ignore[assignment]
    torch.cuda.get_device_properties = (  # type: ignore[assignment]
        lambda device=None: _Properties(found(device))
    )
    able = instructions(CAPABILITY)
    known = find_machine("1x-h200").facts
    assert able is not None

    def facts(self: CudaPlatform) -> Any:
        real = probed(self)
        seen = tuple(
            replace(
                device,
                name=f"{device.name} as consumer class",
                capability=CAPABILITY,
                shared_bytes_per_block=SHARED_BYTES,
                dot_types=able.dot_types,
                storage_types=able.storage_types,
                features=able.features,
                dot_flops=known.device.dot_flops,
                read_bytes_s=known.device.read_bytes_s,
            )
            for device in real.devices
        )
        return replace(real, devices=seen)

    CudaPlatform.facts = facts  # type: ignore[method-assign]
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    apart = partialmethod(machine.Machine.prove_apart, child=Path(__file__).stem)
    machine.Machine.prove_apart = apart  # type: ignore[method-assign, assignment]


def pytest_configure() -> None:
    """Of a run of tests, before they are collected."""
    consumer_class()


if __name__ == "__main__":
    consumer_class()
    from metainfer.engine.proving_child import main

    sys.exit(main(sys.argv[1:]))
