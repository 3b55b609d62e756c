"""What these models cache: a latent a token in every layer, an index key in those with an indexer.

Bytes of one entry of the published shape (512 + 64 channels, index keys of 128):

===================  =====  ====================================================================
``mla@1``             1152  the model's type
``mla-fp8@1``          656  e4m3 with a float32 scale per 128, the rotated channels in bfloat16
``mla-fp8-raw@1``      576  e4m3 alone
``index-fp8@1``        132  e4m3 and one float32 scale
===================  =====  ====================================================================

There is one latent head: every tensor rank holds all of it. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from metainfer.core.errors import InternalError
from metainfer.kv.book.form import EntryForm, index_fp8, plain
from metainfer.kv.book.spec import CacheSpec, GroupKind

if TYPE_CHECKING:
    from metainfer.models.dsa.arch import DsaArch

PLAIN = "mla@1"
OPTIONS: Mapping[str, str] = {"bf16": PLAIN, "fp8": "mla-fp8@1", "fp8-raw": "mla-fp8-raw@1"}
"""``--model-option cache=``: the layout that it names."""

GROUP = 128
"""Channels that share a scale."""


def latent(layout: str, rank: int, tail: int, dtype: str) -> EntryForm:
    """The form of one latent of `rank` channels and `tail` rotated ones."""
    width = rank + tail
    match layout:
        case "mla@1":
            return plain(layout, width, dtype, tail=tail)
        case "mla-fp8@1":
            scales = 4 * -(-rank // GROUP)
            return EntryForm(
                layout=layout, width=width, stored="uint8", bytes=rank + scales + 2 * tail,
                tail=tail, scale="amax", group=GROUP,
            )  # fmt: skip
        case "mla-fp8-raw@1":
            return EntryForm(layout=layout, width=width, stored="uint8", bytes=width, tail=tail)
        case _:
            raise InternalError(f"no latents are laid out as {layout}")


def cache_specs(arch: DsaArch, dtype: str) -> tuple[CacheSpec, ...]:
    """Every cache, layer by layer; the draft's layer comes last and has an indexer."""
    form = latent(arch.cache, arch.kv_rank, arch.rope_dim, dtype)
    key = index_fp8(arch.index_dim)
    found = []
    for layer, full in enumerate((*arch.full, *((True,) if arch.mtp else ()))):
        found.append(CacheSpec(layer=layer, name="kv", kind=GroupKind.PAGED, form=form))
        if full:
            found.append(CacheSpec(layer=layer, name="index", kind=GroupKind.PAGED, form=key))
    return tuple(found)
