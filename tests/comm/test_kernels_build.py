"""T0: the CUDA source compiles for every target, without spills; refusals are in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from metainfer.comm import layout, loader
from metainfer.comm.loader import Variant
from metainfer.kernels import cubin, driver

BF16 = layout.TYPES["bfloat16"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))


@pytest.mark.skipif(cubin.find_nvcc() is None, reason="no CUDA compiler here")
@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        (Variant(4, BF16), "sm_80"),
        (Variant(2, BF16), "sm_89"),
        (Variant(4, BF16, True), "sm_90"),
        (Variant(8, BF16, True), "sm_120"),
        (Variant(2, layout.BYTES), "sm_120"),
    ],
    ids=str,
)
def test_t0_compiles_without_spills(variant: Variant, arch: str) -> None:
    built, verdict, log = loader.build(variant, arch)
    assert verdict.accepted and built is not None and built[:4] == b"\x7fELF", log
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    assert "warning" not in log
    again, _, said = loader.build(variant, arch)
    assert again == built and said == "cached"


def test_every_kind_of_call_has_its_kernel() -> None:
    source = (loader.FOLDER / "kernels.cu").read_text()
    named = re.findall(r"^KERNEL\((\w+), MI_(\w+)\)$", source, re.MULTILINE)
    assert dict(named) == {name: kind.name for kind, name in layout.KERNELS.items()}


def test_a_compiler_that_fails_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "find_nvcc", lambda: "/bin/false")
    built, verdict, _ = loader.build(Variant(2, BF16), "sm_90")
    assert built is None and verdict.reasons[0].code == "compiler"
    monkeypatch.setattr(cubin, "find_nvcc", lambda: None)

    def none() -> None:
        raise RuntimeError("neither nvcc nor NVRTC was found")

    monkeypatch.setattr(cubin, "_nvrtc", none)
    _, verdict, _ = loader.build(Variant(2, BF16), "sm_90")
    assert "neither nvcc nor NVRTC" in verdict.reasons[0].message


def test_the_cache_key_knows_variant_target_and_compiler() -> None:
    keys = {
        cubin._target(variant.source, arch, version)
        for variant in (Variant(2, 0), Variant(4, 0), Variant(2, 1), Variant(2, 0, True))
        for arch in ("sm_80", "sm_90")
        for version in ("a", "b")
    }
    assert len(keys) == 16


def test_without_a_driver_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so")
    driver.library.cache_clear()
    with pytest.raises(driver.CudaError, match="no NVIDIA driver here"):
        driver.call("cuInit", 0)
    driver.library.cache_clear()
