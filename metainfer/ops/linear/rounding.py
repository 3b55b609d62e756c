"""What a recipe does to activations before they meet block-scaled weights.

DeepSeek-V4's linear layers (its published inference code) round what enters a product with FP8 or
FP4 weights to e4m3: per token and group of channels, with a power-of-two scale. Groups are as wide
as an FP8 block, and 128 beside 4-bit weights. The last group of a row may be shorter, so a row of
fewer channels than a group is one group.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from metainfer.formats.activation import activation_fp8
from metainfer.formats.blocks import BlockFormat

FOUR_BIT_GROUP = 128


def activation_group(weights: BlockFormat) -> int:
    """Channels of an activation that share a scale in front of `weights`."""
    return weights.block[1] if weights.element == "e4m3" else FOUR_BIT_GROUP


def round_activations(x: Tensor, group: int) -> Tensor:
    """x [..., K] rounded to e4m3 and read back, in its own dtype."""
    short = -x.shape[-1] % group
    if not short:
        return activation_fp8(x, group)
    return activation_fp8(F.pad(x, (0, short)), group)[..., : x.shape[-1]]
