"""The C linear: exact weights, float64 reference, one result per row whatever the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from metainfer.core.errors import InternalError, ModelError
from metainfer.formats.quant import RawTensor, dequantise
from metainfer.formats.schemes import BLOCKS
from metainfer.ops.linear import cpu_c, cpu_onednn
from metainfer.ops.linear.packed import pack_dense
from tests.ops.cpu_cases import BUILDS, needs_compiler, poisoned, seeded, threads  # noqa: F401

pytestmark = needs_compiler

SCHEMES = sorted(cpu_c.SCHEMES)
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 33, 130)
SHAPES = ((1, 32), (16, 64), (49, 544), (37, 1056), (96, 512))  # N, K
EPS = 2.0**-24


def random_raw(scheme: str, n: int, k: int) -> RawTensor:
    """Random codes under random scales, subnormal, zero and negative ones among them."""
    raw = torch.randint(0, 256, (n, k // 32, BLOCKS[scheme][1]), dtype=torch.uint8)
    halves = 2 if scheme == "Q4_1" else 1
    scales = (torch.randn(n, k // 32, halves) * 0.02).half()
    scales.view(-1)[::7] *= 1e-4
    scales.view(-1)[::11] = 0.0
    raw[:, :, : 2 * halves] = scales.view(torch.uint8).view(n, k // 32, 2 * halves)
    return RawTensor(scheme, (n, k), raw.view(n, -1))


def close(found: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Within the bound of a float32 sum of short chains: 20 ulp of the sum of magnitudes.

    (Worst possible: chain length + number of chains; a wrong weight is off by 2**20 of these.)
    """
    offset = torch.zeros(()) if bias is None else bias
    exact = x.double() @ w.double().T + offset.double()
    size = x.double().abs() @ w.double().abs().T + offset.double().abs()
    return bool(((found.double() - exact).abs() <= 20 * EPS * size).all())


def test_error_is_at_most_that_of_the_library() -> None:
    """Law 2: at most 1.25 times the reference path's error against float64 (0.6-0.95 measured)."""
    for scheme in SCHEMES:
        for k in (576, 1536, 8192):
            raw = random_raw(scheme, 64, k)
            x, weight = torch.randn(150, k), dequantise(raw)
            exact = x.double() @ weight.double().T
            ours = (cpu_c.linear(x, cpu_c.pack([raw])) - exact).square().mean()
            library = (torch.nn.functional.linear(x, weight) - exact).square().mean()
            assert ours.sqrt() <= 1.25 * library.sqrt(), (scheme, k)


@pytest.mark.parametrize("build", BUILDS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_row_count_matches_float64_and_the_same_row_alone(
    scheme: str, build: tuple[str, ...]
) -> None:
    for n, k in SHAPES:
        raw = random_raw(scheme, n, k)
        bias = torch.randn(n) if n != 16 else None
        packed = cpu_c.pack([raw], bias, defines=build)
        x = torch.randn(max(ROWS), k)
        full = cpu_c.linear(x, packed)
        assert close(full, x, dequantise(raw), bias)
        for rows in ROWS:
            assert torch.equal(cpu_c.linear(x[:rows], packed), full[:rows]), (n, k, rows)
        assert torch.equal(cpu_c.linear(x[100:103], packed), full[100:103])


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_thread_count_does_not_change_a_bit(build: tuple[str, ...]) -> None:
    packed = cpu_c.pack([random_raw("Q4_1", 200, 544)], defines=build)
    for rows in (1, 7, 16, 40, 450):
        x = torch.randn(rows, 544)
        results = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            results.append(cpu_c.linear(x, packed))
        assert all(torch.equal(results[0], other) for other in results[1:]), rows


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_embedding_rows_are_exact(build: tuple[str, ...]) -> None:
    for scheme in SCHEMES:
        raw = random_raw(scheme, 83, 96)
        packed = cpu_c.pack([raw], defines=build)
        ids = torch.randint(0, 83, (1000,))
        assert torch.equal(cpu_c.embed(ids, packed), dequantise(raw)[ids])
        with pytest.raises(InternalError, match="token id"):
            cpu_c.embed(torch.tensor([83]), packed)
        with pytest.raises(InternalError, match="token id"):
            cpu_c.embed(torch.tensor([0, -1]), packed)


def test_linear_uses_exactly_the_dequantised_weight() -> None:
    """A unit vector picks one column, to the bit."""
    for scheme in SCHEMES:
        raw = random_raw(scheme, 35, 64)
        packed = cpu_c.pack([raw])
        columns = torch.eye(64)
        for rows in (1, 8, 64):
            assert torch.equal(cpu_c.linear(columns[:rows], packed), dequantise(raw).T[:rows])


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_matrices_of_mixed_schemes_stack_along_n(build: tuple[str, ...]) -> None:
    parts = [
        random_raw(s, n, 96) for s, n in (("Q4_1", 50), ("Q4_1", 3), ("Q8_0", 17), ("Q4_0", 64))
    ]
    bias = torch.randn(134)
    packed = cpu_c.pack(parts, bias, defines=build)
    assert packed.shape == (134, 96) and len(packed.data) == 3
    for rows in (1, 4, 20, 100):
        x = torch.randn(rows, 96)
        alone = torch.cat([cpu_c.linear(x, cpu_c.pack([p], defines=build)) for p in parts], 1)
        assert torch.equal(cpu_c.linear(x, packed), alone + bias)


def test_strided_inputs() -> None:
    raw = random_raw("Q4_1", 40, 64)
    packed = cpu_c.pack([raw])
    wide = torch.randn(20, 100)
    for rows in (3, 20):
        x = wide[:rows, 7:71]  # a view with a longer row stride, unaligned
        assert torch.equal(cpu_c.linear(x, packed), cpu_c.linear(x.contiguous(), packed))
        turned = torch.randn(64, rows).T
        assert torch.equal(cpu_c.linear(turned, packed), cpu_c.linear(turned.contiguous(), packed))


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_nothing_is_written_outside_the_output(build: tuple[str, ...]) -> None:
    packed = cpu_c.pack([random_raw("Q8_0", 21, 64)], defines=build)
    handle = packed.handle
    for rows in (1, 5, 16, 30):
        x = torch.randn(rows, 64)
        room = torch.full((rows + 2, 30), float("nan"))
        handle.linear(  # type: ignore[attr-defined]
            *(x.data_ptr(), rows, 64, 64, handle.segments, 1, None),  # type: ignore[attr-defined]
            *(room[1].data_ptr(), 30, 2),
        )
        assert torch.equal(room[1:-1, :21], cpu_c.linear(x, packed))
        assert room[1:-1, 21:].isnan().all() and room[0].isnan().all() and room[-1].isnan().all()


def test_a_nan_row_stays_in_its_row() -> None:
    packed = cpu_c.pack([random_raw("Q4_1", 40, 64)])
    for rows in (5, 40):
        x = torch.randn(rows, 64)
        x[2, 3] = float("nan")
        out = cpu_c.linear(x, packed)
        assert out[2].isnan().all() and not out[[0, 1, 3, 4]].isnan().any()


def test_refusals() -> None:
    raw = random_raw("Q4_1", 4, 64)
    packed = cpu_c.pack([raw])
    with pytest.raises(InternalError, match="float32"):
        cpu_c.linear(torch.randn(2, 64).double(), packed)
    with pytest.raises(InternalError, match="float32"):
        cpu_c.linear(torch.randn(2, 32), packed)
    with pytest.raises(InternalError, match="layout dense@1"):
        dense = pack_dense([raw], dtype=torch.float32)
        cpu_c.linear(torch.randn(2, 64), dense)
    with pytest.raises(InternalError, match="does not hold F32"):
        cpu_c.pack([RawTensor("F32", (4, 64), torch.randn(4, 64))])
    with pytest.raises(ModelError, match="bias"):
        cpu_c.pack([raw], torch.randn(5))
    bad = dataclasses.replace(raw, data=raw.data.clone())
    bad.data[1, 0], bad.data[1, 1] = 0, 0x7C  # infinity
    with pytest.raises(ModelError, match="not finite"):
        cpu_c.pack([bad])


def test_onednn_matches_float64() -> None:
    verdict = cpu_onednn.probe()
    if not verdict.accepted:
        pytest.skip(verdict.reasons[0].message)
    raw = random_raw("Q4_1", 70, 96)
    for bias in (None, torch.randn(70)):
        packed = cpu_onednn.pack([raw], bias)
        for rows in (0, 1, 2, 9, 130):
            x = torch.randn(rows, 96)
            assert close(cpu_onednn.linear(x, packed), x, dequantise(raw), bias)


def test_onednn_probe_gives_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("no such thing. At all")

    monkeypatch.setattr(cpu_onednn, "_multiply", refuse)
    verdict = cpu_onednn.probe.__wrapped__()
    assert [r.message for r in verdict.reasons] == ["oneDNN's linear refuses: no such thing"]
    monkeypatch.setattr(cpu_onednn, "_multiply", lambda x, w, b: torch.zeros(x.shape[0], 70))
    verdict = cpu_onednn.probe.__wrapped__()
    assert len(verdict.reasons) == 2 and "wrong by" in verdict.reasons[0].message
