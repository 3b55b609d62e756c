"""Assemble a `DenseModel` from loaded weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from metainfer.models.dense.arch import DenseArch
from metainfer.models.dense.model import DenseModel
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.rope.tables import cos_sin_table


def build(
    arch: DenseArch,
    packed: Mapping[str, PackedWeight],
    plain: Mapping[str, torch.Tensor],
    *,
    max_positions: int,
    device: torch.device,
) -> DenseModel:
    """`packed` and `plain` by `WeightSpec.name`; the rotary table covers `max_positions`."""
    cos_sin = cos_sin_table(arch.rope, max_positions).to(device)
    return DenseModel(arch, packed, plain, cos_sin)
