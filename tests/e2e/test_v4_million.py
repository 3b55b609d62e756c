"""A context of 1,048,576 tokens of DeepSeek-V4-Flash: its account, and a run on the null device."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from metainfer.kv.book.capacity import CacheSizes, steady_pages
from metainfer.kv.book.spec import GroupKind, form_groups
from metainfer.models.deepseek_v4.config import read_arch
from metainfer.models.deepseek_v4.shapes import random_configs
from metainfer.planner.memory import kv_rows

MILLION = 1_048_576
FORMS = {"kv": "latent-fp8@1", "index": "index-fp4@1"}


def sizes_for(tokens: int, step: int = 8192) -> CacheSizes:
    arch = read_arch(random_configs()["deepseek-v4-flash"])
    groups = form_groups(arch.cache_specs("bfloat16", FORMS), page_tokens=256)
    pages = tuple(steady_pages(g, tokens=tokens, slots=1, step_tokens=step) for g in groups)
    return CacheSizes(
        groups=groups,
        pages=pages,
        snapshots=tuple(8 if g.snapshot_tokens else 0 for g in groups),
        slots=1,
    )


def test_logical_bytes_are_the_worked_example() -> None:
    """deepseek-v4.md 3.3: fp8 latents and fp4 index keys at N = 1,048,576."""
    rows = {row.item: row for row in kv_rows(sizes_for(MILLION), MILLION)}
    assert {
        name: rows[name].logical_bytes
        for name in ("entries-1of4", "index-1of4", "entries-1of128", "local-window128")
    } == {
        "entries-1of4": 3_214_934_016,
        "index-1of4": 374_341_632,
        "entries-1of128": 95_682_560,
        "local-window128": 3_214_336,
    }


def test_allocated_bytes_are_those_of_the_tensors() -> None:
    """Of a tenth of the length, as tensors in fact made; page rounding is in both."""
    import torch

    from metainfer.kv.store.pools import KVStore

    sizes = sizes_for(MILLION // 16)
    store = KVStore(sizes, torch.device("cpu"))
    assert store.nbytes == sizes.bytes() == sum(row.bytes for row in kv_rows(sizes, 0))
    for group, pool in zip(sizes.groups, store.pools, strict=True):
        assert pool.nbytes == sizes.group_bytes(group), group.name
    entries = next(g for g in sizes.groups if g.name == "entries-1of128")
    # Two latents of 584 bytes, rounded up to whole value rows of 576: the price of small pages.
    assert entries.page_bytes == 20 * 3 * 576 > 20 * 2 * 584


def test_null_device_runs_a_million_tokens() -> None:
    """Through book and scheduler, in a process of its own so that its memory can be bounded."""
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    held = int(done.stdout.split()[-1])
    assert held < 4 << 30, f"{held:,} B"


def _run() -> None:
    """One prompt of all but 64 tokens in chunks of 8,192, then 64 decode steps."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))
    from null_world import World, request

    from metainfer.scheduler.config import SchedulerConfig

    sizes = sizes_for(MILLION)
    config = SchedulerConfig(max_context=MILLION, max_running=1, step_tokens=8192)
    world = World(sizes, config, contents=False, audited=False)
    prompt = [(i * 7919) % 97 for i in range(MILLION - 64)]
    refused = world.add(request("long", prompt, 64))
    assert refused is None, refused
    while world.step():
        pass
    answer = world.answers["long"]
    assert len(answer.tokens) == 64, (len(answer.tokens), answer.error)
    world.scheduler.audit()
    assert all(pool.used == 0 for pool in world.kv[0].pools)
    for group in sizes.groups:
        if group.kind is GroupKind.WINDOW:  # a window never holds more than a chunk beside itself
            assert sizes.pages[group.index] < 200
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    _run()
