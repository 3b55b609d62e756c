"""Compile audit: committed manifest, rebuilds of what changed and of a sample, its judgement."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from machines import host

from metainfer.core.errors import UsageError
from metainfer.kernels import audit, audit_cuda, cubin
from metainfer.kernels.audit import (
    DEFAULT_TARGETS,
    TARGETS,
    Build,
    compile_all,
    compile_kernel,
    judge,
    list_kernels,
    load_manifest,
    refresh_manifest,
    refusal,
    target_facts,
)
from metainfer.kernels.audit_worker import repeated
from metainfer.kernels.evidence import compiled, evidence_for
from metainfer.kernels.impl import Evidence
from metainfer.kernels.variant import Variant
from metainfer.ops.attn_paged.tiles import NARROW, SPLIT, WIDE, WIDE_WGMMA
from metainfer.ops.catalog import all_variants, builtin_registry

REGISTRY, VARIANTS = builtin_registry(), all_variants()
BY_NAME = {variant.name: variant for variant in VARIANTS}
PAIRS = [(v, t) for v in VARIANTS for t in DEFAULT_TARGETS if v.serves(t)]
IMPLS = {impl.id: impl for impl in REGISTRY.impls()}
CUDA = [variant for variant in VARIANTS if variant.cuda is not None]
BUILT = [(v, t) for v, t in PAIRS if not v.cuda and refusal(IMPLS[v.impl], v, t).accepted]
SIDE = Path(__file__).parents[2] / ".cache"
RELEASES = {name: SIDE / f"triton-{name}" for name in ("3.6.0", "3.7.1")}
FINE = {"ok": True, "shared_bytes": 0, "registers": 9, "spill_bytes": 0, "mma": [], "compiler": "x"}


def test_variants_are_complete() -> None:
    """Every kernel implementation in Triton or CUDA is audited, under names used once."""
    ours = {impl.id for impl in REGISTRY.impls() if impl.provider in ("triton", "cuda")}
    assert {variant.impl for variant in VARIANTS} == ours
    assert len(BY_NAME) == len(VARIANTS)


def test_manifest_holds_every_variant_and_target_of_the_present_source() -> None:
    """Fails when a kernel was edited without `refresh_manifest`."""
    rows = {(b.kernel, b.target, b.compiler.split(",")[0]): b for b in load_manifest()}
    for variant, target in PAIRS:
        for release in ("triton 3.6.0", "triton 3.7.1") if variant.cuda is None else ("nvcc 13.0",):
            found = rows.get((variant.name, target, release), rows.get((variant.name, target, "")))
            assert found is not None, (variant.name, target, release)
            assert found.source == variant.source(), variant.name
            assert found.ok or found.refused, found.reasons


def test_declared_shared_memory_is_an_upper_bound() -> None:
    """The estimate that selection uses against what every compiler needed."""
    tiles = {"wide": WIDE, "wgmma": WIDE_WGMMA, "narrow": NARROW, "split": SPLIT}
    checked = 0
    for build in load_manifest():
        kind = build.kernel.split("-")[1] if build.kernel.startswith("attn-") else ""
        if kind in tiles and build.shared_bytes is not None:
            d = BY_NAME[build.kernel].shape["d"]
            estimate = tiles[kind].shared_bytes(d, 2, TARGETS[build.target][0])
            assert build.shared_bytes <= estimate, (build.kernel, build.target)
            checked += 1
    assert checked > 50


def _same(fresh: Build) -> None:
    """A rebuild passes, and equals the committed row of the same compiler where there is one."""
    assert fresh.ok, (fresh.kernel, fresh.target, fresh.reasons)
    for row in load_manifest():
        mine = (row.kernel, row.target, row.compiler)
        if mine == (fresh.kernel, fresh.target, fresh.compiler):
            assert row == fresh


def _stale(release: str) -> list[tuple[Variant, str]]:
    known = {
        (b.kernel, b.target, b.source)
        for b in load_manifest()
        if f"triton {release}," in b.compiler
    }
    return [(v, t) for v, t in BUILT if (v.name, t, v.source()) not in known]


def test_a_sample_rebuilds_with_the_installed_triton(rng: random.Random) -> None:
    triton = pytest.importorskip("triton")
    chosen = rng.sample(BUILT, 4)
    stale = _stale(triton.__version__)
    for variant, target in chosen + stale[:3]:
        _same(compile_kernel(variant, target))


@pytest.mark.parametrize("release", list(RELEASES))
def test_changed_kernels_and_a_sample_rebuild_with_each_release(
    release: str, rng: random.Random
) -> None:
    if not RELEASES[release].exists():
        pytest.skip(f"triton {release} is not in .cache")
    sample = rng.sample(BUILT, 3)
    for variant, target in sample + _stale(release)[:8]:
        fresh = compile_kernel(variant, target, triton=RELEASES[release])
        assert fresh.compiler.startswith(f"triton {release},")
        _same(fresh)


@pytest.mark.skipif(cubin.find_nvcc() is None, reason="no CUDA compiler here")
def test_a_kernel_in_cuda_rebuilds_with_its_own_instruction(rng: random.Random) -> None:
    (product,) = rng.sample([variant for variant in CUDA if variant.mma], 1)
    built = compile_kernel(product, "sm_120")
    _same(built)
    assert built.spill_bytes == 0 and built.mma == (f"{product.mma}.ue8m0",)
    assert built.shared_bytes == product.shared_bytes <= TARGETS["sm_120"][1]


def test_a_cuda_source_hash_follows_files_and_sizes(tmp_path: Path) -> None:
    variant = next(variant for variant in CUDA if variant.mma)
    assert variant.cuda is not None
    header = tmp_path / "cuda_ptx.h"
    header.write_text("changed")
    others = (
        replace(variant, kernel="mx_other"),
        replace(variant, shared_bytes=1),
        replace(variant, cuda=replace(variant.cuda, headers=(header,))),
        replace(variant, cuda=replace(variant.cuda, defines=("-DMX_M=8",))),
    )
    assert len({variant.source(), *(other.source() for other in others)}) == 5


def test_without_nvcc_a_kernel_in_cuda_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="nvcc, which was not found"):
        audit_cuda.build({"function": "mx_up", "arch": "sm_120a"})
    monkeypatch.setattr(cubin, "find_nvcc", lambda: "/bin/false")
    job = {"function": "mx_up", "arch": "sm_120a", "defines": [], "file": "x", "shared": 0}
    with pytest.raises(RuntimeError, match="nvcc ended with 1"):
        audit_cuda.build(job)


# ---- judgement -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ({"shared_bytes": 101_377}, "101,377 B of shared memory of 101,376 B"),
        ({"spill_bytes": 8}, "spills 8 B"),
        ({"spill_bytes": None}, "spills None B"),
        ({"serial": "insufficient registers"}, "by itself: insufficient registers"),
        ({"repeated": "8 channels a thread of 16"}, "some channels twice: 8 channels a thread"),
        ({"mma": ["mma.sync.aligned.m16n8k16"]}, "claims no matrix instruction"),
    ],
)
def test_checks_refuse(answer: dict[str, object], word: str) -> None:
    good = judge(BY_NAME["swiglu"], "sm_120", FINE)
    assert good.ok and not good.reasons
    bad = judge(BY_NAME["swiglu"], "sm_120", {**FINE, **answer})
    assert not bad.ok and word in bad.reasons[0]


def test_claimed_instruction_must_appear() -> None:
    attention = BY_NAME["attn-wgmma-32/8x128p16"]
    assert not judge(attention, "sm_90", FINE).ok
    assert not judge(attention, "sm_90", {**FINE, "mma": ["mma.sync.x"]}).ok
    assert judge(attention, "sm_90", {**FINE, "mma": ["wgmma.mma_async.x"]}).ok


@pytest.mark.parametrize(("wide", "right"), [(16, False), (64, True)])
def test_a_product_that_takes_channels_twice_is_refused(wide: int, right: bool) -> None:
    """Found on a card: keys of half bytes, 16 channels wide, by `mma.sync`."""
    release = RELEASES["3.6.0"]
    if not release.exists():
        pytest.skip("triton 3.6.0 is not in .cache")
    variant = BY_NAME["index-score-one-fp4-4x16"]
    variant = replace(variant, args={**variant.args, "WIDE": wide})
    built = compile_kernel(variant, "sm_89", triton=release)
    assert built.ok == right and ("some channels twice" in " ".join(built.reasons)) != right


@pytest.mark.parametrize(
    ("depth", "each", "why"), [(64, 8, ""), (32, 8, ""), (16, 8, "8 channels a thread of 16")]
)
def test_products_that_repeat_channels_are_read_off(depth: int, each: int, why: str) -> None:
    """A layout that repeats itself once is multiplied rightly."""
    operand = f"tensor<64x{depth}xbf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {each}}}>>"
    assert repeated(f"%1 = tt.dot %2, %3, %4, inputPrecision = tf32 : {operand} * ") == why


def test_explained_spill_is_allowed_up_to_its_size() -> None:
    variant = replace(BY_NAME["swiglu"], spill_bytes=8, why="measured faster so")
    assert judge(variant, "sm_90", {**FINE, "spill_bytes": 8}).ok
    assert not judge(variant, "sm_90", {**FINE, "spill_bytes": 12}).ok


def test_excluded_targets_are_refused_with_reasons() -> None:
    old, small = compile_all(
        ["sm_75"], registry=REGISTRY, variants=[BY_NAME["swiglu"], BY_NAME["attn-wide-32/8x128p16"]]
    )
    assert old.refused and not old.ok and "needs capability 8.0" in old.reasons[0]
    text = " ".join(small.reasons)
    assert ("shared memory" in text and "bfloat16" in text) or "capability" in text
    assert old.to_json()["refused"] is True and old.to_json()["mma"] == []


def test_unknown_target() -> None:
    with pytest.raises(UsageError, match="sm_90"):
        target_facts("sm_999")
    assert target_facts("sm_120a") == target_facts("sm_120")


def test_child_that_dies_costs_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that kills its process stands for a compiler that crashes."""
    (tmp_path / "deadly.py").write_text("import os\nos._exit(11)\n")
    (tmp_path / "harmless.py").write_text("kernel = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    jobs = [
        {"kernel": f"{module}:kernel", "args": [], "warps": 4, "stages": 2, "arch": 90}
        for module in ("harmless", "deadly", "harmless")
    ]
    answers = audit._run(jobs, None)
    assert [answer["ok"] for answer in answers] == [False, False, False]
    assert "ended with 11" in answers[1]["error"]
    assert "ended" not in answers[0]["error"] and "ended" not in answers[2]["error"]


def test_illegal_kernel_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    (tmp_path / "bad_kernel.py").write_text(
        "import triton\nimport triton.language as tl\n\n"
        "@triton.jit\ndef kernel(x):\n    tl.store(x, undefined_name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    variant = replace(
        BY_NAME["swiglu"], name="bad", kernel="bad_kernel:kernel", args={"x": "*fp32"}
    )
    build = compile_kernel(variant, "sm_90")
    assert not build.ok and build.reasons and "undefined_name" in build.reasons[0]


# ---- manifest ------------------------------------------------------------------------------------


def test_refresh_replaces_and_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "manifest.json"
    variant = BY_NAME["swiglu"]
    stale = Build(
        impl=variant.impl, kernel="swiglu", target="sm_80", ok=True, source="old", compiler="c"
    )
    kept = replace(stale, source=variant.source(), compiler="other")
    audit.save_manifest([stale, kept], path)
    answer = {**FINE, "compiler": "new"}
    monkeypatch.setattr(audit, "_run", lambda jobs, triton: [answer for _ in jobs])
    refresh_manifest(REGISTRY, [variant], targets=["sm_90"], path=path)
    rows = load_manifest(path)
    assert {(b.compiler, b.target) for b in rows} == {("other", "sm_80"), ("new", "sm_90")}
    body = json.loads(path.read_text())
    assert body["schema"] == 1
    wanted = {
        "kernel",
        "target",
        "ok",
        "shared_bytes",
        "registers",
        "spill_bytes",
        "mma",
        "compiler",
    }
    assert wanted <= set(body["entries"][0])


def test_source_hash_follows_code_and_constants() -> None:
    variant = BY_NAME["attn-narrow-32/8x128p16"]
    assert variant.source() == replace(variant, name="other").source()
    assert variant.source() != replace(variant, warps=8).source()
    assert variant.source() != replace(variant, args={**variant.args, "N": 32}).source()
    assert variant.source() != BY_NAME["attn-narrow-32/8x128p64"].source()


def test_compiled_only_is_evidence_for_that_target_alone() -> None:
    assert "sm_90" in compiled()["rope/triton"] and "sm_75" not in compiled()["rope/triton"]
    unseen = {
        k: v for k, v in evidence_for(target_facts("sm_120")).items() if v is Evidence.COMPILED
    }
    nowhere = evidence_for(host())
    assert Evidence.COMPILED not in nowhere.values()
    assert all("/triton" in impl or "/cuda-" in impl for impl in unseen)
    assert "moe_experts/cuda-mxf8f6f4" in unseen


def test_list_kernels_rows() -> None:
    rows = list_kernels(REGISTRY, target_facts("sm_75"))
    assert [row["kernel"] for row in rows] == [impl.id for impl in REGISTRY.impls()]
    by_id = {row["kernel"]: row for row in rows}
    triton = by_id["attn_paged/triton"]
    assert not triton["runs_here"] and triton["conditions"][0]["code"] == "capability"
    assert by_id["attn_paged/torch"]["runs_here"]
    assert not by_id["attn_paged/c"]["runs_here"]
    json.dumps(rows)
