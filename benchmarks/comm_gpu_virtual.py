"""Virtual ranks on one GPU: verified to the bit, then timed; sections of `comm_gpu.py`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from comm_gpu_rank import bits, message, plan_of, values

from metainfer.comm.backends.calls import Rows, Side
from metainfer.comm.backends.copy_order import Staging
from metainfer.comm.backends.cuda import CudaLocalGroup
from metainfer.comm.backends.cuda_copy import CopyRank
from metainfer.comm.errors import CommError
from metainfer.comm.exact import canonical_add_rmsnorm, canonical_sum
from metainfer.comm.request import Epilogue, Op, Request, shard

KIB, MIB = 1 << 10, 1 << 20
Report = dict[str, Any]


def on_all(group: CudaLocalGroup, step: Callable[[int], None]) -> None:
    """`step(rank)` under each rank's stream, then wait and look for errors."""
    torch.cuda.synchronize()
    for rank, stream in enumerate(group.streams):
        with torch.cuda.stream(stream):
            step(rank)
    torch.cuda.synchronize()
    for comm in group.ranks:
        comm.check()


def verify_virtual(host: bool) -> Report:
    """Ops, types, odd sizes, sides and epilogues, bit for bit; the wrap; a skipped call."""
    wrong: list[str] = []
    count = 0
    for world in (2, 4, 8):
        with CudaLocalGroup(
            world, host_memory=host, slot_bytes=256 * KIB, first_call=(1 << 40) - 9
        ) as group:
            for op, algorithm in (
                (Op.ALL_REDUCE, "one_shot"),
                (Op.ALL_REDUCE, "two_shot"),
                (Op.REDUCE_SCATTER, "direct"),
                (Op.ALL_GATHER, "direct"),
                (Op.BROADCAST, "direct"),
                (Op.ALL_TO_ALL, "direct"),
            ):
                for size in (1, 7, 4096, 32_768, 200_001):
                    n = size // world * world if op is Op.ALL_TO_ALL else size
                    found = check_op(group, op, algorithm, n, "bfloat16")
                    wrong += found
                    count += 1
            for dtype in ("float16", "float32", "float64", "int32") if world == 4 else ():
                wrong += check_op(group, Op.ALL_REDUCE, "two_shot", 5001, dtype)
                wrong += check_op(group, Op.ALL_REDUCE, "one_shot", 5001, dtype)
                count += 2
            for rows, hidden in ((8, 4096), (3, 7168), (5, 2056), (2, 17)):
                for algorithm in ("one_shot", "two_shot"):
                    wrong += check_rows(group, algorithm, rows, hidden)
                    count += 1
    return {"checks": count, "wrong": wrong, "skipped": skipped_call(host)}


def make_inputs(op: Op, count: int, dtype: str, world: int) -> list[torch.Tensor]:
    kind = getattr(torch, dtype)
    found = []
    for rank in range(world):
        n = count
        if op is Op.ALL_GATHER:
            begin, end = shard(count, world, rank)
            n = end - begin
        raw = values(rank, n, count)
        found.append(raw.to(kind) if kind.is_floating_point else torch.arange(n, dtype=kind) * 7919)
    return found


def check_op(group: CudaLocalGroup, op: Op, algorithm: str, count: int, dtype: str) -> list[str]:
    world = len(group.ranks)
    request = Request(op=op, count=count, dtype=dtype, world=world, root=world - 1)
    plan = plan_of(request, algorithm, "local")
    group.warm(plan)
    parts = make_inputs(op, count, dtype, world)
    bounds = [shard(count, world, rank) for rank in range(world)]
    sizes = [end - begin if op is Op.REDUCE_SCATTER else count for begin, end in bounds]
    given = [part.cuda() for part in parts]
    out = [torch.full((n,), -1, dtype=parts[0].dtype, device="cuda") for n in sizes]
    for tensor in out:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    on_all(group, lambda r: group.ranks[r].run(plan, given[r], out[r]))
    wrong = []
    for rank, tensor in enumerate(out):
        begin, end = bounds[rank]
        block = count // world
        if op is Op.ALL_REDUCE:
            want = canonical_sum(parts)
        elif op is Op.REDUCE_SCATTER:
            want = canonical_sum([part[begin:end] for part in parts])
        elif op is Op.ALL_GATHER:
            want = torch.cat(parts)
        elif op is Op.BROADCAST:
            want = parts[request.root]
        else:
            want = torch.cat([part[rank * block : (rank + 1) * block] for part in parts])
        if not torch.equal(tensor.cpu().view(torch.uint8), want.view(torch.uint8)):
            wrong.append(f"{request.name} {algorithm} rank {rank}")
    return wrong


def check_rows(group: CudaLocalGroup, algorithm: str, rows: int, hidden: int) -> list[str]:
    """Epilogue and 64 counts beside it."""
    world = len(group.ranks)
    request = Request(
        op=Op.ALL_REDUCE,
        count=rows * hidden,
        dtype="bfloat16",
        world=world,
        epilogue=Epilogue(hidden=hidden, eps=1e-6),
        side_int32=64,
    )
    plan = plan_of(request, algorithm, "local")
    group.warm(plan)
    parts = [values(rank, rows * hidden, hidden).view(rows, hidden) for rank in range(world)]
    residual, weight = (values(rank, rows * hidden, rows).view(rows, hidden) for rank in (8, 9))
    residual[-1, -1] = float("nan")  # beside what `values` has in the first row
    counts = [torch.arange(64, dtype=torch.int32) * (rank + 1) for rank in range(world)]
    weight = weight[-1].contiguous()
    normed, total = canonical_add_rmsnorm(canonical_sum(parts), residual, weight, 1e-6)
    given = [part.cuda() for part in parts]
    made = [Rows(residual.cuda(), weight.cuda(), torch.zeros_like(given[0])) for _ in parts]
    sides = [
        Side(each.cuda(), torch.zeros(64, dtype=torch.int32, device="cuda")) for each in counts
    ]
    out = [torch.empty_like(given[0]) for _ in parts]
    on_all(group, lambda r: group.ranks[r].run(plan, given[r], out[r], side=sides[r], rows=made[r]))
    wrong = []
    for rank in range(world):
        for name, ours, want in (
            ("sum", out[rank], canonical_sum(parts)),
            ("residual", made[rank].residual, total),
            ("normed", made[rank].normed, normed),
            ("counts", sides[rank].summed, sum(counts)),
        ):
            if not torch.equal(ours.cpu().view(torch.uint8), want.view(torch.uint8)):
                wrong.append(f"epilogue {name} {rows}x{hidden} {algorithm} N={world} rank {rank}")
    return wrong


def skipped_call(host: bool) -> Report:
    """Rank 1 leaves a call out: the others must say so within their budget."""
    group = CudaLocalGroup(3, host_memory=host, budget_s=1.0)
    plan = message(8192, 3, "local", "one_shot")
    group.warm(plan)
    given = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    out = [torch.empty_like(given) for _ in range(3)]
    begin = time.monotonic()
    for rank in (0, 2):
        with torch.cuda.stream(group.streams[rank]):
            group.ranks[rank].run(plan, given, out[rank])
    torch.cuda.synchronize()
    found: Report = {"s": time.monotonic() - begin}
    for rank in (0, 2):
        try:
            group.ranks[rank].check()
            found[str(rank)] = "no error"
        except CommError as error:
            found[str(rank)] = str(error)
    return found


Graphs = list[torch.cuda.CUDAGraph]


def graphs_of(group: CudaLocalGroup, step: Callable[[int], None], repeat: int) -> Graphs:
    """One graph of `repeat` calls per rank, each to be replayed on its rank's stream."""
    on_all(group, step)
    graphs = []
    for rank, stream in enumerate(group.streams):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            for _ in range(repeat):
                step(rank)
    torch.cuda.synchronize()
    return graphs


def replay_us(group: CudaLocalGroup, graphs: Graphs, repeat: int) -> float:
    """Microseconds per call: a first replay brings the ranks together, the second is timed, the
    slowest rank's."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in graphs]
    for turn in range(2):
        for rank, stream in enumerate(group.streams):
            with torch.cuda.stream(stream):
                if turn:
                    marks[rank][0].record()
                graphs[rank].replay()
                if turn:
                    marks[rank][1].record()
    torch.cuda.synchronize()
    for comm in group.ranks:
        comm.check()
    return max(begin.elapsed_time(end) for begin, end in marks) * 1e3 / repeat


def spread(samples: list[float]) -> dict[str, float]:
    middle = statistics.median(samples)
    mad = statistics.median(abs(x - middle) for x in samples)
    return {"us": middle, "mad": mad, "n": len(samples)}


def graph_us(
    group: CudaLocalGroup, step: Callable[[int], None], repeat: int = 50
) -> dict[str, float]:
    """Microseconds per call inside graphs."""
    graphs = graphs_of(group, step, repeat)
    return spread([replay_us(group, graphs, repeat) for _ in range(15)][3:])


def time_virtual(host: bool) -> Report:
    """All-reduces in graphs over sizes, algorithms and grids; `best` per world and size."""
    rows: Report = {}
    sizes = [8 * KIB, 64 * KIB, 512 * KIB]
    grids = [(blocks, 1) for blocks in (1, 2, 4, 8, 16)]
    if host:
        sizes = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 20 * MIB]
        grids += [(8, 2), (16, 2), (16, 4)]
    for world in (2,) if host else (2, 4, 8):
        for blocks, turns in grids:
            slot = 8 * MIB if host else 2 * MIB
            options = {"host_memory": host, "slot_bytes": slot, "budget_s": 5.0}
            with CudaLocalGroup(world, blocks=blocks, lag=turns, **options) as group:
                for algorithm in ("one_shot", "two_shot"):
                    for size in sizes:
                        least, most = (256 * KIB, 20 * MIB) if turns > 1 else (0, MIB)
                        if least <= size <= most:
                            name = f"N={world} {size} {algorithm} blocks={blocks} turns={turns}"
                            rows[name] = time_one(group, algorithm, size)
    return {"rows": rows, "best": best(rows)}


def time_one(group: CudaLocalGroup, algorithm: str, size: int) -> dict[str, float]:
    world = len(group.ranks)
    plan = message(size, world, "local", algorithm)
    group.warm(plan)
    given = torch.randn(size // 2, device="cuda").to(torch.bfloat16)
    out = [torch.empty_like(given) for _ in range(world)]
    return graph_us(
        group,
        lambda rank: group.ranks[rank].run(plan, given, out[rank]),
        repeat=50 if size <= MIB else 4,
    )


def best(rows: Report) -> Report:
    """The fastest row per world and size."""
    found: Report = {}
    for name, row in rows.items():
        key = " ".join(name.split()[:2])
        if key not in found or row["us"] < found[key]["us"]:
            found[key] = {**row, "how": " ".join(name.split()[2:])}
    return found


EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "counts": {"side_int32": 64},
    "epilogue": {"epilogue": Epilogue(hidden=4096)},
    "both": {"epilogue": Epilogue(hidden=4096), "side_int32": 64},
}


def time_epilogue(pairs: int = 72) -> Report:
    """8 rows of 4096: all-reduce alone, with the epilogue fused, with 64 counts; N = 2 and 4. What
    the epilogue costs is the median of differences between replays next to each other, which of the
    two comes first being drawn, with a bootstrap interval of 95 %."""
    rows: Report = {}
    differences: Report = {}
    repeat = 50
    rng = random.Random(0)
    for world in (2, 4):
        for blocks in (4, 8):
            name = f"N={world} blocks={blocks}"
            with CudaLocalGroup(world, blocks=blocks, slot_bytes=256 * KIB) as group:
                graphs = {
                    kind: graphs_of(group, epilogue_step(group, more), repeat)
                    for kind, more in EPILOGUES.items()
                }
                for kind, made in graphs.items():
                    rows[f"{name} {kind}"] = spread(
                        [replay_us(group, made, repeat) for _ in range(15)][3:]
                    )
                found = []
                for _ in range(pairs):
                    order = rng.sample(["plain", "epilogue"], 2)
                    found.append({kind: replay_us(group, graphs[kind], repeat) for kind in order})
            differences[name] = paired(found)
    return {"rows": rows, "pairs": differences}


def epilogue_step(group: CudaLocalGroup, more: dict[str, Any]) -> Callable[[int], None]:
    """What a rank of `group` does for one entry of `EPILOGUES`."""
    world = len(group.ranks)
    request = Request(op=Op.ALL_REDUCE, count=8 * 4096, dtype="bfloat16", world=world, **more)
    plan = plan_of(request, "one_shot", "local")
    group.warm(plan)
    given = torch.randn(8, 4096, device="cuda").to(torch.bfloat16)
    weight = given[0].clone()
    out = [torch.empty_like(given) for _ in range(world)]
    made = [Rows(given.clone(), weight, given.clone()) for _ in range(world)]
    zero = torch.zeros(64, dtype=torch.int32, device="cuda")
    sides = [Side(zero, zero.clone()) for _ in range(world)]

    def step(rank: int) -> None:
        group.ranks[rank].run(
            plan,
            given,
            out[rank],
            side=sides[rank] if request.side_int32 else None,
            rows=made[rank] if request.epilogue else None,
        )

    return step


def paired(found: list[dict[str, float]]) -> Report:
    """Microseconds that the epilogue adds, from pairs of both."""
    from overlap import bootstrap  # the engine, which no other section needs

    more = [each["epilogue"] - each["plain"] for each in found]
    return {
        "us": statistics.median(more),
        "interval": bootstrap(more),
        "plain_us": statistics.median(each["plain"] for each in found),
        "epilogue_us": statistics.median(each["epilogue"] for each in found),
        "n": len(found),
    }


def copies() -> Report:
    """Copy engines with two virtual ranks on one link: exact, then timed eagerly, 1 to 64 MiB. Each
    rank enqueues from a thread of its own, as ranks that are processes do."""
    part = 32 * MIB + 4096
    memory = torch.zeros(Staging.size(2, part), dtype=torch.uint8).pin_memory()
    staging = Staging(memory.data_ptr(), memory.data_ptr(), 2, part)
    ranks = [CopyRank(rank, staging, device=0) for rank in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    threads = ThreadPoolExecutor(2, initializer=torch.cuda.set_device, initargs=(0,))
    wrong, rows = [], {}
    for size in (2, 4098, MIB, 5 * MIB + 2, 20 * MIB, 64 * MIB):
        plan = message(size, 2, "host", "two_shot")
        parts = [values(rank, size // 2, size) for rank in range(2)]
        given = [each.cuda() for each in parts]
        out = [torch.full_like(each, float("nan")) for each in given]
        want = canonical_sum(parts)

        def one(rank: int) -> None:
            with torch.cuda.stream(streams[rank]):
                ranks[rank].run(plan, given[rank], out[rank])  # noqa: B023

        def both() -> None:
            list(threads.map(one, range(2)))

        for piece in (0, MIB, 2 * MIB):
            if piece and size < 5 * MIB:
                continue
            for rank in ranks:
                rank.piece_bytes = piece
            key = f"{size} piece={piece}" if piece else str(size)
            rows[key] = time_copies(both, ranks, out, want, wrong)
    return {"wrong": wrong, "rows": rows}


def time_copies(
    both: Callable[[], None],
    ranks: list[CopyRank],
    out: list[torch.Tensor],
    want: torch.Tensor,
    wrong: list[str],
) -> dict[str, float]:
    """Wall time of a call of both ranks, launches included; the first one is checked."""
    torch.cuda.synchronize()
    for tensor in out:
        tensor.fill_(float("nan"))
    torch.cuda.synchronize()
    samples = []
    for turn in range(9):
        begin = time.perf_counter()
        both()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e6)
        for rank in ranks:
            rank.check()
            if turn == 0 and not torch.equal(bits(out[rank.rank]), bits(want)):
                wrong.append(f"{want.nbytes} B rank {rank.rank}, piece {rank.piece_bytes}")
    samples = samples[2:]
    middle = statistics.median(samples)
    mad = statistics.median(abs(x - middle) for x in samples)
    return {"us": middle, "mad": mad, "n": len(samples)}
