"""Assemble a `DeepSeekV4Model` from loaded weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from metainfer.comm.peers import SINGLE, Ranks
from metainfer.models.deepseek_v4.angles import table
from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch
from metainfer.models.deepseek_v4.model import DeepSeekV4Model
from metainfer.ops.linear.packed import PackedWeight


def build(
    arch: DeepSeekV4Arch,
    packed: Mapping[str, PackedWeight],
    plain: Mapping[str, torch.Tensor],
    *,
    max_positions: int,
    device: torch.device,
    ranks: Ranks = SINGLE,
) -> DeepSeekV4Model:
    """`packed` and `plain` by `WeightSpec.name`; the rotary tables cover `max_positions`. `arch` is
    one rank's, as are the weights."""
    tables = tuple(
        table(arch, max_positions, compress=compress).to(device) for compress in (False, True)
    )
    return DeepSeekV4Model(arch, packed, plain, tables[0], tables[1], ranks)
