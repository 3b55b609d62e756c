"""``kernels.cu`` itself, run on the host: a block is a set of threads (`kernels_on_host.cpp`).

What this cannot show: the order of real memory, and time. What it does: indices, alignment,
barriers, packs, the canonical sum and the epilogue, on the source that a GPU gets.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from ranks import plan_of, together
from test_local import ALGORITHMS, check, expected, inputs, same

from metainfer.comm import layout
from metainfer.comm.backends.calls import Rows, Side
from metainfer.comm.backends.local import LocalGroup
from metainfer.comm.backends.slabs import SlabComm
from metainfer.comm.exact import canonical_add_rmsnorm, canonical_sum
from metainfer.comm.layout import Call, ErrorRecord
from metainfer.comm.request import Epilogue, Op, Request

SOURCE = Path(__file__).with_name("kernels_on_host.cpp")
FLAGS = (
    "-x",
    "c++",
    "-std=c++17",
    "-O1",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-gnu-unique",
)  # a static of a template is a rank's own, too
HOOK = ctypes.CFUNCTYPE(None)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler here")


@pytest.fixture(scope="module", params=["any", "N=4"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, for any world and as it is built for four ranks."""
    target = tmp_path_factory.mktemp("kernels") / f"{request.param[-1]}.so"
    fixed = () if request.param == "any" else (f"-DMI_{request.param}",)
    extra = ("-Wno-unknown-pragmas", "-Wno-psabi", "-march=native")
    subprocess.run(["g++", *FLAGS, *fixed, *extra, str(SOURCE), "-o", str(target)], check=True)
    return target


class OneBlock:
    """Stands in for ``shm_cpu.c``: a rank's own copy of the kernels, run by `threads` threads."""

    def __init__(self, library: Path, plain: Any, threads: int) -> None:
        self.run = ctypes.CDLL(str(library)).run_block
        self.mi_abort = plain.mi_abort
        self.threads = threads

    def mi_run(self, call: Any, block: int, grid: int) -> int:
        assert self.run(call, self.threads, 0, 0, 1) == 0, "a 16-byte access was not aligned"
        error = ctypes.cast(call, ctypes.POINTER(Call)).contents.error
        return int(ErrorRecord.from_address(error).code)


class EarlyBlock(OneBlock):
    """As if launched while the kernel before it still runs: until the block waits for that one, the
    input is not there (`given`) and the call counter is an old one. `last`: for each block that let
    the next launch go, whether it had heard of every peer for the last time."""

    def __init__(self, library: Path, plain: Any, threads: int) -> None:
        super().__init__(library, plain, threads)
        self.hooks = ctypes.CDLL(str(library)).set_hooks
        self.given = torch.empty(0)
        self.last: list[bool] = []

    def mi_run(self, call: Any, block: int, grid: int) -> int:
        made = ctypes.cast(call, ctypes.POINTER(Call)).contents
        counter = ctypes.c_uint64.from_address(made.state)
        calls, kept = counter.value, self.given.clone()
        counter.value = calls - 1
        self.given.view(torch.uint8).fill_(255)

        def wait() -> None:
            counter.value = calls
            self.given.copy_(kept)

        def trigger() -> None:
            phase = int(made.kind == layout.Kind.SUM_GATHER)
            first = made.slab[made.rank] + layout.HEADER
            row = first + (phase * layout.BLOCKS + block) * layout.WORLD * layout.FLAG_STEP
            seen = [
                ctypes.c_uint64.from_address(row + peer * layout.FLAG_STEP).value % (1 << 40)
                for peer in range(made.world)
                if peer != made.rank
            ]
            self.last.append(all(each in (calls + 1, calls + 2) for each in seen))

        held = HOOK(wait), HOOK(trigger)
        self.hooks(*held)
        try:
            return super().mi_run(call, block, grid)
        finally:
            self.hooks(HOOK(), HOOK())


class KernelGroup(LocalGroup):
    """Ranks whose calls run as `block` runs them."""

    block: type[OneBlock] = OneBlock

    def __init__(self, built: Path, world: int, threads: int = 32, **options: Any) -> None:
        super().__init__(world, **options)
        for comm in self.ranks:
            own = built.with_name(f"{built.stem}-{comm.rank}.so")
            if not own.exists():
                shutil.copy(built, own)
            comm._library = self.block(own, comm._library, threads)  # type: ignore[assignment]


class EarlyGroup(KernelGroup):
    block = EarlyBlock


def worlds(built: Path) -> tuple[int, ...]:
    return (int(built.stem),) if built.stem.isdigit() else (2, 3)


@pytest.mark.parametrize("shared", [False, True], ids=["pushed", "shared"])
def test_every_op_to_the_bit(built: Path, shared: bool, seed: int) -> None:
    for world in worlds(built):
        with KernelGroup(built, world, slot_bytes=768, shared=shared) as group:
            for op, algorithm in ALGORITHMS:
                for count in (0, 1, 8 * world, 501):
                    n = count // world * world if op is Op.ALL_TO_ALL else count
                    request = Request(op=op, count=n, dtype="bfloat16", world=world, root=1)
                    check(group, request, algorithm, seed + count)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_every_type_to_the_bit(built: Path, dtype: str, seed: int) -> None:
    for world in worlds(built):
        with KernelGroup(built, world, slot_bytes=4096, first_call=(1 << 40) - 2) as group:
            for algorithm in ("one_shot", "two_shot"):
                request = Request(op=Op.ALL_REDUCE, count=1003, dtype=dtype, world=world)
                check(group, request, algorithm, seed, times=2)


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_moving_bytes_of_any_alignment(built: Path, dtype: str, seed: int) -> None:
    for world in worlds(built):
        with KernelGroup(built, world, slot_bytes=512, shared=False) as group:
            for op in (Op.ALL_GATHER, Op.BROADCAST):
                check(group, Request(op=op, count=1001, dtype=dtype, world=world), "direct", seed)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize(
    ("rows", "hidden", "dtype"),
    [
        (3, 4096, "bfloat16"),
        (2, 7168, "bfloat16"),
        (2, 2056, "float16"),
        (3, 17, "bfloat16"),
        (2, 3000, "float64"),
    ],
)
def test_epilogues_and_counts_to_the_bit(
    built: Path, rows: int, hidden: int, dtype: str, algorithm: str, seed: int
) -> None:
    check_rows(built, rows, hidden, dtype, algorithm, seed)


@pytest.mark.parametrize("built", ["N=2"], indirect=True)
def test_rows_of_two_ranks_are_added_as_they_are_stored(built: Path, seed: int) -> None:
    check_rows(built, 3, 4096, "bfloat16", "one_shot", seed)


def check_rows(built: Path, rows: int, hidden: int, dtype: str, algorithm: str, seed: int) -> None:
    """Rows as they come, special values among them."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    world = worlds(built)[-1]
    given = [torch.randn(rows, hidden, generator=generator).to(kind) for _ in range(world)]
    residual = torch.randn(rows, hidden, generator=generator).to(kind)
    given[0][1, 0], given[1][1, 0] = float("inf"), -float("inf")  # their sum is no number,
    residual[-1, 9] = float("nan")  # nor is this, in a row of its own where there are three
    weight = torch.randn(hidden, generator=generator).to(kind)
    check_given(built, given, residual, weight, algorithm, 1e-5)


def check_given(
    built: Path,
    given: list[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    algorithm: str,
    eps: float,
) -> None:
    """Sum, residual, norm and counts of every rank."""
    world, (rows, hidden) = len(given), residual.shape
    request = Request(
        op=Op.ALL_REDUCE, count=rows * hidden, dtype=str(residual.dtype)[6:], world=world,
        epilogue=Epilogue(hidden=hidden, eps=eps), side_int32=5,
    )  # fmt: skip
    counts = [torch.arange(5, dtype=torch.int32) * (rank + 1) for rank in range(world)]
    want, total = canonical_add_rmsnorm(canonical_sum(given), residual, weight, eps)

    def step(comm: SlabComm) -> None:
        made = Rows(residual.clone(), weight, torch.full_like(residual, float("nan")))
        side = Side(counts[comm.rank], torch.full((5,), -1, dtype=torch.int32))
        plan = plan_of(request, algorithm)
        out = comm.run(plan, given[comm.rank], rows=made, side=side)
        assert same(out, canonical_sum(given)), "sum"
        assert same(made.residual, total), "residual"
        assert same(made.normed, want), "normed"
        assert torch.equal(side.summed, canonical_sum(counts)), "counts"

    with KernelGroup(built, world, threads=512, slot_bytes=256 * 1024) as group:
        assert together(group, step) == [None] * world


@pytest.mark.parametrize("built", ["N=4"], indirect=True)
def test_inverse_roots_are_exact_however_they_are_begun(built: Path) -> None:
    """All significands, both parities of the exponent, from what a card may begin with: its manual
    has an error of 2^-22.9, which is three units of the last place; and the ends of the range."""
    library = ctypes.CDLL(str(built))
    library.wrong_roots.restype = ctypes.c_uint64
    ends = [0x1F800000, 0x71800000 - (1 << 16)]
    try:
        for units in (-6, -3, -2, -1, 0, 1, 2, 3, 6):
            library.set_units_off(units)
            assert library.wrong_roots(0x3F800000, 1 << 24) == 0, units
            assert [library.wrong_roots(end, 1 << 17) for end in ends] == [0, 0]
    finally:
        library.set_units_off(0)


@pytest.mark.parametrize("built", ["N=4"], indirect=True)
def test_quotients_are_exact_beside_ties_too(built: Path) -> None:
    library = ctypes.CDLL(str(built))
    library.wrong_quotients.restype = ctypes.c_uint64
    for width in (8, 24, 1000, 2880, 4096, 5120, 7168, 8184, 8192):
        assert library.wrong_quotients(width, 37) == 0, width
    assert sum(library.wrong_quotients(width, 32_749) for width in range(8, 8193, 8)) == 0


@pytest.mark.parametrize("built", ["N=4"], indirect=True)
def test_what_is_no_common_sum_goes_the_long_way(built: Path) -> None:
    common = ctypes.CDLL(str(built)).common
    common.argtypes = [ctypes.c_float]
    below_four = [4 - 2.0**-22, 4 - 2.0**-21]
    for x in (*below_four, 2.0**-65, 2.0**101, 0.0, -1.0, 1e-42, float("inf"), float("nan")):
        assert not common(x), x
    assert all(common(x) for x in (2.0**-64, 1e-6, 1.0, 2 - 2.0**-23, 4 - 2.0**-20, 4.0, 2.0**100))


ROWS = {
    "zeros": 0.0,
    "denormals": 1e-39,
    "squares that vanish": 2.0**-74,
    "as small as common ones are": 2.0**-32,
    "a mean below four": 2.0,
    "as large as common ones are": 2.0**50,
    "squares that overflow": 2.0**64,
    "ordinary": 1.0,
}


@pytest.mark.parametrize("built", ["N=4"], indirect=True)
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_rows_of_every_size_to_the_bit(built: Path, eps: float, seed: int) -> None:
    """Each row of one size, so that its scale comes from every end of what a float holds; weights
    with what is no number among them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 1032  # ends within a pack of lanes
    sizes = torch.tensor(list(ROWS.values()), dtype=torch.float64)[:, None]
    spread = torch.rand(len(ROWS), hidden, generator=generator, dtype=torch.float64) + 0.5
    spread[4] = 1.0
    residual = (sizes * spread).to(torch.bfloat16)
    given = [torch.zeros_like(residual) for _ in range(4)]
    given[1][5] = residual[5] / 2
    weight = torch.randn(hidden, generator=generator).to(torch.bfloat16)
    weight[[3, 700]] = torch.tensor([float("inf"), float("nan")]).to(torch.bfloat16)
    check_given(built, given, residual, weight, "one_shot", eps)


def test_a_launch_that_comes_early_touches_nothing_before_its_turn(built: Path, seed: int) -> None:
    world = worlds(built)[-1]
    for op, algorithm in ALGORITHMS:
        count = 120 * world
        request = Request(op=op, count=count, dtype="bfloat16", world=world, root=1)
        parts = inputs(request, seed)
        plan = plan_of(request, algorithm)

        def step(comm: SlabComm) -> bool:
            library, given = cast(EarlyBlock, comm._library), parts[comm.rank].clone()  # noqa: B023
            library.given = given
            if comm.rank == 1:
                time.sleep(0.02)  # who lets the next launch go before rank 1 is heard is seen to
            out = comm.run(plan, given)  # noqa: B023
            return same(out, expected(request, parts, comm.rank)) and library.last == [True]  # noqa: B023

        with EarlyGroup(built, world, slot_bytes=4096, first_call=5) as group:
            assert together(group, step) == [True] * world, (op, algorithm)


def test_the_sum_of_copied_pieces(built: Path, seed: int) -> None:
    world = worlds(built)[-1]
    request = Request(op=Op.ALL_REDUCE, count=1003, dtype="bfloat16", world=world)
    parts = inputs(request, seed)
    out = torch.zeros(1003, dtype=torch.bfloat16)
    kind = layout.TYPES["bfloat16"]
    call = Call(world=world, type=kind, width=2, stripe=1008, output=out.data_ptr())
    call.slab[:world] = [part.data_ptr() for part in parts]
    call.in_len[0] = 1003
    assert ctypes.CDLL(str(built)).run_block(ctypes.byref(call), 64, 1, 0, 1) == 0
    assert same(out, canonical_sum(parts))


def test_the_lanes_of_a_row_are_added_in_the_order_of_the_reference(built: Path, seed: int) -> None:
    # Float32 shows the order of the sums; bfloat16 would round it away.
    world = worlds(built)[-1]
    torch.manual_seed(seed)
    for algorithm in ("one_shot", "two_shot"):
        request = Request(
            op=Op.ALL_REDUCE, count=8 * 2048, dtype="float32", world=world,
            epilogue=Epilogue(hidden=2048),
        )  # fmt: skip
        parts = [torch.randn(8, 2048) for _ in range(world)]
        residual, weight = torch.randn(8, 2048), torch.randn(2048)
        want, _ = canonical_add_rmsnorm(canonical_sum(parts), residual, weight, 1e-6)

        def step(comm: SlabComm) -> bool:
            made = Rows(residual.clone(), weight, torch.empty_like(residual))  # noqa: B023
            comm.run(plan_of(request, algorithm), parts[comm.rank], rows=made)  # noqa: B023
            return same(made.normed, want)  # noqa: B023

        with KernelGroup(built, world, threads=256, slot_bytes=128 * 1024) as group:
            assert together(group, step) == [True] * world


def test_a_missing_peer_is_given_up_by_every_thread(built: Path) -> None:
    world = worlds(built)[-1]
    request = Request(op=Op.ALL_REDUCE, count=64, dtype="bfloat16", world=world)
    plan, given = plan_of(request, "two_shot"), torch.zeros(64, dtype=torch.bfloat16)
    with KernelGroup(built, world, budget_s=0.2) as group:
        results = together(group, lambda c: None if c.rank == 1 else c.run(plan, given))
        assert [getattr(result, "peer", None) for result in results[:1] + results[2:]] == [1] * (
            world - 1
        )
