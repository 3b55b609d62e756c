"""Field cases B-10 and B-11: shards of block-scaled matrices, padding, executed extents."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from metainfer.core.errors import ModelError, RefusedError
from metainfer.formats import elements, shards
from metainfer.formats.block_codecs import BlockTensor, decode
from metainfer.formats.blocks import FORMATS, FP8_32, FP8_128, FP8_ROW_32, MXFP4, NVFP4, BlockFormat
from metainfer.formats.extents import Extent, buffer_elements, executed, overhead, split

RANKS = [1, 2, 3, 4, 6, 8, 16]
EXTENTS = [1536, 3072, 5120, 6144, 7168]


def whole_numbers(fmt: BlockFormat, n: int, k: int, seed: int) -> BlockTensor:
    """A matrix whose products and sums are exact in float64: scales 1 or 2, small elements."""
    generator = torch.Generator().manual_seed(seed)

    def pick(shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)

    if fmt.element == "e2m1":
        data = pick(fmt.data_shape(n, k), 0, 256)
    else:
        data = elements.e4m3_encode(pick(fmt.data_shape(n, k), 0, 17).float() - 8)
    if fmt.scale == "F8_E8M0":
        scale = pick(fmt.scale_shape(n, k), 127, 129)
    else:
        scale = elements.e4m3_encode(pick(fmt.scale_shape(n, k), 1, 3).float())
    second = None if fmt.second == "none" else torch.tensor(1.0)
    return BlockTensor(fmt, (n, k), data, scale, second)


@pytest.mark.parametrize(("ranks", "extent", "block"), [*product(RANKS, EXTENTS, [32, 128])])
def test_b10_split_over_ranks(ranks: int, extent: int, block: int) -> None:
    fits = extent % ranks == 0 and extent // ranks % block == 0
    if fits:
        parts = split(extent, ranks, block, pad=False)
        assert parts == split(extent, ranks, block, pad=True)
        assert overhead(parts).elements == 0
    else:
        with pytest.raises(RefusedError, match=f"{extent} cannot be split over {ranks}") as caught:
            split(extent, ranks, block, pad=False, what="intermediate size")
        assert caught.value.code == "shard_block" and caught.value.reasons[0].data["block"] == block
        parts = split(extent, ranks, block, pad=True)
    assert len({part.extent.executed for part in parts}) == 1
    position = 0
    for part in parts:  # in order, without gap or overlap, cut on blocks only
        assert (part.start == position and part.start % block == 0) or part.extent.logical == 0
        position += part.extent.logical
        assert part.extent.executed % block == 0
        assert buffer_elements(part.extent) >= part.extent.logical
    assert position == extent
    assert overhead(parts).elements == ranks * parts[0].extent.executed - extent


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fmt", [FP8_128, FP8_32, MXFP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("extent", EXTENTS)
def test_b10_padded_product_equals_the_whole(
    fmt: BlockFormat, extent: int, dim: int, seed: int
) -> None:
    shape = (extent, 32) if dim == 0 else (32, extent)
    tensor = whole_numbers(fmt, *shape, seed)
    x = torch.randint(-3, 4, (2, shape[1]), generator=torch.Generator().manual_seed(seed)).double()
    whole = x @ decode(tensor, torch.float64).T
    for ranks in RANKS:
        rows, total = [], torch.zeros_like(whole)
        for shard in split(extent, ranks, fmt.block[dim] if dim else 128, pad=True):
            part = shards.take(tensor, dim, shard)
            logical = (shard.extent.logical, 32) if dim == 0 else (32, shard.extent.logical)
            shards.check_padding(part, logical, "w1")
            weight = decode(part, torch.float64)
            if dim == 0:
                rows.append((x @ weight.T)[:, : shard.extent.logical])
                continue
            mine = torch.zeros(2, shard.extent.executed, dtype=torch.float64)
            stop = shard.start + shard.extent.logical
            mine[:, : shard.extent.logical] = x[:, shard.start : stop]
            total += mine @ weight.T
        assert torch.equal(torch.cat(rows, dim=1) if dim == 0 else total, whole)


def test_b10_the_situations_of_the_field() -> None:
    with pytest.raises(RefusedError, match="3072 / 16 = 192 is not a multiple of the block of 128"):
        split(3072, 16, 128, pad=False)
    with pytest.raises(RefusedError, match="64 does not divide by 6 ranks"):
        split(64, 6, 1, pad=False, what="heads")
    heads = split(64, 6, 1, pad=True)
    assert [part.extent.logical for part in heads] == [11] * 5 + [9]
    cost = overhead(split(3072, 16, 128, pad=True), other=4096)
    assert cost.elements == 1024 * 4096 and cost.work == pytest.approx(1 / 3)
    assert executed(352, 128) == Extent(352, 384)
    assert buffer_elements(executed(352, 128), Extent(7, 7)) == 384 * 7


def test_b10_extents_that_lie_are_refused() -> None:
    for logical, done in ((5, 4), (-1, 4)):
        with pytest.raises(ValueError, match=f"{logical} executed as {done}"):
            Extent(logical, done)
    with pytest.raises(ValueError, match="split"):
        split(0, 4, 128, pad=True)


@given(
    extent=st.integers(1, 2000),
    ranks=st.integers(1, 17),
    block=st.sampled_from([1, 16, 32, 128]),
    tile=st.sampled_from([1, 64, 96, 256]),
)
def test_b10_any_split(extent: int, ranks: int, block: int, tile: int) -> None:
    parts = split(extent, ranks, block, pad=True, tile=tile)
    assert sum(part.extent.logical for part in parts) == extent
    assert all(part.extent.executed % block == part.extent.executed % tile == 0 for part in parts)
    # no rank executes a whole unit more than the fullest rank needs
    need = executed(max(part.extent.logical for part in parts), block, tile).executed
    assert parts[0].extent.executed == need


@pytest.mark.parametrize("fmt", list(FORMATS.values()), ids=lambda fmt: fmt.name)
def test_b10_a_cut_inside_a_block_is_refused(fmt: BlockFormat) -> None:
    if fmt.scale == "F32":
        pytest.skip("covered by the e8m0 format of the same block")
    tensor = whole_numbers(fmt, 256, 256, 1)
    for dim in (0, 1):
        if fmt.block[dim] == 1:
            continue
        inside = fmt.block[dim] // 2
        for shard in split(256, 256 // inside, inside, pad=False)[1:3]:
            with pytest.raises(ModelError, match="not whole blocks"):
                shards.take(tensor, dim, shard)


def test_b10_the_edge_block_may_be_short() -> None:
    tensor = whole_numbers(FP8_128, 300, 40, 2)
    last = split(300, 2, 128, pad=True)[1]
    assert (last.start, last.extent) == (256, Extent(44, 256))
    part = shards.take(tensor, 0, last)
    assert torch.equal(decode(part)[:44], decode(tensor)[256:]) and (decode(part)[44:] == 0).all()


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4, FP8_ROW_32], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("k", range(16, 513, 16))
def test_b11_padded_scale_columns_are_neutral(fmt: BlockFormat, k: int, seed: int) -> None:
    """A kernel with scale tiles of 4 columns executes more than K: no NaN, and the same sums."""
    tile = 4 * fmt.block[1]
    tensor = whole_numbers(fmt, 8, k, seed)
    (shard,) = split(k, 1, fmt.block[1], pad=True, tile=tile)
    wide = shards.take(tensor, 1, shard)
    assert wide.shape[1] % tile == 0 and wide.scale.shape[1] % 4 == 0
    shards.check_padding(wide, (8, k), "w2")

    def kernel(x: Tensor) -> Tensor:
        return x @ decode(wide).T

    shards.check_product(wide, kernel, "w2")
    x = torch.randint(-3, 4, (3, k), generator=torch.Generator().manual_seed(seed)).double()
    padded = torch.zeros(3, wide.shape[1], dtype=torch.float64)
    padded[:, :k] = x
    out = padded @ decode(wide, torch.float64).T
    assert torch.isfinite(out).all() and torch.equal(out, x @ decode(tensor, torch.float64).T)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=lambda fmt: fmt.name)
def test_b11_dirty_padding_is_caught_at_load(fmt: BlockFormat, seed: int) -> None:
    k, tile = 80, 4 * fmt.block[1]
    tensor = whole_numbers(fmt, 8, k, seed)
    (shard,) = split(k, 1, fmt.block[1], pad=True, tile=tile)
    clean = shards.take(tensor, 1, shard)
    columns = tensor.scale.shape[1]
    dirty = torch.empty_like(clean.scale)  # poisoned: every byte is the largest, a NaN
    dirty[:, :columns] = tensor.scale
    broken = BlockTensor(fmt, clean.shape, clean.data, dirty, clean.second)
    with pytest.raises(ModelError, match=r"'w2' .* scales that are not one") as caught:
        shards.check_padding(broken, (8, k), "w2")
    assert caught.value.code == "dirty_padding"
    with pytest.raises(ModelError, match="'w2'") as caught:
        shards.check_product(clean, lambda x: x @ decode(broken).T, "w2")
    assert caught.value.code == "wrong_product"
    data = clean.data.clone()
    data[0, -1] = 1
    with pytest.raises(ModelError, match="1 non-zero bytes and 0 scales"):
        shards.check_padding(BlockTensor(fmt, clean.shape, data, clean.scale, clean.second),
                             (8, k), "w2")  # fmt: skip


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("columns", range(1, 10))
def test_b11_scale_columns_alone(columns: int, seed: int) -> None:
    tensor = whole_numbers(NVFP4, 3, 16 * columns, seed)
    wide = shards.pad_scale_columns(tensor, 4)
    assert wide.shape[1] == -(-columns // 4) * 4
    assert torch.equal(wide[:, :columns], tensor.scale) and (wide[:, columns:] == 0x38).all()


def test_b11_a_small_error_is_within_tolerance(seed: int) -> None:
    tensor = whole_numbers(FP8_32, 64, 64, seed)
    dense = decode(tensor)
    shards.check_product(tensor, lambda x: x.bfloat16().float() @ dense.T, "w1")
    with pytest.raises(ModelError, match="off by"):
        shards.check_product(tensor, lambda x: 1.05 * (x @ dense.T), "w1")
