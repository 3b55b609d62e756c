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


def latent_plain(width: int, tail: int, stored: str) -> EntryForm:
    """``latent@1``: a latent in the model's type."""
    return plain("latent@1", width, stored, tail=tail)


def index_plain(width: int, stored: str) -> EntryForm:
    """``index@1``: an index key in the model's type, neither mixed nor rounded."""
    return plain("index@1", width, stored)


def latent_fp8(width: int, tail: int) -> EntryForm:
    """``latent-fp8@1``: e4m3 with a scale byte (e8m0) per group, the rotated tail in bfloat16.

    A group is the largest power of two up to 64 that divides ``width - tail``. Values take
    ``width + tail`` bytes, scales one byte a group, padded to 8; a page is rounded up to a
    multiple of the values. DeepSeek-V4 (512, 64): 576 + 8 = 584 bytes.
    """
    body = width - tail
    if body <= 0 or tail < 0:
        raise InternalError(f"a latent of {width} channels has no room for a tail of {tail}")
    group = _group(body, 64)
    scales = -(-(body // group) // 8) * 8
    return EntryForm(
        layout="latent-fp8@1",
        width=width,
        stored="uint8",
        bytes=body + 2 * tail + scales,
        tail=tail,
        scale="pow2",
        group=group,
        page_multiple=body + 2 * tail,
    )


def index_fp4(width: int) -> EntryForm:
    """``index-fp4@1``: two e2m1 a byte (low nibble: even channel), a scale byte (e8m0) per group.

    A group is the largest power of two up to 32 that divides `width`, which is even. Channels are
    mixed by the Hadamard matrix first. DeepSeek-V4 (128): 64 + 4 = 68 bytes.
    """
    if width <= 0 or width % 2:
        raise InternalError(f"an index key of {width} channels does not fill whole bytes of e2m1")
    group = _group(width, 32)
    return EntryForm(
        layout="index-fp4@1",
        width=width,
        stored="uint8",
        bytes=width // 2 + width // group,
        scale="pow2",
        group=group,
        hadamard=True,
    )


def index_fp8(width: int) -> EntryForm:
    """``index-fp8@1``: e4m3 and one float32 scale a key, after the Hadamard matrix.

    DeepSeek-V4 (128): 132 bytes.
    """
    if width <= 0:
        raise InternalError(f"an index key of {width} channels")
    return EntryForm(
        layout="index-fp8@1",
        width=width,
        stored="uint8",
        bytes=width + 4,
        scale="amax",
        group=width,
        hadamard=True,
    )


def entry_form(layout: str, width: int, tail: int, stored: str) -> EntryForm:
    """The form of one entry of `layout`: `stored` is the type of plain ones, `tail` of latents.

    Raises:
        InternalError: no entries have that layout.
    """
    match layout:
        case "latent@1":
            return latent_plain(width, tail, stored)
        case "latent-fp8@1":
            return latent_fp8(width, tail)
        case "index@1":
            return index_plain(width, stored)
        case "index-fp8@1":
            return index_fp8(width)
        case "index-fp4@1":
            return index_fp4(width)
        case _:
            raise InternalError(f"no entries are laid out as {layout}")


def _group(channels: int, most: int) -> int:
    """The largest power of two up to `most` that divides `channels`."""
    return min(channels & -channels, most)
