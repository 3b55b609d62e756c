"""Kernels that are wrong in one way; each wraps the one that it stands for."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import Tensor

from metainfer.ops.activation.cpu_c import swiglu as c_swiglu
from metainfer.ops.activation.torch_swiglu import swiglu_clamp as torch_clamp
from metainfer.ops.attn_paged.cpu_c import attn_paged as c_attention
from metainfer.ops.attn_sparse.torch_sparse import attn_sparse as torch_sparse
from metainfer.ops.indexer.torch_select import index_select as torch_select
from metainfer.ops.kv_write.cpu_c import kv_write as c_write
from metainfer.ops.linear.cpu_onednn import linear as onednn
from metainfer.ops.linear.torch_stored import linear as torch_stored
from metainfer.ops.moe_route.torch_route import moe_route as torch_route
from metainfer.ops.rope.cpu_c import rope as c_rope
from metainfer.ops.sample.torch_partial import sample as torch_sample


def clamp_skipped(gate_up: Tensor, limit: float) -> Tensor:
    return torch_clamp(gate_up, 0.0)


def scale_column_stale(x: Tensor, weight: Any) -> Tensor:
    """The last, not full, group of channels is scaled as the one before it."""
    scales = weight.data.get("scales")
    if scales is None or scales.shape[1] < 2:
        return torch_stored(x, weight)
    return torch_stored(x, _rescaled(weight, torch.cat((scales[:, :-1], scales[:, -2:-1]), dim=1)))


def scale_group_wrong(x: Tensor, weight: Any) -> Tensor:
    """Each group of channels reads its neighbour's scale."""
    scales = weight.data.get("scales")
    if scales is None:
        return torch_stored(x, weight)
    return torch_stored(x, _rescaled(weight, torch.cat((scales[:, -1:], scales[:, :-1]), dim=1)))


def _rescaled(weight: Any, scales: Tensor) -> Any:
    return dataclasses.replace(weight, data={**weight.data, "scales": scales})


def page_stride_wrong(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Pages lie one token closer than they do."""
    page = keys.shape[1]
    moved = slots // page * (page - 1) + slots % page
    c_write(k, v, keys, values, torch.where(slots < 0, slots, moved))


def window_one_more(*args: Tensor, scale: float, window: int = 0) -> Tensor:
    return c_attention(*args, scale=scale, window=window + 1 if window else 0)


def sink_dropped(*args: Any, **kwargs: Any) -> Tensor:
    given = list(args)
    given[6] = torch.full_like(given[6], -1e30)
    return torch_sparse(*given, **kwargs)


def dense_for_sparse(*args: Any, **kwargs: Any) -> Tensor:
    given = list(args)
    given[5] = None
    return torch_sparse(*given, **kwargs)


def gate_up_swapped(gate_up: Tensor) -> Tensor:
    half = gate_up.shape[-1] // 2
    return c_swiglu(gate_up.roll(half, -1).contiguous())


def routed_scale_twice(*args: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    ids, weights = torch_route(*args, top_k=top_k, scale=scale)
    return ids, weights * scale


def rope_half_wrong(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Pairs of neighbours instead of halves, and the other way round."""
    return c_rope(q, k, positions, table, not interleaved)


def ties_to_the_last(*args: Any, ratio: int, top_k: int, scale: float) -> Tensor:
    """Where all scores are equal, the latest entries are taken."""
    q, positions = args[0], args[4]
    out = torch_select(*args, ratio=ratio, top_k=top_k, scale=scale)
    for row, position in enumerate(positions.tolist()):
        seen = (position + 1) // ratio
        if not bool(q[row].any()) and seen > top_k:
            out[row] = torch.arange(seen - top_k, seen, dtype=out.dtype)
    return out


def tail_truncated(x: Tensor, weight: Any) -> Tensor:
    """Whole vectors of 16 channels alone are summed."""
    short = x.clone()
    short[:, x.shape[1] // 16 * 16 :] = 0
    return onednn(short, weight)


def seed_ignored(logits: Tensor, inputs: Any) -> Any:
    seed = None if inputs.seed is None else torch.zeros_like(inputs.seed)
    return torch_sample(logits, dataclasses.replace(inputs, seed=seed))


_WRITTEN: dict[int, set[int]] = {}


def page_kept(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """What was written once is never written again: a page keeps what its last owner left."""
    if id(keys) not in _WRITTEN:
        _WRITTEN[id(keys)] = set()
        weakref.finalize(keys, _WRITTEN.pop, id(keys))
    seen = _WRITTEN[id(keys)]
    fresh = torch.tensor([slot not in seen for slot in slots.tolist()], dtype=torch.bool)
    # Page 0 belongs to nobody: start-up writes there.
    seen.update(slot for slot in slots.tolist() if slot >= keys.shape[1])
    c_write(k, v, keys, values, torch.where(fresh, slots, -1))
