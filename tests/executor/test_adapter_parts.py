"""A rank's part of a pair stands beside its part of the matrix: the same rows, the same columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metainfer.executor import adapters, loading
from metainfer.executor.loading import RankPart
from metainfer.formats.quant import RawTensor
from metainfer.models.arch import Cut, WeightSpec
from metainfer.models.common.adapters import AdapterSite
from metainfer.models.common.lowrank import LowRankPairs
from metainfer.planner.opening import open_model


def numbered(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    """Each row or column holds its own number, from one."""
    count = torch.arange(1, shape[dim] + 1, dtype=torch.float32)
    along = [1] * len(shape)
    along[dim] = shape[dim]
    return count.view(along).expand(shape).contiguous()


def part_of_matrix(spec: WeightSpec, mine: RankPart, dim: int) -> torch.Tensor:
    """What the loader keeps of the spec's tensors, end to end."""
    parts = []
    for at, (name, shape) in enumerate(zip(spec.tensors, spec.tensor_shapes(), strict=True)):
        raw = loading._cut(RawTensor("F32", shape, numbered(shape, dim)), name, mine, spec, at)
        assert isinstance(raw, RawTensor)
        parts.append(raw.data)
    return torch.cat(parts)


@pytest.mark.parametrize(("heads", "ranks"), [((6, 2), 2), ((9, 3), 2), ((8, 2), 4), ((6, 1), 4)])
def test_pairs_follow_the_matrix(heads: tuple[int, int], ranks: int) -> None:
    """Heads that divide, that do not, and that are copied over more ranks than there are."""
    arch = open_model("random:qwen3-8b?layers=1").arch
    arch = replace(arch, heads=heads[0], kv_heads=heads[1], head_dim=8, hidden=16, ffn=81)
    for spec in arch.packed_weights()[1:-1]:
        widths = [shape[0] for shape in spec.tensor_shapes()]
        starts = [sum(widths[:at]) for at in range(len(widths))]
        modules = tuple(name.removesuffix(".weight") for name in spec.tensors)
        spans = tuple(zip(starts, widths, strict=True))
        site = AdapterSite(spec.name, spec.site, modules, spans, spec.shape[1], 1)
        b = torch.cat([numbered((width, 1, 1), 0) for width in widths])
        a = numbered((1, len(modules), 1, spec.shape[1]), 3)
        whole = LowRankPairs(spec.site, a, b, torch.ones(1, len(modules)), spans)
        columns = spec.site in ("linear.o", "linear.down")
        for part in range(ranks):
            mine = RankPart(Cut.COLUMNS if columns else Cut.ROWS, part, ranks)
            found = adapters._cut(whole, site, site, spec, mine)
            if columns:
                assert torch.equal(found.a[0, 0, 0], part_of_matrix(spec, mine, 1)[0])
                assert found.b is b
            else:
                assert torch.equal(found.b[:, 0, 0], part_of_matrix(spec, mine, 0)[:, 0])
                assert found.a is a
