"""`lora`: every version against its cases, rows that must not touch each other, rows by adapter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.step import Phase
from metainfer.kernels.impl import Context, OpRequest
from metainfer.kernels.select_op import objections
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.lora import torch_lora
from metainfer.ops.lora.cases import cases
from metainfer.ops.lora.rows import AdapterRows, groups_of
from metainfer.ops.lora.torch_lora import lora, lora_grouped
from metainfer.ops.qualify import qualify
from metainfer.planner.opening import open_model
from metainfer.platform.facts import DeviceFacts, Facts

REGISTRY = builtin_registry()
IMPLS = {impl.name: impl for impl in REGISTRY.of("lora")}
CPU = Facts(platform="cpu", devices=(DeviceFacts(kind="cpu", name="a CPU"),))
CARD = Facts(platform="cuda", devices=(DeviceFacts(kind="cuda", name="a card"),))
VERSIONS = [lora, lora_grouped]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", IMPLS)
def test_cases(name: str, dtype: str, seed: int) -> None:
    verdict = qualify(IMPLS[name], dtype, "cpu", CPU, REGISTRY, seed=seed)
    assert verdict.accepted, verdict.reasons


def test_cases_hold_what_they_are_about() -> None:
    found = {case.name: case for case in cases(0)}
    rows = {name: case.args[5].index for name, case in found.items()}
    assert any(len(index) == 0 for index in rows.values())
    assert any(len(index) and bool((index == -1).all()) for index in rows.values())
    assert any(len(set(index.tolist())) > 3 for index in rows.values())
    padded = [case for case in found.values() if bool((case.args[2][0, :, -1] == 0).all())]
    assert len(padded) > 2  # some adapter has less than the largest rank
    assert any(bool(case.args[0].isnan().any()) for case in found.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_an_adapter_that_overflows_spoils_no_other_row(version, seed: int) -> None:
    """Infinite products of one adapter stay in its own rows."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 8, generator=g), torch.randn(6, 5, generator=g)
    a, b = torch.randn(2, 1, 3, 8, generator=g), torch.randn(5, 2, 3, generator=g)
    index = torch.tensor([0, 1, -1, 0, 1, 0])
    calm, wild = y.clone(), y.clone()
    rows, spans = AdapterRows(index), ((0, 5),)
    version(calm, x, a, b, torch.ones(2, 1), rows, spans=spans)
    a[1] = 1e38
    version(wild, x * 100, a, b, torch.ones(2, 1), rows, spans=spans)
    assert torch.isfinite(wild[index != 1]).all()
    assert not torch.isfinite(wild[index == 1]).all()
    assert torch.equal(wild[index == -1], y[index == -1])
    assert not torch.equal(calm[index == 0], y[index == 0])


@given(st.lists(st.integers(-1, 4), max_size=40))
def test_rows_by_adapter_are_all_rows_once(places: list[int]) -> None:
    index = torch.tensor(places, dtype=torch.int64)
    rebuilt = torch.full_like(index, -1)
    found = groups_of(index)
    assert [adapter for adapter, _ in found] == sorted({*places} - {-1})
    for adapter, rows in found:
        assert bool((rebuilt[rows] == -1).all())
        rebuilt[rows] = adapter
    assert torch.equal(rebuilt, index)


def test_a_run_is_a_slice_and_a_mix_is_not() -> None:
    (first, second, third) = groups_of(torch.tensor([2, 0, 0, 1, 2, -1]))
    assert first == (0, slice(1, 3)) and second == (1, slice(3, 4))
    assert isinstance(third[1], torch.Tensor) and third[1].tolist() == [0, 4]


def test_what_a_graph_cannot_hold_is_not_offered_for_cuda_decode() -> None:
    shape = {"rows": 8, "n": 64, "k": 64, "parts": 1, "adapters": 2, "rank": 4, "seqs": 8}
    for phase, offered in ((Phase.DECODE, False), (Phase.CHUNK, True), (Phase.VERIFY, True)):
        context = Context(OpRequest("lora", "lora.o", phase, "bfloat16", shape), CARD)
        verdict = objections(IMPLS["grouped"], context)
        assert verdict.accepted is offered
        assert offered or [reason.code for reason in verdict.reasons] == ["graph"]
        assert objections(IMPLS["torch"], context).accepted
    assert IMPLS["torch"].graph_safe and not IMPLS["grouped"].graph_safe


def test_a_model_without_adapters_asks_for_none() -> None:
    arch = open_model("random:tiny-llama").arch
    asked = arch.op_requests(Phase.DECODE, 8, 8, "float32", {}, 32)
    assert not [request for request in asked if request.op == "lora"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("rows", "threads"), [(4, 1), (4096, 2)])
def test_small_calls_wake_no_threads(
    version, rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever comes next finds the setting as it was, whatever happened."""
    seen: list[int] = []

    def watched(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        raise RuntimeError("stop here")

    monkeypatch.setattr(torch_lora, "_product", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        a, b = torch.ones(1, 1, 8, 256), torch.ones(256, 1, 8)
        where = AdapterRows(torch.zeros(rows, dtype=torch.int64))
        given = (torch.ones(rows, 256), torch.ones(rows, 256), a, b, torch.ones(1, 1), where)
        with pytest.raises(RuntimeError, match="stop here"):
            version(*given, spans=((0, 256),))
        assert (seen, torch.get_num_threads()) == ([threads], 2)
    finally:
        torch.set_num_threads(before)
