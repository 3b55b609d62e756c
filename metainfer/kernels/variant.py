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
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from metainfer.core.digest import canonical_json
from metainfer.kernels.cubin import Source

_IMPORTED = re.compile(
    rb"^from (metainfer\.ops\.[\w.]*\b(?:triton\w*|tiles|sorting)) import", re.MULTILINE
)
"""What a kernel's file takes from others: code and sizes that are compiled with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`impl`: implementation id it belongs to. `kernel`: ``module:function``. `shape`, `dtype`: of
    the request that leads here, so that the implementation's conditions can be asked. `mma`: the
    kind of matrix instruction that must appear (``""`` for none). `spill_bytes`: the most that is
    explained, see `why`. `targets`: the only ones that choose it; empty for all. `cuda`: the source
    of a kernel in CUDA C++, whose function `kernel` names; it is launched with `shared_bytes` of
    dynamic shared memory.
    """

    impl: str
    name: str
    kernel: str
    args: Mapping[str, str | int | bool] = field(default_factory=dict)
    warps: int
    stages: int = 3
    dtype: str = "bfloat16"
    shape: Mapping[str, int]
    mma: str = ""
    spill_bytes: int = 0
    why: str = ""
    targets: tuple[str, ...] = ()
    cuda: Source | None = None
    shared_bytes: int = 0

    def serves(self, target: str) -> bool:
        """Whether a card of this target would run this variant."""
        return not self.targets or target in self.targets

    def source(self) -> str:
        """Hash of the kernel's file, of its tiles and all it imports, and of this variant."""
        if self.cuda is not None:
            spec = canonical_json([self.kernel, self.cuda.digest(), self.shared_bytes])
            return hashlib.sha256(spec.encode()).hexdigest()[:16]
        path = _file(self.kernel.partition(":")[0])
        files = dict.fromkeys((path, path.with_name("tiles.py"), *_taken(path)))
        text = b"".join(file.read_bytes() for file in files if file.exists())
        spec = canonical_json([self.kernel, list(self.args.items()), self.warps, self.stages])
        return hashlib.sha256(text + spec.encode()).hexdigest()[:16]


def _taken(path: Path) -> list[Path]:
    """The files that a kernel's file imports from, theirs after each."""
    names = _IMPORTED.findall(path.read_bytes())
    found = [_file(name.decode()) for name in names]
    return [file for each in found for file in (each, *_taken(each))]


def _file(module: str) -> Path:
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin)
