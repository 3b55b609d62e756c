"""Runs the cases of implementations, one after the other, and says how each went. May die.

Started by `proving`: ``python -m metainfer.engine.proving_child DESCRIPTOR PLATFORM DTYPE ID...``
writes one line of JSON when a kernel begins and one when its cases are over. It keeps no records:
its parent does, which has several children.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from metainfer.engine.machine import open_machine
from metainfer.ops.qualify import qualify_all


def main(arguments: Sequence[str]) -> int:
    descriptor, platform, dtype, *ids = arguments

    def tell(**line: Any) -> None:
        os.write(int(descriptor), (json.dumps(line) + "\n").encode())

    machine = open_machine(platform)
    listed = {impl.id: impl for impl in machine.registry.impls()}
    device = machine.torch_device()
    for key in ids:
        tell(begin=key)
        begin = time.monotonic()
        (found,) = qualify_all([listed[key]], dtype, device, machine.facts, machine.registry)
        seconds = round(time.monotonic() - begin, 3)
        tell(impl=key, passed=found.passed, reasons=list(found.reasons), seconds=seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
