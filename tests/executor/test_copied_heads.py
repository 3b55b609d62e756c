"""KV heads that several ranks hold: what each loads of a layer, and what the plan counts of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.comm.peers import Place
from metainfer.core.plan import LayoutPlan
from metainfer.executor.loading import RankPart, load_weights, part_of
from metainfer.formats.quant import RawTensor, Stored, quantise
from metainfer.kernels.impl import Layout
from metainfer.models.arch import WeightSpec
from metainfer.models.dense.arch import DenseArch, read_arch
from metainfer.models.dense.shapes import random_configs
from metainfer.planner.weights import census, weight_rows

CPU = torch.device("cpu")
DENSE = Layout(id="dense@1", role="weight", pack="metainfer.ops.linear.packed:pack_dense")
WIDTH, HIDDEN = 4, 12


def model(kv_heads: int, group: int) -> DenseArch:
    """One layer, biases beside q, k and v."""
    shape = {
        "hidden_size": HIDDEN, "num_attention_heads": kv_heads * group, "head_dim": WIDTH,
        "num_key_value_heads": kv_heads, "num_hidden_layers": 1, "attention_bias": True,
    }  # fmt: skip
    return read_arch({**random_configs()["tiny-llama"], **shape})


class Numbered:
    """Every tensor of a model, its elements counted from 1: none is zero."""

    def __init__(self, arch: DenseArch) -> None:
        self.tensors: dict[str, Tensor] = {}
        for spec in (*arch.packed_weights(), *arch.plain_weights()):
            for name, shape in zip(spec.tensors, spec.tensor_shapes(), strict=True):
                self.tensors[name] = self._counted(*shape)
            for name, (rows, *_) in zip(spec.bias, spec.tensor_shapes(), strict=False):
                self.tensors[name] = self._counted(rows)

    def _counted(self, *shape: int) -> Tensor:
        return torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)

    def read(self, name: str) -> Stored:
        return RawTensor("F32", tuple(self.tensors[name].shape), self.tensors[name])

    def heads(self, name: str) -> Tensor:
        """[heads, D, ...] of a projection of layer 0."""
        found = self.tensors[f"model.layers.0.self_attn.{name}"]
        return found.view(-1, WIDTH, *found.shape[1:])


class InBlocks(Numbered):
    """Its matrices in Q8_0."""

    def read(self, name: str) -> Stored:
        values = self.tensors[name]
        return quantise(values, "Q8_0") if values.dim() > 1 else super().read(name)


def wanted(source: Numbered, rank: int, copies: int, group: int, what: str) -> Tensor:
    """Rows [n, ...] of `qkv`: a share of the query heads of one KV head, padded with zeros, that
    head's keys and its values."""
    kv, part = divmod(rank, copies)
    share = -(-group // copies)
    queries = source.heads(f"q_proj.{what}")[kv * group : (kv + 1) * group]
    mine = queries[part * share : (part + 1) * share]
    lacking = mine.new_zeros(share - len(mine), *mine.shape[1:])
    beside = [source.heads(f"{name}_proj.{what}")[kv : kv + 1] for name in "kv"]
    return torch.cat([mine, lacking, *beside]).flatten(0, 1)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 3), st.integers(1, 7), st.data())
def test_ranks_share_a_head_s_queries_and_copy_its_keys(
    kv_heads: int, group: int, data: st.DataObject
) -> None:
    copies = data.draw(st.integers(2, 5), "copies")
    ranks = kv_heads * copies
    arch, layout = model(kv_heads, group), LayoutPlan(name="tp", tensor=ranks)
    share = -(-group // copies)
    refused = arch.layout_objections(layout, {}).reasons
    lacks = (copies - 1) * share >= group
    assert lacks == any("query heads of a KV head" in each.message for each in refused)
    if refused:
        return
    source, packing = Numbered(arch), {"weight": DENSE}
    rows = weight_rows(census(arch, lambda name: "F32"), packing, "float32", layout)
    counted = {row.item: row.bytes for row in rows}
    mine = arch.on_rank(layout)
    assert (mine.heads, mine.kv_heads) == (share, 1)
    for rank in range(ranks):
        place = Place(layout, rank)
        shard = partial(_part, arch, layout, place)
        found = load_weights(arch, source, packing, dtype=torch.float32, device=CPU, shard=shard)
        qkv, o = (found.packed[f"layers.0.{site}"] for site in ("qkv", "o"))
        assert torch.equal(qkv.data["weight"], wanted(source, rank, copies, group, "weight"))
        assert qkv.bias is not None
        assert torch.equal(qkv.bias, wanted(source, rank, copies, group, "bias"))
        columns = source.tensors["model.layers.0.self_attn.o_proj.weight"].T
        heads = columns.view(kv_heads, group, WIDTH, HIDDEN)[rank // copies]
        own = heads[rank % copies * share : (rank % copies + 1) * share].flatten(0, 1).T
        held = o.data["weight"]
        assert torch.equal(held[:, : own.shape[1]], own) and not held[:, own.shape[1] :].any()
        assert counted["linear.qkv"] == qkv.nbytes
        # The first rank alone adds a bias beside columns; every rank is counted with it.
        assert counted["linear.o"] == held.nbytes + HIDDEN * 4


def _part(arch: DenseArch, layout: LayoutPlan, place: Place, spec: WeightSpec) -> RankPart:
    return part_of(arch.cut(spec, layout), place)


def test_a_rank_passes_a_copied_head_whole() -> None:
    """Elements that a token passes: of 2 KV heads over 4 ranks each has one, and 2 of 4 queries."""
    arch = model(2, 4)
    rows = census(arch, lambda name: "F32")
    found = rows.elements(LayoutPlan(name="tp4", tensor=4))
    assert found["linear.qkv"] == (2 + 1 + 1) * WIDTH * HIDDEN
    assert found["linear.o"] == 2 * WIDTH * HIDDEN


def test_quantised_copies_are_counted_as_they_are_held() -> None:
    """Blocks of 32 along K: rows of any number are whole."""
    arch = replace(model(2, 4), hidden=64)
    packing = replace(DENSE, nbytes=lambda scheme, n, k: n * k // 32 * 34)
    rows = census(arch, lambda name: "Q8_0")
    layout = LayoutPlan(name="tp4", tensor=4)
    (held,) = [
        row.bytes for row in weight_rows(rows, {"weight": packing}, "float32", layout)
        if row.item == "linear.qkv"
    ]  # fmt: skip
    assert held == (2 + 1 + 1) * WIDTH * (64 // 32 * 34 + 4)  # and a bias each


@pytest.mark.parametrize(("kv_heads", "group", "ranks"), [(3, 3, 2), (2, 3, 4)])
def test_heads_filled_up_are_counted_as_they_are_held(
    kv_heads: int, group: int, ranks: int
) -> None:
    """Blocks of 32 along K, heads of 64: parts of any number of heads are whole blocks."""
    arch = replace(model(kv_heads, group), head_dim=64, hidden=64)
    layout, packing = LayoutPlan(name="tp", tensor=ranks), {"weight": DENSE}
    sites = {"linear.qkv": (1, 32), "linear.o": (1, 32)}
    assert arch.layout_objections(layout, sites).accepted
    rows = weight_rows(census(arch, lambda name: "Q8_0"), packing, "float32", layout)
    counted = {row.item: row.bytes for row in rows}
    shard = partial(_part, arch, layout, Place(layout, 0))
    found = load_weights(
        arch, InBlocks(arch), packing, dtype=torch.float32, device=CPU,
        shard=shard, only=lambda spec: spec.site in sites,
    )  # fmt: skip
    for weight in found.packed.values():
        assert counted[weight.site] == weight.nbytes
    assert len(found.packed) == len(sites)
