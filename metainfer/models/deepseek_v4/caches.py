"""The caches of DeepSeek-V4's layers: window latents, compressed entries, index keys, raw rows.

Per token and layer kind the published account is: a window of 128 latents everywhere; one latent
and one index key for each 4 tokens (CSA); one latent for each 128 (HCA); and the raw rows of
windows that are still open. No torch.

Where ranks share a cache, CSA's entries and keys are dealt over them. HCA keeps a fortieth of their
bytes and a page holds one or two of its entries: it stays on every rank, and its layers send
nothing. A window is bounded, and each rank's own heads read all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from metainfer.kv.book.form import (
    EntryForm,
    index_fp4,
    index_fp8,
    index_plain,
    latent_fp8,
    latent_plain,
    plain,
)
from metainfer.kv.book.spec import CacheSpec, GroupKind, Rewind

if TYPE_CHECKING:
    from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch

DRAFTS = 8
"""Rejected tokens that a ring of raw rows survives without a copy."""

SMALLEST_PAGE = 16

LATENTS: Mapping[str, Callable[[int, int, str], EntryForm]] = {
    "latent@1": latent_plain,
    "latent-fp8@1": lambda width, tail, dtype: latent_fp8(width, tail),
}
"""Layouts of the role ``kv``: the form of a latent by width, rotated tail and model type."""

INDEX_KEYS: Mapping[str, Callable[[int, str], EntryForm]] = {
    "index@1": index_plain,
    "index-fp8@1": lambda width, dtype: index_fp8(width),
    "index-fp4@1": lambda width, dtype: index_fp4(width),
}
"""Layouts of the role ``index``: the form of an index key by width and model type."""


def page_unit(arch: DeepSeekV4Arch) -> int:
    """Tokens in which every window of every compressor closes, and every ring comes round."""
    return math.lcm(arch.csa, arch.hca, 2 * arch.csa + DRAFTS)


def cache_specs(
    arch: DeepSeekV4Arch, dtype: str, layouts: Mapping[str, str]
) -> tuple[CacheSpec, ...]:
    """Every cache, layer by layer. `layouts` has the roles ``kv`` (latents) and ``index``."""
    latent = LATENTS[layouts["kv"]](arch.head_dim, arch.rope_dim, dtype)
    key = INDEX_KEYS[layouts["index"]](arch.index_dim, dtype) if "index" in layouts else None
    wide = "float64" if dtype == "float64" else "float32"
    found: list[CacheSpec] = []
    kinds = (*arch.kinds, *(("window",) if arch.mtp else ()))  # the draft's layer comes last
    for layer, kind in enumerate(kinds):
        ratio = arch.ratio(layer) if layer < arch.layers else 0
        found.append(
            CacheSpec(
                layer=layer,
                name="local",
                kind=GroupKind.WINDOW,
                form=latent,
                window=arch.window,
                page_tokens=window_page(arch.window),
            )
        )
        if not ratio:
            continue
        overlap = kind == "csa"
        found.append(_entries(layer, "entries", latent, ratio, deals=overlap))
        found.append(_rows(layer, "rows", arch.head_dim, ratio, overlap, wide))
        if overlap:
            assert key is not None  # a bundle for layers with an indexer has the role
            found.append(_entries(layer, "index", key, ratio, deals=True))
            found.append(_rows(layer, "index_rows", arch.index_dim, ratio, overlap, wide))
    return tuple(found)


def window_page(window: int) -> int:
    """Half a window, so that three pages always hold one."""
    return max(SMALLEST_PAGE, 1 << (max(window // 2, 1).bit_length() - 1))


def _entries(layer: int, name: str, form: EntryForm, ratio: int, deals: bool) -> CacheSpec:
    return CacheSpec(
        layer=layer,
        name=name,
        kind=GroupKind.PAGED,
        form=form,
        tokens_per_entry=ratio,
        deals=deals,
    )


def _rows(layer: int, name: str, width: int, ratio: int, overlap: bool, stored: str) -> CacheSpec:
    """Values and gates of the windows that an open one still needs, and of `DRAFTS` more tokens.

    Where windows lie side by side nothing is open at a window's end; where they overlap the next
    one needs the last window's rows.
    """
    return CacheSpec(
        layer=layer,
        name=name,
        kind=GroupKind.STATE,
        form=plain("rows@1", width * (2 if overlap else 1), stored, parts=2),
        rows=ratio * (2 if overlap else 1) + DRAFTS,
        snapshot_rows=ratio if overlap else 0,
        rewind=Rewind.CURSOR,
        ring_tokens=DRAFTS,
        clean_tokens=0 if overlap else ratio,
    )
