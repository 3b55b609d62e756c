"""Kernels of others' libraries: what stops one is a reason, and only right numbers let it in."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.engine import proving
from metainfer.engine.elsewhere import describe
from metainfer.engine.machine import Machine, open_machine
from metainfer.engine.proving import Tried
from metainfer.kernels.impl import Context, Evidence, Impl, OpRequest
from metainfer.kernels.select_op import objections
from metainfer.ops.attn_sparse import cases as sparse_cases
from metainfer.ops.attn_sparse import vendor_flash_mla
from metainfer.ops.catalog import builtin_registry, op_cases
from metainfer.ops.linear import vendor_deep_gemm
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.tiles import foreign_rows
from metainfer.ops.qualify import applies, qualify
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import choose
from metainfer.platform.facts import DeviceFacts, Facts, HostFacts

REGISTRY = builtin_registry()
FOREIGN = {impl.id: impl for impl in REGISTRY.impls() if impl.library}
LINEAR, SPARSE = FOREIGN["linear/deep-gemm"], FOREIGN["attn_sparse/flash-mla"]
CARD = DeviceFacts(
    kind="cuda",
    name="a card of 9.0",
    capability=(9, 0),
    dot_types=frozenset({"bfloat16", "float8_e4m3fn"}),
    shared_bytes_per_block=232_448,
)
SOFTWARE = {"triton": "3.6.0", "deep_gemm": "0.1.5", "flash_mla": "1.0.0"}


def facts(card: DeviceFacts = CARD, **software: str | None) -> Facts:
    return Facts(
        platform="cuda", devices=(card,), host=HostFacts(), software={**SOFTWARE, **software}
    )


# ---- the libraries' contracts, on the host -------------------------------------------------------


def product(a: Any, b: Any, out: Tensor, *, weigh: bool = True) -> None:
    """`fp8_gemm_nt`: e4m3 [M, K] with float32 [M, K / 128], e4m3 [N, K] with [N / 128, K / 128]."""
    (x, x_scale), (w, w_scale) = a, b
    m, n = x.shape[0], w.shape[0]
    assert x_scale.shape == (m, x.shape[1] // 128) and x_scale.stride(0) == 1 and m % 4 == 0
    assert x_scale.dtype == w_scale.dtype == torch.float32
    left = x.float() * x_scale.repeat_interleave(128, 1)
    right = w.float()
    if weigh:
        right = right * w_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    out.copy_(left @ right.T)


def attention(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, attn_sink: Tensor,
    *, none: int = -1, sink: bool = True,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """`flash_mla_sparse_fwd`: one list of rows for each query; what is not -1 counts."""
    assert q.is_contiguous() and indices.dtype == torch.int32 and indices.shape[2] % 128 == 0
    rows = indices[:, 0].long()
    keys = kv[rows.clamp_min(0), 0].float()
    logits = torch.einsum("thd,tkd->thk", q.float(), keys) * sm_scale
    logits.masked_fill_((rows == none).unsqueeze(1), float("-inf"))
    last = attn_sink if sink else torch.full_like(attn_sink, float("-inf"))
    shares = torch.cat((logits, last.expand(len(q), -1).unsqueeze(2)), 2).softmax(2)[..., :-1]
    keys = keys.masked_fill((rows == none).unsqueeze(2), 0.0)
    mixed = torch.einsum("thk,tkd->thd", shares.nan_to_num(), keys)
    return mixed[..., :d_v].to(q.dtype), None, None


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """What our kernel makes of activations, in torch."""
    groups = x.float().view(len(x), -1, 128)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(2).clamp_min(1e-4) / 448)))
    values = (groups / scale.unsqueeze(2)).to(torch.float8_e4m3fn).view(x.shape)
    return values, scale.T.contiguous()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a library where imports find it; None: where they find nothing."""
    monkeypatch.setattr(vendor_deep_gemm, "quantise", quantised)
    monkeypatch.setattr(vendor_deep_gemm, "_COMPILED", {})
    for cached in (vendor_deep_gemm._deep_gemm, vendor_flash_mla._flash_mla):
        cached.cache_clear()

    def install(name: str, **functions: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module if functions else None)

    return install


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention is asked on a card takes a host a minute: here few rows of the same widths."""
    asked = (
        sparse_cases._foreign("all", (3, 140), (0, 9), (2, 17), ratio=16),
        sparse_cases._foreign("listed", (2, 300), (4, 4), top_k=9),
        sparse_cases._foreign("window", (3, 131), ratio=0),
    )
    monkeypatch.setattr(sparse_cases, "LAYOUTS", ())
    monkeypatch.setattr(sparse_cases, "FOREIGN_LAYOUTS", asked)


def reasons(impl: Impl, seed: int) -> list[str]:
    verdict = qualify(impl, "bfloat16", "cpu", facts(), REGISTRY, seed=seed)
    return [reason.message for reason in verdict.reasons]


def test_a_right_product_is_let_in(install: Callable[..., None], seed: int) -> None:
    sizes = []

    def counted(a: Any, b: Any, out: Tensor) -> None:
        sizes.append(len(out))
        product(a, b, out)

    install("deep_gemm", fp8_gemm_nt=counted)
    assert reasons(LINEAR, seed) == []
    assert {128, 192, 256} == set(sizes)  # every size up to the largest, and none else


def test_the_first_call_of_a_matrix_leaves_nothing_to_compile(install: Callable[..., None]) -> None:
    """The library compiles a form at first use: all sizes up to the first call's come before it."""
    sizes = []

    def counted(a: Any, b: Any, out: Tensor) -> None:
        sizes.append(len(out))
        product(a, b, out)

    install("deep_gemm", fp8_gemm_nt=counted)
    data = {
        "elements": torch.zeros(128, 128, dtype=torch.uint8),
        "scales": torch.full((1, 1), 127, dtype=torch.uint8),
    }
    weight = PackedWeight("stored@1", (128, 128), data, parts=(128,))
    assert vendor_deep_gemm.linear(torch.ones(250, 128).bfloat16(), weight).shape == (250, 128)
    vendor_deep_gemm.linear(torch.ones(5, 128).bfloat16(), weight)
    assert sizes == [128, 192, 256, 256, 128]


@pytest.mark.usefixtures("few")
def test_right_attention_is_let_in(install: Callable[..., None], seed: int) -> None:
    install("flash_mla", flash_mla_sparse_fwd=attention)
    assert reasons(SPARSE, seed) == []


@pytest.mark.usefixtures("few")
def test_releases_that_keep_hopper_s_kernels_apart_are_told(
    install: Callable[..., None], seed: int
) -> None:
    asked = []

    def forward(*args: Any, use_legacy: bool = False) -> Any:
        asked.append(use_legacy)
        return attention(*args)

    install("flash_mla", flash_mla_sparse_fwd=forward)
    assert reasons(SPARSE, seed) == [] and set(asked) == {True}


def unweighed(a: Any, b: Any, out: Tensor) -> None:
    product(a, b, out, weigh=False)


def a_little_off(a: Any, b: Any, out: Tensor) -> None:
    product(a, b, out)
    out.mul_(1.02)


def short(a: Any, b: Any, out: Tensor) -> None:
    """The last tile of the rows is not written."""
    whole = out.clone()
    product(a, b, whole)
    out[:-64].copy_(whole[:-64])


def stops(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("Unsupported architecture or scaling factor types\nmore")


@pytest.mark.parametrize("function", [unweighed, a_little_off, short])
def test_wrong_products_are_refused(
    function: Callable[..., None], install: Callable[..., None], seed: int
) -> None:
    install("deep_gemm", fp8_gemm_nt=function)
    assert reasons(LINEAR, seed)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("wrong", [{"sink": False}, {"none": -2}])
def test_wrong_attention_is_refused(
    wrong: dict[str, Any], install: Callable[..., None], seed: int
) -> None:
    def forward(*args: Any) -> Any:
        return attention(*args, **wrong)

    install("flash_mla", flash_mla_sparse_fwd=forward)
    assert reasons(SPARSE, seed)


@pytest.mark.parametrize(
    ("impl", "functions", "said"),
    [
        (LINEAR, {}, "cannot be imported: ModuleNotFoundError"),
        (LINEAR, {"gemm_fp8_fp8_bf16_nt": product}, "has no fp8_gemm_nt"),
        (LINEAR, {"fp8_gemm_nt": stops}, "AssertionError: Unsupported architecture"),
        (SPARSE, {}, "cannot be imported: ModuleNotFoundError"),
        (SPARSE, {"flash_mla_sparse_fwd": stops}, "AssertionError: Unsupported architecture"),
    ],
)
@pytest.mark.usefixtures("few")
def test_what_stops_a_library_is_a_reason(
    impl: Impl, functions: dict[str, Any], said: str, install: Callable[..., None], seed: int
) -> None:
    install(impl.library, **functions)
    found = reasons(impl, seed)
    assert found and all(said in reason for reason in found), found


@pytest.mark.parametrize("impl", FOREIGN.values(), ids=lambda impl: impl.id)
def test_a_card_or_an_installation_without_it_is_refused_by_name(impl: Impl) -> None:
    case = op_cases(impl.op).FOREIGN[impl.op](0)[0]
    request = OpRequest(
        impl.op, impl.op, Phase.CHUNK, "bfloat16", case.shape, case.semantics, case.schemes
    )

    def codes(given: Facts) -> list[str]:
        verdict = objections(impl, Context(request, given, impl.requires_layout))
        return [reason.code for reason in verdict.reasons]

    assert codes(facts()) == []
    assert codes(facts(**{impl.library: None})) == ["software"]
    newer = dataclasses.replace(CARD, capability=(12, 0), shared_bytes_per_block=101_376)
    assert codes(facts(newer)) == ["capability"]


@pytest.mark.parametrize("impl", FOREIGN.values(), ids=lambda impl: impl.id)
def test_every_library_is_asked_at_1_64_and_256_rows(impl: Impl) -> None:
    cases = op_cases(impl.op).FOREIGN[impl.op](0)
    wanted = frozenset({Phase.CHUNK})
    asked = {c.shape["rows"] for c in cases if applies(impl, c, "bfloat16", facts(), wanted)}
    assert {1, 64, 256} <= asked


def test_sizes_hold_the_rows_and_waste_at_most_a_third() -> None:
    for rows in range(1, 5000):
        *smaller, last = foreign_rows(rows)
        assert last >= rows and last % 64 == 0 and all(size < rows for size in smaller)
        assert rows <= 128 or last <= rows * 3 / 2
    assert foreign_rows(8192)[-3:] == (4096, 6144, 8192)


# ---- what they cost ------------------------------------------------------------------------------

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
SITES = {
    "fp8 product, wq_b": "linear.wq_b",
    "fp8 product, wo_b": "linear.wo_b",
    "fp8 product, wq_a+wkv": "linear.wqkv",
    "fp8 product, shared up+gate": "linear.shared13",
    "fp8 product, shared down": "linear.shared2",
    "fp8 product, indexer wq_b": "linear.index_q",
    "sparse attention, bf16": "attn_sparse.csa",
}


def test_auto_takes_a_library_s_kernel_only_where_it_was_the_faster_one() -> None:
    """Record and plan of the same card: a plan binds one kernel for every context of a chunk."""
    record = json.loads((RECORDS / "2026-11-30-h200-vendors-adapters.json").read_text())
    faster: dict[tuple[str, int], bool] = {}
    for row in record["rows"]:
        theirs = row["adapter" if "context" in row else "deep_gemm"]["median_s"]
        key = SITES[row["op"]], row["m"]
        faster[key] = faster.get(key, True) and theirs < row["ours"]["median_s"]
    taken = {(site, m) for m in (16, 128, 2048, 8192) for site, _ in foreign_sites(m)}
    assert all(faster[key] for key in taken)
    products = set(SITES.values()) - {"attn_sparse.csa", "linear.wqkv"}
    assert taken == {(site, m) for site in products for m in (2048, 8192)}


def test_a_pin_of_one_phase_leaves_the_others_to_auto() -> None:
    """FlashMLA serves chunks alone: asked for everywhere, no plan could decode."""
    asked = {"attn_sparse@chunk": "flash-mla"}
    found = {place for place in foreign_sites(8192, asked) if place[0].startswith("attn_sparse")}
    assert found == {(f"attn_sparse.{kind}", "chunk") for kind in ("window", "csa", "hca")}
    with pytest.raises(RefusedError, match="does not serve the decode phase"):
        foreign_sites(8192, {"attn_sparse": "flash-mla"})
    with pytest.raises(UsageError, match="OP@PHASE"):
        foreign_sites(8192, {"attn_sparse@walk": "flash-mla"})


def foreign_sites(rows: int, pins: dict[str, str] | None = None) -> set[tuple[str, str]]:
    """Sites and phases where a plan of DeepSeek-V4 for an H200 takes them, chunks of `rows`."""
    intent = Intent(
        model="random:deepseek-v4-flash?layers=12",
        chunk_tokens=rows,
        context=34_816,
        concurrency=16,
    )
    there = describe("1x-h200", intent)
    here = dataclasses.replace(there.facts, software={**there.facts.software, **SOFTWARE})
    policy = there.policy(intent)
    policy = dataclasses.replace(policy, min_evidence=Evidence.NONE, pins=pins or {})
    found = choose(intent, open_model(intent.model).facts, here, REGISTRY, policy)
    choices = [(c.request, c.impl) for c in found.bundle.choices]
    return {(request.site, request.phase.value) for request, impl in choices if impl.library}


# ---- on a machine --------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("METAINFER_CACHE", str(tmp_path))
    return open_machine("cpu")


def test_another_version_is_proven_anew(machine: Machine) -> None:
    def key(impl: Impl, version: str) -> str:
        return dataclasses.replace(machine, facts=facts(flash_mla=version))._key(impl, "bfloat16")

    assert key(SPARSE, "1.0.0") != key(SPARSE, "1.0.1")
    assert key(LINEAR, "1.0.0") == key(LINEAR, "1.0.1")


def test_it_is_proven_in_a_child_even_if_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign kernel may end the process that calls it first."""
    chosen = SimpleNamespace(bundle=SimpleNamespace(choices=[SimpleNamespace(impl=LINEAR)]))
    plan = SimpleNamespace(model=SimpleNamespace(dtype="bfloat16"))
    resolved = SimpleNamespace(selection=chosen, plan=plan)
    asked: list[str] = []

    def apart(ids: list[str], **more: Any) -> Iterator[Tried]:
        for key in ids:
            asked.append(key)
            yield Tried(key, "crashed", ("signal 11",))

    monkeypatch.setattr(Machine, "resolve", lambda self, model, intent: resolved)
    monkeypatch.setattr("metainfer.engine.machine.try_apart", apart)
    told: list[str] = []
    machine.resolve_proven(cast(Any, None), Intent(model=""), told.append)
    assert asked == told == [LINEAR.id]
    assert machine.qualified[LINEAR.id].reasons == ("signal 11",)


def test_children_do_not_take_an_engines_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen of them with 32 queues each stood in line on one card."""
    environs: list[Mapping[str, str]] = []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr(proving, "_try_all", lambda *asked: environs.append(asked[5]))
    assert not list(proving.try_apart(["linear/triton"], platform="cuda", dtype="bfloat16"))
    assert [("CUDA_DEVICE_MAX_CONNECTIONS" in each) for each in environs] == [False]
