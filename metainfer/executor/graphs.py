"""Static-step graphs for decode: one capture per token bucket, lengths and page tables on device.

A bucket's buffers are padded: padding rows hold id 0, position 0 and slot -1, so they write
nothing; each is a sequence of one token on page 0, which no request ever owns. A replay copies the
step's inputs in and launches once; eager decode pays hundreds of launches per step. A model with
adapters has each row's place among the buffers (-1: none), so a bucket serves any mix.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from metainfer.core.step import NO_ADAPTER, Phase
from metainfer.executor.inputs import HostInputs
from metainfer.executor.transfer import staged, to_device
from metainfer.kv.book.spec import GroupKind, GroupSpec
from metainfer.models.common.inputs import GroupInputs, SegmentInputs
from metainfer.ops.lora.rows import AdapterRows

if TYPE_CHECKING:
    from metainfer.executor.local import LocalParts


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: SegmentInputs
    logits: torch.Tensor  # [bucket, V]


class DecodeGraphs:
    """Captured decode steps by bucket; `run` returns None when no bucket is large enough."""

    def __init__(self, parts: LocalParts) -> None:
        self._parts = parts
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None

    @torch.inference_mode()
    def capture(self, bucket: int) -> None:
        """Warm up and capture one bucket. Largest first saves memory: the pool is shared."""
        parts = self._parts
        inputs = self._buffers(bucket)
        ops = parts.ops.phase(Phase.DECODE)

        def step() -> torch.Tensor:
            hidden = parts.model.forward(inputs, parts.store.layers, ops)
            logits: torch.Tensor = parts.model.logits(hidden, inputs, ops)
            return logits

        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = step()
        self._pool = self._pool or graph.pool()
        self._captured[bucket] = _Captured(graph, inputs, logits)

    def run(self, host: HostInputs) -> torch.Tensor | None:
        """Replay the smallest bucket that holds the step; None when none does.

        Logits [R, V] of the rows that need them, which a chunk of one token may not.
        They lie in the graph's memory: read them before the next replay.
        """
        tokens = len(host.ids)
        buckets = sorted(self._captured)
        at = bisect.bisect_left(buckets, tokens)
        if at == len(buckets):
            return None
        held = self._captured[buckets[at]]
        _fill(held.inputs, host)
        held.graph.replay()
        if host.every_row:
            return held.logits[:tokens]
        return held.logits[to_device(host.logit_rows, self._parts.device)]

    def _buffers(self, bucket: int) -> SegmentInputs:
        parts, device = self._parts, self._parts.device
        groups = tuple(self._group(group, bucket) for group in parts.groups)
        return SegmentInputs(
            torch.zeros(bucket, dtype=torch.int64, device=device),
            torch.zeros(bucket, dtype=torch.int64, device=device),
            torch.arange(bucket + 1, dtype=torch.int32, device=device),
            torch.ones(bucket, dtype=torch.int32, device=device),
            groups,
            None,
            self._adapters(bucket),
        )

    def _adapters(self, bucket: int) -> AdapterRows | None:
        if not self._parts.adapters:
            return None
        none = torch.full((bucket,), NO_ADAPTER, dtype=torch.int64, device=self._parts.device)
        return AdapterRows(none)

    def _group(self, group: GroupSpec, bucket: int) -> GroupInputs:
        device, state = self._parts.device, group.kind is GroupKind.STATE
        pad = self._parts.slots if state else -1
        slots = torch.full((bucket,), pad, dtype=torch.int64, device=device)
        if state:
            return GroupInputs(None, slots)
        width = group.pages_for(self._parts.max_context)
        return GroupInputs(torch.zeros((bucket, width), dtype=torch.int32, device=device), slots)


def _fill(inputs: SegmentInputs, host: HostInputs) -> None:
    """Copy a step into a bucket's buffers; what is beyond it becomes padding."""
    _copy(inputs.ids, host.ids, 0)
    _copy(inputs.positions, host.positions, 0)
    _copy(inputs.context_lens, host.context_lens, 1)
    if inputs.adapters is not None:
        places = np.zeros(0, np.int64) if host.adapters is None else host.adapters
        _copy(inputs.adapters.index, places, NO_ADAPTER)
    listed = zip(inputs.groups, host.page_tables, host.slots, host.pads, strict=True)
    for buffers, table, slots, pad in listed:
        _copy(buffers.slots, slots, pad)
        if table is not None:
            # What is right of the table stays from earlier steps: beyond each context, never read.
            _copy(buffers.pages[:, : table.shape[1]], table, 0)


def _copy(target: torch.Tensor, source: npt.NDArray[Any], padding: int) -> None:
    rows = staged(source, target.device)
    target[: len(rows)].copy_(rows, non_blocking=True)
    target[len(rows) :] = padding
