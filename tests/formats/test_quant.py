"""Block formats: decoders and encoders equal to the `gguf` library, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import ModelError
from metainfer.formats.quant import RawTensor, dequantise, quantise
from metainfer.formats.schemes import BLOCKS

SCHEMES = ["Q8_0", "Q4_0", "Q4_1"]
SHAPES = st.tuples(st.integers(0, 5), st.integers(1, 4))


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32 - 1))
def test_decoding_any_bytes_equals_the_library(
    scheme: str, shape: tuple[int, int], seed: int
) -> None:
    rows, blocks = shape
    raw = np.random.default_rng(seed).integers(
        0, 256, (rows, blocks * BLOCKS[scheme][1]), dtype=np.uint8
    )
    ours = dequantise(RawTensor(scheme, (rows, blocks * 32), torch.from_numpy(raw.copy())))
    assert ours.dtype == torch.float32 and ours.shape == (rows, blocks * 32)
    if not rows:  # which the library cannot do
        return
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[scheme])
    # Scales made of random bytes include infinities and NaN; -0.0 must stay -0.0.
    np.testing.assert_array_equal(ours.numpy(), theirs)
    assert (np.signbit(ours.numpy()) == np.signbit(theirs))[~np.isnan(theirs)].all()


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=60, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32 - 1), step=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_encoding_equals_the_library(
    scheme: str, shape: tuple[int, int], seed: int, step: float
) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal((shape[0], shape[1] * 32)).astype(np.float32)
    values *= np.float32(10.0 ** random.integers(-6, 4))
    if step:  # a grid makes ties between levels and equal extremes
        values = (np.round(random.standard_normal(values.shape) * 8) * step).astype(np.float32)
    ours = quantise(torch.from_numpy(values.copy()), scheme)
    assert ours.shape == values.shape
    if values.size:
        theirs = gguf.quantize(values, gguf.GGMLQuantizationType[scheme])
        np.testing.assert_array_equal(ours.data.numpy(), theirs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zero_and_constant_rows(scheme: str) -> None:
    values = torch.zeros(2, 64)
    values[1] = 3.0
    again = dequantise(quantise(values, scheme))
    assert torch.equal(again[0], values[0])
    assert torch.allclose(again[1], values[1], rtol=2e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ties_and_zero_scales_round_as_the_library(scheme: str) -> None:
    values = np.zeros((3, 32), dtype=np.float32)
    values[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -2.5]  # scale 1 in Q8_0: exact halves
    values[1] = -0.0
    values[2] = 5.0
    ours = quantise(torch.from_numpy(values), scheme).data.numpy()
    np.testing.assert_array_equal(ours, gguf.quantize(values, gguf.GGMLQuantizationType[scheme]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dense_schemes_are_cast_once(dtype: torch.dtype) -> None:
    for scheme, stored in (("F32", torch.float32), ("F16", torch.half), ("BF16", torch.bfloat16)):
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(stored)
        assert torch.equal(dequantise(RawTensor(scheme, (3, 4), data), dtype), data.to(dtype))


def test_leading_dimensions_are_kept() -> None:
    values = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(2))
    raw = quantise(values, "Q8_0")
    assert raw.data.shape == (6, 34) and dequantise(raw).shape == (2, 3, 32)


def test_other_schemes_are_refused_by_name() -> None:
    raw = RawTensor("Q6_K", (1, 256), torch.zeros(1, 210, dtype=torch.uint8))
    with pytest.raises(ModelError, match=r"Q6_K cannot be dequantised\. Supported: F32"):
        dequantise(raw)
    with pytest.raises(ModelError, match="I64 cannot be dequantised"):
        dequantise(RawTensor("I64", (1,), torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(ModelError, match="Q6_K cannot be produced"):
        quantise(torch.zeros(1, 256), "Q6_K")
    with pytest.raises(ModelError, match="32-element"):
        quantise(torch.zeros(1, 33), "Q8_0")


@pytest.mark.parametrize(
    ("scheme", "shape", "data"),
    [
        ("F32", (2,), torch.zeros(3)),
        ("F32", (2,), torch.zeros(2, dtype=torch.half)),
        ("Q8_0", (2, 32), torch.zeros(1, 68, dtype=torch.uint8)),
        ("Q8_0", (2, 32), torch.zeros(2, 34, dtype=torch.int8)),
        ("F4", (2,), torch.zeros(1, dtype=torch.uint8)),
    ],
)
def test_data_must_fit_its_header(scheme: str, shape: tuple[int, ...], data: torch.Tensor) -> None:
    with pytest.raises(ModelError):
        RawTensor(scheme, shape, data)
