"""Assemble a `DenseModel` from loaded weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from metainfer.comm.peers import SINGLE, Ranks
from metainfer.models.dense.arch import DenseArch
from metainfer.models.dense.model import DenseModel
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.rope.tables import cos_sin


def build(
    arch: DenseArch,
    packed: Mapping[str, PackedWeight],
    plain: Mapping[str, torch.Tensor],
    *,
    max_positions: int,
    device: torch.device,
    ranks: Ranks = SINGLE,
) -> DenseModel:
    """`packed` and `plain` by `WeightSpec.name`; the rotary table covers `max_positions`. `arch` is
    one rank's, as are the weights."""
    table = cos_sin(arch.rope, max_positions).to(device)  # [M, R] float32
    return DenseModel(arch, packed, plain, table, ranks)
