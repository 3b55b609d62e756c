"""Cache write by `index_copy_` over the flat token rows of the cache."""

from __future__ import annotations

from torch import Tensor


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See `ref.kv_write`. Reads the slots' minimum, so it waits for the device."""
    if slots.numel() == 0:
        return
    if int(slots.min()) < 0:
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)
