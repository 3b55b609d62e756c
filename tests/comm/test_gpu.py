"""On a card (``-m gpu``): virtual ranks in device memory and in pinned host memory, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import plan_of
from test_local import ALGORITHMS, expected, inputs, same

from metainfer.comm.errors import CommError
from metainfer.comm.exact import canonical_add_rmsnorm, canonical_sum
from metainfer.comm.request import Epilogue, Op, Request

pytestmark = pytest.mark.gpu


def group_of(world: int, host: bool, **options: object):
    from metainfer.comm.backends.cuda import CudaLocalGroup

    return CudaLocalGroup(world, host_memory=host, **options)


def on_all(group, step: Callable[[int], object]) -> list[object]:
    torch.cuda.synchronize()
    results = []
    for rank, stream in enumerate(group.streams):
        with torch.cuda.stream(stream):
            results.append(step(rank))
    torch.cuda.synchronize()
    for comm in group.ranks:
        comm.check()
    return results


@pytest.mark.parametrize("host", [False, True], ids=["local", "host"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_t3_every_op_to_the_bit(world: int, host: bool, seed: int) -> None:
    with group_of(world, host, slot_bytes=1 << 16, first_call=(1 << 40) - 7) as group:
        for op, algorithm in ALGORITHMS:
            for count in (0, 1, 8 * world, 50_001):
                n = count // world * world if op is Op.ALL_TO_ALL else count
                request = Request(op=op, count=n, dtype="bfloat16", world=world, root=1)
                plan = plan_of(request, algorithm)
                group.warm(plan)
                given = inputs(request, seed + count)
                there = [part.cuda() for part in given]
                # Memory is had before any rank waits for another: an allocation may wait for all.
                out = [torch.empty_like(expected(request, given, r)).cuda() for r in range(world)]
                found = on_all(group, lambda r: group.ranks[r].run(plan, there[r], out[r]))  # noqa: B023
                for rank, result in enumerate(found):
                    want = expected(request, given, rank)
                    assert same(result.cpu(), want), (op, algorithm, count, rank)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_epilogue_in_a_replayed_graph(algorithm: str, seed: int) -> None:
    from metainfer.comm.backends.calls import Rows

    torch.manual_seed(seed)
    request = Request(
        op=Op.ALL_REDUCE, count=8 * 4096, dtype="bfloat16", world=2, epilogue=Epilogue(hidden=4096)
    )
    plan = plan_of(request, algorithm)
    weight = torch.randn(4096).to(torch.bfloat16)
    with group_of(2, False) as group:
        group.warm(plan)
        given = [torch.zeros(8, 4096, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        out = [torch.empty_like(part) for part in given]
        made = [Rows(part.clone(), weight.cuda(), torch.empty_like(part)) for part in given]

        def step(rank: int) -> None:
            group.ranks[rank].run(plan, given[rank], out[rank], rows=made[rank])

        on_all(group, step)
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        for rank in range(2):
            with torch.cuda.graph(graphs[rank], stream=group.streams[rank]):
                step(rank)
        for _ in range(3):
            parts = [torch.randn(8, 4096).to(torch.bfloat16) for _ in range(2)]
            residual = torch.randn(8, 4096).to(torch.bfloat16)
            for rank in range(2):
                given[rank].copy_(parts[rank])
                made[rank].residual.copy_(residual)
            on_all(group, lambda r: graphs[r].replay())
            y = canonical_sum(parts)
            normed, total = canonical_add_rmsnorm(y, residual, weight, 1e-6)
            for rank in range(2):
                assert same(out[rank].cpu(), y) and same(made[rank].residual.cpu(), total)
                assert same(made[rank].normed.cpu(), normed)


TRIED = """
#include "slab.h"
#include "elements.h"
extern "C" __global__ void tried(mi_u64 *found) {
    for (mi_u32 i = MI_BID * MI_THREADS + MI_TID; i < 1u << 24; i += MI_THREADS * MI_GRID) {
        const float x = bits_float(0x3f800000u + i), y = about_inverse_root(x);
        const float exact = (float)__drcp_rn(__dsqrt_rn((double)x));
        const int off = (int)float_bits(y) - (int)float_bits(exact);
        if (is_common(x) && inverse_root_soon(x, y) != inverse_root(x)) atomicAdd(found, 1ull);
        atomicMax(found + 1, (mi_u64)(off < 0 ? -off : off));
    }
}
"""


def test_every_inverse_root_of_this_card_is_exact(tmp_path: Path) -> None:
    """And begins no further off than the host's tests go (`test_kernels_on_host.py`)."""
    from metainfer.comm import driver, loader
    from metainfer.kernels import cubin

    for header in loader.HEADERS:
        (tmp_path / header.name).write_bytes(header.read_bytes())
    (tmp_path / "tried.cu").write_text(TRIED)
    major, minor = torch.cuda.get_device_capability()
    source = cubin.Source("tried", tmp_path / "tried.cu", loader.HEADERS)
    built, _, said = cubin.build(source, f"sm_{major}{minor}")
    assert built is not None, said
    found = torch.zeros(2, dtype=torch.int64, device="cuda")
    stream = torch.cuda.current_stream()
    run = driver.Module(built).function("tried")
    run(264, 256, stream.cuda_stream, [driver.u64(found.data_ptr())])
    stream.synchronize()
    assert found[0] == 0 and found[1] <= 6


def test_a_skipped_call_is_reported_and_ends() -> None:
    request = Request(op=Op.ALL_REDUCE, count=4096, dtype="bfloat16", world=3)
    plan = plan_of(request, "one_shot")
    group = group_of(3, False, budget_s=0.5)
    group.warm(plan)
    given = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    out = [torch.empty_like(given) for _ in range(3)]
    torch.cuda.synchronize()
    for rank in (0, 2):
        with torch.cuda.stream(group.streams[rank]):
            group.ranks[rank].run(plan, given, out[rank])
    torch.cuda.synchronize()
    for rank in (0, 2):
        with pytest.raises(CommError, match=r"rank 1 did not answer|another rank gave up"):
            group.ranks[rank].check()
