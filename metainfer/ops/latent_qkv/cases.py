"""Cases of `latent_qkv`: padding, scattered slots, no rows, rows of zeros, with or without norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metainfer.kv.store.entries import EntryPages, store
from metainfer.ops.case import Case, generator, integers, normal
from metainfer.ops.case_caches import Entries, Form
from metainfer.ops.common import rotate_tail, wide
from metainfer.ops.latent_qkv.ref import latent_qkv, rms
from metainfer.ops.rope.tables import RopeSpec, cos_sin, unturned


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    rows: int
    heads: int = 4
    d: int = 32
    rotated: int = 8
    page: int = 16
    skip: int = 0  # every so many rows without a slot
    norm_q: bool = True


LAYOUTS = (
    Layout("nothing", 0),
    Layout("one", 1, page=64),
    Layout("chunk", 37, page=16),
    Layout("padded", 11, skip=3, page=256),
    Layout("skipped", 3, skip=1),
    Layout("plain-q", 9, norm_q=False, page=64),
    Layout("wide", 5, heads=64, d=512, rotated=64, page=64),
    Layout("odd", 4, heads=3, d=26, rotated=10),
)


def build(layout: Layout, seed: int) -> Case:
    g = generator(seed)
    rows, d = layout.rows, layout.d
    pages = rows // layout.page + 2
    slots = torch.randperm((pages - 1) * layout.page, generator=g)[:rows] + layout.page
    if layout.skip:
        slots[:: layout.skip] = -1
    q, kv = normal(g, rows, layout.heads, d), normal(g, rows, d)
    if rows > 2:
        q[1], kv[1] = 0, 0
        kv[2] *= 1e-4
    empty = torch.full((pages * layout.page, d), torch.nan, dtype=torch.float64)
    return Case(
        op="latent_qkv",
        name=layout.name,
        args=(
            q,
            kv,
            (normal(g, d) * 0.2 + 1).float(),
            integers(g, 300, rows),
            cos_sin(RopeSpec(rotated=layout.rotated), 300),
            Entries(Form("kv", d, layout.rotated), empty, layout.page),
            slots,
        ),
        kwargs={"eps": 1e-6, "norm_q": layout.norm_q},
        shape={"rows": rows, "hq": layout.heads, "d": d, "rotated": layout.rotated},
        semantics=frozenset({"norm_q"} if layout.norm_q else ()),
        outputs=(5,),
    )


def cases(seed: int) -> list[Case]:
    return [build(layout, seed + index) for index, layout in enumerate(LAYOUTS)]


def recipe(
    q: Tensor,
    kv: Tensor,
    kv_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    pages: EntryPages,
    slots: Tensor,
    *,
    eps: float,
    norm_q: bool,
) -> Tensor:
    """The published code rounds to the dtype after each norm and after the rotation."""
    turn = cos_sin[positions]
    latent = (rms(wide(kv), eps) * wide(kv_weight)).to(q.dtype)
    store(pages, slots, rotate_tail(wide(latent), turn).to(q.dtype))
    heads = rms(wide(q), eps).to(q.dtype) if norm_q else q
    return rotate_tail(wide(heads), turn.unsqueeze(1)).to(q.dtype)


CASES: dict[str, Any] = {"latent_qkv": cases}
REFERENCES = {"latent_qkv": latent_qkv}
RECIPES = {"latent_qkv": recipe}


def _unnormed(*args: Any, eps: float, norm_q: bool) -> Tensor:
    return latent_qkv(*args, eps=eps, norm_q=False)


def _unturned(q: Tensor, kv: Tensor, w: Tensor, p: Tensor, table: Tensor, *m: Any, **k: Any) -> Any:
    return latent_qkv(q, kv, w, p, unturned(table), *m, **k)


MISTAKES = {"latent_qkv": {"query norm": (_unnormed,), "rope": (_unturned,)}}
