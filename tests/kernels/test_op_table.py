"""The run-time table, its trace, and the rows that `doctor` prints."""

from __future__ import annotations

import pytest
import torch
from machines import card, kernel, request, trusted

from metainfer.core.errors import InternalError
from metainfer.core.step import Phase
from metainfer.formats.quant import RawTensor
from metainfer.kernels import explain
from metainfer.kernels.choice import Choice, Policy
from metainfer.kernels.impl import Evidence
from metainfer.kernels.registry import Registry
from metainfer.kernels.select import select
from metainfer.kernels.select_op import select_op
from metainfer.kernels.table import OpTable, PhaseOps, Trace
from metainfer.ops.linear.packed import PackedWeight, pack_dense
from metainfer.ops.trace import only_ops

HERE = __name__


def double(x: object, weight: object = None) -> str:
    return f"double {x}"


def triple(x: object, weight: object = None) -> str:
    return f"triple {x}"


def choice(op: str, name: str, site: str = "", phase: Phase = Phase.DECODE) -> Choice:
    impl = kernel(name, op=op, load=f"{HERE}:{name}")
    registry = Registry([impl])
    asked = request(op, phase, site=site or op)
    outcome = select_op(registry, asked, card((9, 0)), {}, Policy(evidence=trusted(registry)))
    assert isinstance(outcome, Choice)
    return outcome


def weight(site: str) -> PackedWeight:
    raw = RawTensor("F32", (2, 3), torch.ones(2, 3))
    return pack_dense([raw], dtype=torch.float32, site=site)


def test_attributes_are_the_functions_themselves() -> None:
    table = OpTable([choice("rmsnorm", "double"), choice("swiglu", "triple")])
    ops = table.phase(Phase.DECODE)
    assert ops.rmsnorm is double and ops.swiglu is triple and ops.impl("swiglu") == "swiglu/triple"
    assert ops.phase is Phase.DECODE and table.phases == (Phase.DECODE,)
    with pytest.raises(AttributeError):
        _ = ops.rope


def test_linear_dispatches_by_the_weight_s_site() -> None:
    table = OpTable(
        [choice("linear", "double", "linear.a"), choice("linear", "triple", "linear.b")]
    )
    ops = table.phase(Phase.DECODE)
    assert ops.linear(1, weight("linear.a")) == "double 1"
    assert ops.linear(1, weight("linear.b")) == "triple 1"
    assert ops.linear(1, weight("linear.a").at_site("linear.b")) == "triple 1"
    with pytest.raises(KeyError):
        ops.linear(1, weight("linear.c"))


def test_phases_never_borrow() -> None:
    table = OpTable([choice("rope", "double"), choice("rope", "triple", phase=Phase.CHUNK)])
    assert table.phase(Phase.DECODE).rope is double and table.phase(Phase.CHUNK).rope is triple
    with pytest.raises(InternalError, match="verify"):
        table.phase(Phase.VERIFY)


def test_sites_that_differ_must_be_fetched() -> None:
    table = OpTable(
        [choice("attn_paged", "double", "attn.full"), choice("attn_paged", "triple", "attn.window")]
    )
    ops = table.phase(Phase.DECODE)
    assert ops.at("attn.full") is double and ops.at("attn.window") is triple
    with pytest.raises(InternalError, match=r"attn\.full, attn\.window"):
        ops.attn_paged(1)
    with pytest.raises(InternalError, match=r"attn\.other"):
        ops.at("attn.other")
    same = OpTable([choice("rope", "double", "rope.a"), choice("rope", "double", "rope.b")])
    assert same.phase(Phase.DECODE).rope is double


def test_trace_counts_by_phase_and_implementation() -> None:
    trace = Trace()
    table = OpTable([choice("linear", "double", "linear.a"), choice("rope", "triple")], trace)
    ops = table.phase(Phase.DECODE)
    assert ops.linear(2, weight("linear.a")) == "double 2" and ops.rope(3) == "triple 3"
    ops.rope(4)
    assert trace.by_impl(Phase.DECODE) == {"linear/double": 1, "rope/triple": 2}
    assert trace.by_impl(Phase.CHUNK) == {} and not trace.inside


def failing(x: object) -> None:
    raise ValueError("x")


def test_trace_survives_an_exception() -> None:
    trace = Trace()
    ops = OpTable([choice("rope", "failing")], trace).phase(Phase.DECODE)
    with pytest.raises(ValueError, match="x"):
        ops.rope(1)
    assert not trace.inside


def matmul(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def test_heavy_work_outside_the_ops_is_found() -> None:
    trace = Trace()
    ops = OpTable([choice("rope", "matmul")], trace).phase(Phase.DECODE)
    x = torch.ones(100, 100)
    with only_ops(trace) as found:
        ops.rope(x)
        (x + 1).view(-1)
        x[:10] @ x[:, :10]
    assert found == []
    with pytest.raises(InternalError, match=r"aten\.mm.*2\.0 MFLOP"), only_ops(trace):
        ops.rope(x)
        x @ x
    with pytest.raises(InternalError, match=r"aten\.add"), only_ops(trace):
        torch.zeros(1001, 1000) + 1


def test_rows_and_text() -> None:
    registry = Registry(
        [
            kernel("good", 2.0, op="rope"),
            kernel("best", 1.0, op="rope"),
            kernel("ref", 9.0, op="rope", provider="reference"),
        ]
    )
    evidence = {"rope/good": Evidence.THIS_CARD, "rope/best": Evidence.COMPILED}
    requests = [request("rope", phase) for phase in (Phase.CHUNK, Phase.DECODE)]
    selection = select(registry, requests, card((9, 0)), Policy(evidence=evidence))
    rows = explain.rows(selection)
    assert [row["phase"] for row in rows] == ["chunk", "decode"]
    assert set(rows[0]) == {"op", "phase", "chosen", "why", "rejected", "slowdown"}
    assert rows[0]["chosen"] == {
        "impl": "rope/good",
        "quality": "compatible",
        "evidence": "ran on this card",
    }
    assert rows[0]["slowdown"] == 2.0
    rejected = {entry["impl"]: entry["reasons"] for entry in rows[0]["rejected"]}  # type: ignore[attr-defined]
    assert [r["code"] for r in rejected["best"]] == ["evidence"]
    assert [r["code"] for r in rejected["ref"]] == ["evidence", "reference"]
    text = explain.text(selection)
    assert "chunk,decode" in text and "2.00x" in text and "not best: evidence is" in text
    assert text.count("rope") >= 1 and len(text.splitlines()) == 4


def test_phase_ops_has_no_dictionary() -> None:
    """Attribute access stays a slot."""
    assert not hasattr(PhaseOps(Phase.DECODE, {}), "__dict__")
