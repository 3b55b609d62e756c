"""What one cache entry is: the object that writers, readers, account and store compare. No torch.

A form names the layout and everything that decides what a stored byte means. Two caches of equal
byte size and different forms are different; `agree` says in which property.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from metainfer.core.errors import InternalError

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryForm:
    """One entry of a cache.

    `layout`: its identifier. `parts` tensors of `heads` times `width` channels each (K and V: 2;
    a latent: 1). The last `tail` channels are rotated. `stored`: the element type of the tensors
    that hold it (``uint8`` where values and scales share a page). `bytes`: of one entry, scales
    and padding included. `page_multiple`: a page is rounded up to a multiple of that many bytes.
    `scale`: the rule of its scales: ``none``, ``pow2`` (2^ceil(log2(amax / largest))) or ``amax``
    (float32, amax / largest); `group`: channels that share one. `hadamard`: channels were mixed by
    the Sylvester matrix before rounding, and queries must be too.
    """

    layout: str
    width: int
    stored: str
    bytes: int
    parts: int = 1
    heads: int = 1
    tail: int = 0
    scale: str = "none"
    group: int = 0
    hadamard: bool = False
    page_multiple: int = 1

    def page_bytes(self, entries: int) -> int:
        """Bytes of a page of `entries` entries in one layer."""
        return -(-entries * self.bytes // self.page_multiple) * self.page_multiple


def plain(
    layout: str, width: int, stored: str, *, parts: int = 1, heads: int = 1, tail: int = 0
) -> EntryForm:
    """A form that keeps every channel in `stored`, without scales."""
    return EntryForm(
        layout=layout,
        width=width,
        stored=stored,
        bytes=parts * heads * width * SIZES[stored],
        parts=parts,
        heads=heads,
        tail=tail,
    )


def agree(writer: EntryForm, reader: EntryForm, where: str) -> None:
    """Both sides mean the same bytes.

    Raises:
        InternalError: naming every property in which they differ (field case B-09).
    """
    differing = [
        f"{item.name} {getattr(writer, item.name)!r} against {getattr(reader, item.name)!r}"
        for item in fields(EntryForm)
        if getattr(writer, item.name) != getattr(reader, item.name)
    ]
    if differing:
        raise InternalError(f"{where}: writer and reader differ in {'; '.join(differing)}")
