"""Which sequence a row of a step belongs to, for kernels with a program or a few for each row."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernel parameters are pointers and numbers of the compiler's own types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_sequence(query_start, sequences, t):
    """The sequence that row t belongs to; `sequences` for a row of padding. 128 ends are compared
    at once: no load waits for another, as in `triton_entries.sequence_of`."""
    found = 0
    for first in range(0, sequences, 128):
        i = first + tl.arange(0, 128)
        end = tl.load(query_start + 1 + i, mask=i < sequences, other=0x7FFFFFFF)
        found += tl.sum((end <= t).to(tl.int32), axis=0)
    return found
