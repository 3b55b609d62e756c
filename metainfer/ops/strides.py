"""What kernels take for granted about a tensor's strides, asked before a launch."""

from __future__ import annotations

from torch import Tensor


def heads_packed(x: Tensor) -> bool:
    """Whether each token's heads of x [T, heads, D] lie end to end; the token stride is free.

    A slice of a fused projection is packed. (A dimension of one element has no stride to speak of.)
    """
    _, heads, width = x.shape
    return (x.stride(2) == 1 or width == 1) and (x.stride(1) == width or heads == 1)
