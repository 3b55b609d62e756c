"""What each fusion of DeepSeek-V4's layers is worth on one card: on and off in pairs.

    python benchmarks/fusions.py --out FOLDER [--layers 12] [--model random:deepseek-v4-flash]

One engine; for each fusion its ops are replaced by their torch versions, which launch one operator
after another in the same layout, and decode steps are captured once more. Both graphs are replayed
by turns on the same step; prompts run through the engine with either table. Each row: launches and
µs a layer on and off, from the device's clock, and bytes a layer: on, what the ops take and give;
off, what each operator inside them reads and writes (what lies in caches is counted on neither
side). Writes ``fusions.json`` after each row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_check import prefill_seconds
from gpu_profile import kernel_shares
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from metainfer.bench.conditions import conditions
from metainfer.core.intent import Intent
from metainfer.core.plan import StepGraph
from metainfer.core.step import Phase
from metainfer.engine.engine import Engine
from metainfer.executor.graphs import StaticSteps
from metainfer.executor.local import LocalParts
from metainfer.kernels.choice import Choice
from metainfer.kernels.table import OpTable, Trace
from metainfer.ops.catalog import builtin_registry

FUSIONS: dict[str, dict[str, str]] = {
    "streams mixed, collapsed and normed": {
        "hyper_pre": "torch", "hyper_mix_pre": "torch", "hyper_mix": "torch", "hyper_head": "torch",
    },
    "query and latent: norm, rotation, cache write": {"latent_qkv": "torch-static"},
    "entries: softmax of a window, norm, rotation, cache write": {"compress": "torch-static"},
    "index keys likewise, and their rounding": {"compress_index": "torch-static"},
    "index queries: rotation, Hadamard product, rounding": {"index_query": "torch"},
    "routing by score and by token": {"moe_route": "torch", "moe_route_hash": "torch"},
    "shared expert: clamped gate times up": {"swiglu_clamp": "torch"},
    "norms": {"rmsnorm": "torch"},
}  # fmt: skip
"""Name -> op -> its version in single operators; a layout's ending is added where there is one."""

BATCHES, PROMPT, PAIRS = (1, 32), 2048, 35
TABLE = 5_000_000
"""Bytes from which on a tensor of a decode step is a table of angles, pages or experts."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="random:deepseek-v4-flash")
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    engine = Engine(
        Intent(
            model=f"{args.model}?layers={args.layers}", platform="cuda", context=PROMPT + 64,
            concurrency=max(BATCHES), prefix_cache=False,
        )
    )  # fmt: skip
    engine.start()
    assert engine.resolved is not None
    executor: Any = engine._executor
    parts: LocalParts = executor._parts
    report: dict[str, Any] = {"conditions": conditions(engine.resolved.plan), "rows": []}
    prefill_seconds(engine, PROMPT, 2)
    for name, versions in FUSIONS.items():
        row: dict[str, Any] = {"fusion": name, "ops": sorted(versions)}
        try:
            off = replace(parts, ops=OpTable(unfused(parts.ops.choices, versions)))
            row |= decoding(executor, parts, off, versions, args.layers)
            row |= prompting(engine, executor, parts, off, args.layers)
        except (LookupError, RuntimeError) as error:
            row["error"] = str(error).splitlines()[0]
            executor._parts = parts
        report["rows"].append(row)
        (args.out / "fusions.json").write_text(json.dumps(report, indent=1, default=str))
        print(name, json.dumps({k: v for k, v in row.items() if k != "pairs"}), flush=True)
    return 0


def unfused(choices: tuple[Choice, ...], versions: dict[str, str]) -> list[Choice]:
    """The table with these ops in single operators, in the layout that was chosen."""
    listed = {impl.id: impl for impl in builtin_registry().impls()}
    found = []
    for choice in choices:
        op = choice.request.op
        if op in versions:
            _, dash, ending = choice.impl.name.partition("triton-")
            wanted = f"{op}/{versions[op]}{'-' + ending if dash else ''}"
            choice = replace(choice, impl=listed[wanted], tuned=None)
        found.append(choice)
    return found


def decoding(
    executor: Any, on: LocalParts, off: LocalParts, ops: Collection[str], layers: int
) -> dict[str, dict[str, Any]]:
    """Captured decode steps of either table by turns."""
    found = {}
    for batch in BATCHES:
        shape = StepGraph(phase=Phase.DECODE.value, tokens=batch, runs=batch)
        held = []
        for parts in (on, off):
            steps = StaticSteps(parts, executor._tables, executor.capture)
            steps.capture(shape)
            held.append(steps._held[Phase.DECODE][0])
        pairs = [[seconds(each.graph.replay) for each in held] for _ in range(PAIRS + 3)][3:]
        moved = [handed_bytes(executor, parts, shape, ops) for parts in (on, off)]
        found[f"decode, batch {batch}"] = told(
            pairs, [kernel_shares(each.graph.replay, 4)["launches"] for each in held], moved, layers
        )
    return found


def prompting(
    engine: Engine, executor: Any, on: LocalParts, off: LocalParts, layers: int
) -> dict[str, dict[str, Any]]:
    """A prompt through the engine with either table by turns: the host's work is in it."""
    pairs, launches = list[list[float]](), list[float]()
    for turn in range(5):
        pair = []
        for parts in (on, off):
            executor._parts = parts
            pair += prefill_seconds(engine, PROMPT, 2)
        if turn:
            pairs.append(pair)
    executor._parts = on
    return {f"prefill, {PROMPT} tokens": told(pairs, launches, [], layers)}


def told(
    pairs: list[list[float]], launches: list[float], moved: list[int], layers: int
) -> dict[str, Any]:
    """µs, launches and bytes a layer, on then off; `gain`: the median of off over on."""
    sides = list(zip(*pairs, strict=True))
    return {
        "us_a_layer": [1e6 * statistics.median(side) / layers for side in sides],
        "gain": statistics.median(off / on for on, off in pairs),
        "launches_a_layer": [count / layers for count in launches],
        "bytes_a_layer": [count / layers for count in moved],
        "pairs": pairs,
    }


def seconds(call: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class Handed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of tensors that torch's operators read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self.bytes += tensor_bytes((args, kwargs, found))
        return found


class Counting(Trace):
    """Bytes of the calls of some ops: by their operators where torch runs them."""

    def __init__(self, ops: Collection[str]) -> None:
        super().__init__()
        self.ops, self.bytes = ops, 0

    def wrap(
        self, function: Callable[..., Any], phase: Phase, site: str, impl: str
    ) -> Callable[..., Any]:
        op, _, name = impl.partition("/")
        if op not in self.ops:
            return function

        def counted(*args: Any, **kwargs: Any) -> Any:
            if not name.startswith("torch"):
                found = function(*args, **kwargs)
                self.bytes += tensor_bytes((args, kwargs, found))
                return found
            with Handed() as handed:
                found = function(*args, **kwargs)
            self.bytes += handed.bytes
            return found

        return counted


def handed_bytes(executor: Any, parts: LocalParts, shape: StepGraph, ops: Collection[str]) -> int:
    """What the ops' calls of one step move, as the module says."""
    counting = Counting(ops)
    counted = replace(parts, ops=OpTable(parts.ops.choices, counting))
    StaticSteps(counted, executor._tables, lambda step: (executor, step())).capture(shape)
    return counting.bytes


def tensor_bytes(values: Any) -> int:
    """Bytes of all tensors in `values` but tables, of which a few lines are looked up."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return sum(tensor.nbytes for tensor in tensors if tensor.nbytes < TABLE)


if __name__ == "__main__":
    sys.exit(main())
