"""A kernel at fixed types, constants and launch options: what the compile audit builds. No torch.

Each folder with compiled kernels lists its variants in ``audit.py`` (``VARIANTS``): the shapes that
shipped plans choose. `args` maps every parameter in order to its type (``*bf16``, ``i32``,
``fp32``; an integer type with ``:16`` is a multiple of 16, as Triton specialises it) or to the
value of a constant (``type:bfloat16``: one that is a type).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from metainfer.core.digest import canonical_json

_SHARED = re.compile(rb"^from (metainfer\.ops\.triton_\w+) import", re.MULTILINE)
"""Kernel code that several folders call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`impl`: implementation id it belongs to. `kernel`: ``module:function``. `shape`, `dtype`: of
    the request that leads here, so that the implementation's conditions can be asked. `mma`: the
    kind of matrix instruction that must appear (``""`` for none). `spill_bytes`: the most that is
    explained, see `why`. `targets`: the only ones that choose it; empty for all.
    """

    impl: str
    name: str
    kernel: str
    args: Mapping[str, str | int | bool]
    warps: int
    stages: int = 3
    dtype: str = "bfloat16"
    shape: Mapping[str, int]
    mma: str = ""
    spill_bytes: int = 0
    why: str = ""
    targets: tuple[str, ...] = ()

    def serves(self, target: str) -> bool:
        """Whether a card of this target would run this variant."""
        return not self.targets or target in self.targets

    def source(self) -> str:
        """Hash of the kernel's file, what it shares and its tiles, and of this variant."""
        path = _file(self.kernel.partition(":")[0])
        own = path.read_bytes()
        shared = (_file(name.decode()) for name in _SHARED.findall(own))
        more = (path.with_name("tiles.py"), *shared)
        text = own + b"".join(file.read_bytes() for file in more if file.exists())
        spec = canonical_json([self.kernel, list(self.args.items()), self.warps, self.stages])
        return hashlib.sha256(text + spec.encode()).hexdigest()[:16]


def _file(module: str) -> Path:
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin)
