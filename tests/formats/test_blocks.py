"""Descriptions of block formats: shapes, bytes, and a handshake that sees every difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import ModelError
from metainfer.formats import blocks
from metainfer.formats.blocks import FORMATS, FP8_32, FP8_128, MXFP4, NVFP4, agree

#: Published headers of DeepSeek-V4: (format, N, K, stored shape, scale shape).
PUBLISHED = [
    (FP8_128, 1024, 4096, (1024, 4096), (8, 32)),
    (FP8_128, 32768, 1024, (32768, 1024), (256, 8)),
    (FP8_128, 512, 4096, (512, 4096), (4, 32)),
    (FP8_32, 4096, 1280, (4096, 1280), (128, 40)),
    (MXFP4, 2048, 4096, (2048, 2048), (2048, 128)),
    (MXFP4, 4096, 2048, (4096, 1024), (4096, 64)),
    (NVFP4, 2048, 4096, (2048, 2048), (2048, 256)),
    (blocks.FP8_ROW_32, 1000, 256, (1000, 256), (1000, 8)),
]


@pytest.mark.parametrize(("fmt", "n", "k", "data", "scale"), PUBLISHED)
def test_published_shapes(
    fmt: blocks.BlockFormat, n: int, k: int, data: tuple[int, int], scale: tuple[int, int]
) -> None:
    assert fmt.data_shape(n, k) == data and fmt.scale_shape(n, k) == scale
    assert fmt.logical_shape(data) == (n, k)


def test_bytes_of_one_expert_are_the_published_ones() -> None:
    shapes = [(2048, 4096), (2048, 4096), (4096, 2048)]
    expert = {fmt.name: sum(fmt.nbytes(n, k) for n, k in shapes) for fmt in (MXFP4, NVFP4)}
    assert expert == {"mxfp4": 13_369_344, "nvfp4": 14_155_776 + 12}


@given(n=st.integers(0, 300), k=st.integers(0, 300), fmt=st.sampled_from(list(FORMATS.values())))
def test_every_element_has_a_scale(n: int, k: int, fmt: blocks.BlockFormat) -> None:
    k -= k % blocks.PER_BYTE[fmt.element]
    rows, columns = fmt.scale_shape(n, k)
    assert rows * fmt.block[0] >= n > (rows - 1) * fmt.block[0] or n == rows == 0
    assert columns * fmt.block[1] >= k > (columns - 1) * fmt.block[1] or k == columns == 0


def test_odd_columns_cannot_be_packed() -> None:
    with pytest.raises(ModelError, match="33 columns do not fill whole bytes"):
        MXFP4.data_shape(4, 33)
    with pytest.raises(ModelError, match=r"shape \[2, 3, 4\]"):
        MXFP4.logical_shape((2, 3, 4))


def test_b09_equal_identifiers_agree_whatever_the_tensors_are_called() -> None:
    agree(MXFP4, replace(MXFP4, name="experts", scale_leaf="weight_scale_inv"), "w1")
    assert len({fmt.identifier for fmt in FORMATS.values()}) == len(FORMATS)


CHANGES = {
    "element": "e4m3",
    "order": "high",
    "block": (1, 64),
    "scale": "F8_E4M3",
    "placement": "inline",
    "second": "divide",
    "version": 2,
}


@pytest.mark.parametrize("key", CHANGES)
def test_b09_any_difference_is_refused_by_name(key: str) -> None:
    reader = replace(MXFP4, **{key: CHANGES[key]})
    assert reader.identifier != MXFP4.identifier
    with pytest.raises(ModelError, match=rf"layers\.0\.w1 .*{key} .* against ") as caught:
        agree(MXFP4, reader, "layers.0.w1")
    assert caught.value.code == "layout_mismatch"


def test_b09_equal_size_is_no_agreement() -> None:
    swapped = replace(MXFP4, order="high")
    assert swapped.nbytes(64, 64) == MXFP4.nbytes(64, 64)
    with pytest.raises(ModelError, match="order low against high"):
        agree(MXFP4, swapped, "w1")


def test_names_beside_a_weight() -> None:
    assert MXFP4.leaf("layers.0.w1.weight", MXFP4.scale_leaf) == "layers.0.w1.scale"
    assert NVFP4.leaf("weight", "weight_scale") == "weight_scale"
    with pytest.raises(ModelError, match="not a weight"):
        MXFP4.leaf("layers.0.w1.bias", "scale")


def test_formats_by_block_and_scale() -> None:
    assert blocks.fp8_block((128, 128), "F8_E8M0") is FP8_128
    assert blocks.fp8_block((32, 32), "F8_E8M0") is FP8_32
    other = blocks.fp8_block((64, 32), "F32")
    assert other.block == (64, 32) and other.scale == "F32" and other.name == "fp8_64x32_f32"
