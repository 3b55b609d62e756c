"""Paged attention on CPU in float32 (compiled C): decode, prefill chunks and mixtures of both.

Claims:

* A query's result is the same bits whatever stands beside it in the batch, however its prompt was
  cut into chunks, and for any page size and number of threads (on one machine).
* No page is touched outside a query's context and window; NaN in unwritten slots does no harm.
* exp is within 1.1 ulp for arguments in [-87, 0] and 0 below; the rest is float32.

Needs a C compiler, float32, D a multiple of 16 up to 256, Hq a multiple of Hkv and at most 96
query heads per KV head. The blocking and the summation order are described in ``cpu_attn.c``.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from metainfer.core.errors import InternalError
from metainfer.core.verdict import Verdict
from metainfer.kernels import native

SOURCE = Path(__file__).with_name("cpu_attn.c")
MAX_HEAD_DIM = 256
MAX_GROUP = 96

_ERRORS = {
    1: "no memory for the scratch of attention",
    2: "a context is shorter than its queries or longer than its page table",
    3: "a page inside the context and window is missing from the page table",
}


def probe() -> Verdict:
    """Whether the C library can be built and loaded here. Never raises."""
    return native.try_load(SOURCE)[1]


@functools.cache
def _function(defines: tuple[str, ...]) -> Callable[..., int]:
    function = native.load(SOURCE, defines=defines).mi_attn
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    function.argtypes = [
        *(pointer, long, pointer, pointer),  # q, its stride, k, v
        *(long, long, long, long, long),  # strides of page, token, head; pages, page size
        *(pointer, long, pointer, pointer),  # page table, its stride, query_start, context
        *(long, long, long, long),  # S, Hq, Hkv, D
        *(ctypes.c_float, long, pointer, long, integer),  # scale, window, out, stride, threads
    ]
    function.restype = integer
    return function


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    heads, width = q.shape[1:]
    kv_heads = k.shape[2]
    if not (q.dtype == k.dtype == v.dtype == torch.float32):
        raise InternalError(f"attn_paged wants float32, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape != v.shape or k.stride() != v.stride() or k.shape[3] != width:
        raise InternalError(f"caches {list(k.shape)}, {list(v.shape)} do not fit q {list(q.shape)}")
    if k.stride(3) != 1 or q.stride(2) != 1 or q.stride(1) != width:
        raise InternalError("attn_paged wants heads with contiguous columns, q's heads packed")
    if width % 16 or width > MAX_HEAD_DIM or heads % kv_heads or heads // kv_heads > MAX_GROUP:
        raise InternalError(f"no attention for {heads}/{kv_heads} heads of width {width}")


def attn_paged(
    q: torch.Tensor,  # [T, Hq, D]
    k_cache: torch.Tensor,  # [P, page, Hkv, D]
    v_cache: torch.Tensor,  # [P, page, Hkv, D]
    page_table: torch.Tensor,  # int32 [S, max_pages]
    query_start: torch.Tensor,  # int32 [S + 1]
    context_lens: torch.Tensor,  # int32 [S]
    *,
    scale: float,
    window: int = 0,
    defines: tuple[str, ...] = (),
) -> torch.Tensor:
    """Causal attention of each sequence's newest tokens over its pages, float32 [T, Hq, D].

    ``context_lens[s]`` counts the tokens in the cache, the queries included; query ``j`` of ``n``
    stands at ``context_lens[s] - n + j`` and sees positions up to its own, with a `window` w the
    last w of them (0: no window). Pages outside every window of the step may be -1. `q` may be a
    view with any stride over T. Rows that belong to no sequence are unspecified. `defines` select
    another build of the C file (tests). Raises `InternalError` for inputs that break this contract.
    """
    _check(q, k_cache, v_cache)
    tables = (page_table, query_start, context_lens)
    # An array without elements has strides of zero where numpy made it.
    strided = (table.numel() and table.stride(-1) != 1 for table in tables)
    if any(strided) or any(table.dtype != torch.int32 for table in tables):
        raise InternalError("attn_paged wants contiguous int32 tables")
    rows, heads, width = q.shape
    out = torch.empty((rows, heads, width))
    if rows == 0:
        return out
    code = _function(defines)(
        q.data_ptr(),
        q.stride(0),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        *k_cache.stride()[:3],
        k_cache.shape[0],
        k_cache.shape[1],
        page_table.data_ptr(),
        page_table.stride(0),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        context_lens.shape[0],
        heads,
        k_cache.shape[2],
        width,
        scale,
        window,
        out.data_ptr(),
        heads * width,
        torch.get_num_threads(),
    )
    if code:
        raise InternalError(_ERRORS[code])
    return out
