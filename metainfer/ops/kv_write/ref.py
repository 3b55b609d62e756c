"""Write the keys and values of new tokens into cache pages."""

from __future__ import annotations

from torch import Tensor


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """``cache[slots[t] // G, slots[t] % G] = k[t]``, in place; slot -1 skips the token.

    k, v [T, Hkv, D]; caches [P, G, Hkv, D]; slots [T] int64. Two tokens never share a slot.
    """
    kept = (slots >= 0).nonzero().squeeze(-1)
    target = slots[kept]
    page, offset = target // k_cache.shape[1], target % k_cache.shape[1]
    k_cache[page, offset] = k[kept].to(k_cache.dtype)
    v_cache[page, offset] = v[kept].to(v_cache.dtype)
