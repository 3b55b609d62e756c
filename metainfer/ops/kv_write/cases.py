"""Cases of `kv_write`: page borders, skipped tokens, scattered slots, nothing to write.

The caches start as NaN: a slot that must not be touched still holds it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metainfer.ops.case import Case, generator, normal
from metainfer.ops.kv_write.ref import kv_write

#: (tokens, pages, page, Hkv, D)
SIZES = (
    (0, 2, 16, 1, 64),
    (1, 3, 16, 3, 64),
    (16, 2, 16, 2, 64),
    (17, 4, 16, 2, 96),
    (33, 3, 32, 1, 128),
    (65, 3, 64, 2, 64),
    (5, 2, 7, 1, 10),
)


def cases(seed: int) -> list[Case]:
    g = generator(seed)
    found = []
    for tokens, pages, page, hkv, d in SIZES:
        for skip in (False, True) if tokens > 1 else (False,):
            slots = torch.randperm(pages * page, generator=g)[:tokens]
            if skip:
                slots[:: max(2, tokens // 3)] = -1
            empty = torch.full((pages, page, hkv, d), float("nan"), dtype=torch.float64)
            found.append(
                Case(
                    op="kv_write",
                    name=f"{tokens}to{pages}x{page}x{hkv}x{d}{'-skips' * skip}",
                    args=(
                        normal(g, tokens, hkv, d),
                        normal(g, tokens, hkv, d),
                        empty,
                        empty.clone(),
                        slots,
                    ),
                    shape={"rows": tokens, "page": page, "hkv": hkv, "d": d},
                    outputs=(2, 3),
                    exact=True,
                    fused=(0, 1) if tokens % 2 else (),
                )
            )
    return found


CASES = {"kv_write": cases}
REFERENCES = {"kv_write": kv_write}
RECIPES = {"kv_write": kv_write}


def _stride(change: int) -> Callable[..., None]:
    """Pages that are `change` tokens longer than they are."""

    def wrong(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        page = keys.shape[1]
        moved = slots // page * (page + change) + slots % page
        inside = (slots >= 0) & (moved >= 0) & (moved < keys.shape[0] * page)
        kv_write(k, v, keys, values, torch.where(inside, moved, -1))

    return wrong


def _last_dropped(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    kv_write(k[:-1], v[:-1], keys, values, slots[:-1])


MISTAKES = {
    "kv_write": {
        "page stride": (_stride(1), _stride(-1)),
        "keys and values swapped": (lambda k, v, *more: kv_write(v, k, *more),),
        "last token": (_last_dropped,),
    }
}
