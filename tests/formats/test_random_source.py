"""Random tensors: distribution, storage, seeds; in the form in which a checkpoint holds them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import InternalError
from metainfer.formats import random_source
from metainfer.formats.block_codecs import BlockTensor, check_scales, decode
from metainfer.formats.drawn import Drawn
from metainfer.formats.quant import RawTensor
from metainfer.formats.random_source import RandomSource


def draw(drawn: Drawn, seed: int = 3, name: str = "a.weight") -> RawTensor | BlockTensor:
    return RandomSource({name: drawn}, seed).read(name)


@pytest.mark.parametrize("scheme", ["fp8_128", "fp8_32", "mxfp4"])
def test_blocks_have_the_deviation_and_sane_scales(scheme: str) -> None:
    tensor = draw(Drawn((512, 1024), scheme))
    assert isinstance(tensor, BlockTensor) and tensor.format.name == scheme
    check_scales(tensor, "a.weight")
    values = decode(tensor, torch.float64)
    assert float(values.std()) == pytest.approx(0.02, rel=0.06)
    assert abs(float(values.mean())) < 2e-4
    assert 0.055 < float(values.abs().max()) < 0.2
    # A scale in the wrong place must show: neighbours differ, and blocks are not all alike.
    counts = tensor.scale.unique(return_counts=True)[1]
    assert len(counts) == 2 and float(counts.min()) / int(counts.sum()) > 0.1
    if scheme == "mxfp4":
        codes = torch.stack((tensor.data & 15, tensor.data >> 4)).flatten()
        assert set(codes.unique().tolist()) >= set(range(1, 16)) - {8}
        low, high = (tensor.data & 7).double(), (tensor.data >> 4 & 7).double()
        assert abs(float(torch.corrcoef(torch.stack((low.flatten(), high.flatten())))[0, 1])) < 0.02


@pytest.mark.parametrize("scheme", ["BF16", "F32"])
def test_dense_matrices_and_norms(scheme: str) -> None:
    matrix = draw(Drawn((300, 200), scheme))
    assert isinstance(matrix, RawTensor) and matrix.scheme == scheme
    assert float(matrix.data.double().std()) == pytest.approx(0.02, rel=0.02)
    norm = draw(Drawn((4096,), scheme, mean=1.0, deviation=0.1))
    assert float(norm.data.double().mean()) == pytest.approx(1.0, abs=0.01)
    assert float(norm.data.double().std()) == pytest.approx(0.1, rel=0.1)


@given(rows=st.integers(0, 40), width=st.integers(1, 8), spare=st.integers(0, 9))
def test_ids_differ_within_a_row(rows: int, width: int, spare: int) -> None:
    ids = draw(Drawn((rows, width), "I64", below=width + spare)).data
    assert ids.dtype == torch.int64 and ids.shape == (rows, width)
    assert all(len(set(row)) == width for row in ids.tolist())
    assert not rows or (int(ids.min()) >= 0 and int(ids.max()) < width + spare)


def test_each_id_is_as_likely_in_each_column() -> None:
    ids = draw(Drawn((40_000, 3), "I64", below=8)).data
    for column in ids.unbind(1):
        assert torch.bincount(column, minlength=8).double().div(5000).sub(1).abs().max() < 0.06
    with pytest.raises(InternalError):
        draw(Drawn((2, 9), "I64", below=8))


def test_draws_follow_seed_and_name_and_not_the_threads() -> None:
    for drawn in (Drawn((64, 128), "mxfp4"), Drawn((64, 128), "BF16")):
        first = draw(drawn)
        assert torch.equal(first.data, draw(drawn).data)
        assert not torch.equal(first.data, draw(drawn, seed=4).data)
        assert not torch.equal(first.data, draw(drawn, name="b.weight").data)


def test_chunks_are_bounded_and_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_source, "CHUNK", 1000)
    for scheme, size in (("BF16", 96 * 64), ("fp8_32", 96 * 64), ("mxfp4", 96 * 32)):
        tensor = draw(Drawn((96, 64), scheme))
        flat = tensor.data.flatten()
        assert flat.numel() == size
        parts = flat.split(1000)
        assert not any(torch.equal(parts[0], part) for part in parts[1:])
        values = decode(tensor) if isinstance(tensor, BlockTensor) else tensor.data.float()
        assert float(values.std()) == pytest.approx(0.02, rel=0.1)


def test_formats_that_are_not_drawn_are_a_defect() -> None:
    with pytest.raises(InternalError, match="nvfp4"):
        draw(Drawn((32, 32), "nvfp4"))
    with pytest.raises(InternalError, match="mean"):
        draw(Drawn((32, 32), "mxfp4", mean=1.0))
