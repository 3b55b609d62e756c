"""An implementation that declares that it may be captured asks the host nothing (law 1)."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from capture import HostReads, recorded

from metainfer.core.step import Phase
from metainfer.engine.machine import open_machine
from metainfer.kernels.impl import Impl
from metainfer.kv.book.form import EntryForm, index_fp8, index_plain
from metainfer.kv.store.entries import EntryPages, gather, put, store, take
from metainfer.kv.store.pools import TYPES
from metainfer.ops import qualify
from metainfer.ops.case import Case
from metainfer.ops.catalog import builtin_registry, op_cases

REGISTRY = builtin_registry()
FACTS = open_machine("cpu").facts
STATIC = [
    impl for impl in REGISTRY.impls() if impl.graph_safe and impl.provider in ("torch", "reference")
]
ASKING = [
    impl
    for impl in REGISTRY.impls()
    if not impl.graph_safe
    and impl.provider == "torch"
    and impl.name.startswith("torch")
    and impl.op != "sample"  # a step of argmaxes asks nothing
]


@cache
def cases(op: str) -> list[Case]:
    found: list[Case] = op_cases(op).CASES[op](0)
    return found


def reads(impl: Impl) -> set[str]:
    """What the host read while `impl` ran the smallest case of a decode step that has rows."""
    dtype = "float32" if "float32" in impl.dtypes else sorted(impl.dtypes)[0]
    decode = frozenset({Phase.DECODE})
    case = min(
        (
            case
            for case in cases(impl.op)
            if case.shape.get("rows", 1) and qualify.applies(impl, case, dtype, FACTS, decode)
        ),
        key=lambda case: math.prod(case.shape.values()),
    )
    run, given = impl.resolve(), qualify.given_args(impl, case, dtype, "cpu", REGISTRY)
    with HostReads() as watch:
        run(*given, **case.kwargs)
    return set(watch.found)


@pytest.mark.parametrize("impl", STATIC, ids=lambda impl: impl.id)
def test_what_may_be_captured_asks_the_host_nothing(impl: Impl) -> None:
    assert reads(impl) == set()


@pytest.mark.parametrize("impl", ASKING, ids=lambda impl: impl.id)
def test_what_may_not_be_captured_is_seen_asking(impl: Impl) -> None:
    """The watch sees every way in which our own torch versions ask."""
    assert reads(impl)


@pytest.mark.parametrize(
    "form", [index_plain(6, "float32"), index_fp8(32)], ids=lambda form: form.layout
)
@pytest.mark.parametrize("kept", ["all", "some", "none", "no rows"])
def test_put_stores_and_take_gathers_without_asking(form: EntryForm, kept: str) -> None:
    g = torch.Generator().manual_seed(7)
    count = 0 if kept == "no rows" else 9
    slots = torch.randperm(4 * 5, generator=g)[:count]
    skipped = {"all": 0.0, "some": 0.5, "none": 1.0, "no rows": 0.0}[kept]
    slots = torch.where(torch.rand(count, generator=g) < skipped, -1, slots)
    values = torch.randn(count, form.width, generator=g)
    values[slots < 0] = float("nan")

    def pages() -> EntryPages:
        shape = (4, 5, form.width) if form.stored != "uint8" else (4, form.page_bytes(5))
        data = torch.randint(1, 90, shape, generator=torch.Generator().manual_seed(3))
        return EntryPages(0, data.to(TYPES[form.stored]), form, 5)

    mine, want = pages(), pages()
    with HostReads() as watch:
        put(mine, slots, values)
        read = take(mine, slots)
    store(want, slots, values)
    assert watch.found == [] and torch.equal(mine.data, want.data)
    assert torch.equal(read, gather(want, slots))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), torch.tensor(0.0)),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: x.unique_consecutive(),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: x.to("meta"),
    ],
)
def test_each_way_of_asking_is_seen(ask: object) -> None:
    with HostReads() as watch:
        ask(torch.ones(3))  # type: ignore[operator]
    assert watch.found


def test_a_recorded_graph_follows_its_inputs_and_nothing_else() -> None:
    """A branch on a value is frozen as it was recorded, as on a device."""
    given, total = torch.zeros(4), torch.zeros(1)

    def step() -> torch.Tensor:
        if bool(given.sum() > 0):  # the host asks: what a capture cannot follow
            return given * 10
        total.add_(given.sum())
        return given[1:] + 1

    with torch.inference_mode(), recorded() as graph:
        out = step()
    given.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    graph.poison()
    assert out.isnan().all()
    graph.replay()
    assert out.tolist() == [3.0, 4.0, 5.0] and total.item() == 10.0
