"""``kernels.cu`` as a cubin, one for each kind of group, and ``alone.cu``; see `kernels.cubin`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from metainfer.core.verdict import Verdict
from metainfer.kernels import cubin

FOLDER = Path(__file__).parent
HEADERS = tuple(
    FOLDER / name for name in ("collective.h", "elements.h", "ptx.h", "rows.h", "slab.h")
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation: ranks, type code (`layout.TYPES` or `layout.BYTES`), epilogue or not."""

    world: int
    type: int
    rows: bool = False

    @property
    def source(self) -> cubin.Source:
        plain = () if self.rows else ("-DMI_PLAIN",)
        defines = (f"-DMI_N={self.world}", f"-DMI_TYPE={self.type}", *plain)
        return cubin.Source("comm", FOLDER / "kernels.cu", HEADERS, defines)


@dataclass(frozen=True, slots=True)
class Alone:
    """One rank alone on a card, whatever its group."""

    @property
    def source(self) -> cubin.Source:
        return cubin.Source("comm-alone", FOLDER / "alone.cu", HEADERS)


def build(variant: Variant | Alone, arch: str) -> tuple[bytes | None, Verdict, str]:
    """As `cubin.build`."""
    return cubin.build(variant.source, arch)
