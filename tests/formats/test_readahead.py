"""Read-ahead: spans in order, hints that cost nothing but time, and pages let go and read again."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from metainfer.formats import readahead
from metainfer.formats.checkpoint import BlockCheckpoint
from metainfer.formats.index import CheckpointIndex
from metainfer.formats.readahead import ReadAhead, Span, merged
from metainfer.formats.safetensors_writer import Entry, Writer

A, B = Path("a"), Path("b")
SPANS = st.lists(
    st.tuples(st.sampled_from([A, B]), st.integers(0, 60), st.integers(0, 60)), max_size=12
)


@given(spans=SPANS, gap=st.integers(0, 5))
@example(spans=[(A, 5, 9), (A, 0, 5)], gap=0)
@example(spans=[(A, 0, 5), (A, 7, 9)], gap=2)
def test_merged_spans_cover_the_same_bytes_once(spans: list[Span], gap: int) -> None:
    found = merged(spans, gap)
    wanted = {(path, at) for path, start, stop in spans for at in range(start, stop)}
    covered = [(path, at) for path, start, stop in found for at in range(start, stop)]
    assert wanted <= set(covered) and len(covered) == len(set(covered))
    assert found == sorted(found) and (gap or set(covered) == wanted)
    for (path, _, stop), (after, start, _) in pairwise(found):
        assert path != after or start > stop + gap


def test_bytes_are_asked_for_in_bounded_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(100))
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(readahead, "CHUNK", 10)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, start, size, advice: asked.append((start, size))
    )
    ahead = ReadAhead()
    for _ in range(2):  # closed and used again
        ahead.want([(file, 50, 75), (file, 0, 12)])
        ahead.settle()
        ahead.close()
    assert asked == [(0, 10), (10, 2), (50, 10), (60, 10), (70, 5)] * 2
    ahead.want([(tmp_path / "none", 0, 5)])
    ahead.settle()  # a missing file is for the read to report
    ahead.close()


def test_what_is_released_can_be_read_again(tmp_path: Path) -> None:
    entries = [Entry("a", "F32", (3000,)), Entry("b", "F32", (5000,))]
    values = {entry.name: torch.randn(entry.shape) for entry in entries}
    with Writer(tmp_path / "m", entries) as writer:
        for name, tensor in values.items():
            writer.put(name, tensor.numpy().tobytes())
    source = BlockCheckpoint(CheckpointIndex.open(tmp_path / "m"), {})
    source.expect(["a", "b", "unknown"], part=1, parts=2)
    held = source.read("b").data
    assert torch.equal(held, values["b"])
    source.release(["a", "b", "unknown"])
    assert torch.equal(held, values["b"]) and torch.equal(source.read("a").data, values["a"])
    source.close()
    assert torch.equal(held, values["b"]) and torch.equal(source.read("b").data, values["b"])
