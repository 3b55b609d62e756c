"""Written files: read back by safetensors itself and by us, whatever the order of writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from metainfer.core.errors import InternalError, UserError
from metainfer.formats.checkpoint import Checkpoint
from metainfer.formats.quant import TORCH_DTYPES
from metainfer.formats.safetensors_writer import Entry, Writer, plan_shards

ENTRIES = [
    Entry("a.scale", "F8_E8M0", (3, 5)),
    Entry("a.weight", "I8", (3, 7)),
    Entry("b.weight", "BF16", (2, 3)),
    Entry("c", "F32", ()),
    Entry("d", "I64", (0, 4)),
    Entry("ü.weight", "F8_E4M3", (1, 9)),
]


def content(entry: Entry) -> bytes:
    return bytes((7 * i + len(entry.name)) % 251 for i in range(entry.nbytes))


def write(folder: Path, entries: list[Entry], limit: int, order: list[Entry] | None = None) -> None:
    with Writer(folder, entries, shard_bytes=limit) as writer:
        for entry in order or entries:
            writer.put(entry.name, content(entry))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("limit", [10**9, 40, 1])
def test_safetensors_and_we_read_what_was_written(tmp_path: Path, limit: int) -> None:
    write(tmp_path / "m", ENTRIES, limit)
    checkpoint = Checkpoint.open(tmp_path / "m")
    assert set(checkpoint.index.tensors) == {entry.name for entry in ENTRIES}
    theirs = {}
    for path in checkpoint.index.files:
        theirs |= load_file(path)
    for entry in ENTRIES:
        tensor = theirs[entry.name]
        assert tensor.dtype == TORCH_DTYPES[entry.scheme] and tuple(tensor.shape) == entry.shape
        for found in (tensor, checkpoint.read(entry.name).data):
            raw = found.contiguous().reshape(-1).view(torch.uint8)
            assert bytes(raw.tolist()) == content(entry)
        assert checkpoint.index[entry.name].offset % TORCH_DTYPES[entry.scheme].itemsize == 0
    assert not list((tmp_path / "m").glob("*.part"))


def test_bytes_do_not_depend_on_the_order_of_writing(tmp_path: Path) -> None:
    for name, order in (("x", ENTRIES), ("y", ENTRIES[::-1])):
        write(tmp_path / name, ENTRIES, 40, order)
    assert files(tmp_path / "x") == files(tmp_path / "y")
    assert len(files(tmp_path / "x")) > 2


def test_the_index_names_every_tensor(tmp_path: Path) -> None:
    write(tmp_path, ENTRIES, 40)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(entry.nbytes for entry in ENTRIES)
    assert list(index["weight_map"]) == sorted(entry.name for entry in ENTRIES)


@given(sizes=st.lists(st.integers(0, 50), max_size=12), limit=st.integers(1, 60))
def test_shards_are_filled_in_order(sizes: list[int], limit: int) -> None:
    entries = [Entry(str(i), "U8", (size,)) for i, size in enumerate(sizes)]
    shards = plan_shards(entries, limit)
    assert [entry for _, group in shards for entry in group] == entries
    for _, group in shards:
        assert len(group) == 1 or sum(entry.nbytes for entry in group) <= limit or not limit
    assert len({name for name, _ in shards}) == len(shards)


def test_a_failure_leaves_no_file_that_looks_whole(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Writer(tmp_path / "m", ENTRIES) as writer:
        writer.put("c", content(ENTRIES[3]))
        assert list((tmp_path / "m").glob("*.part"))
        raise RuntimeError
    assert not list((tmp_path / "m").iterdir())
    with pytest.raises(InternalError, match="5 tensors were not written"):
        write(tmp_path / "n", ENTRIES, 10**9, ENTRIES[:1])
    assert not list((tmp_path / "n").iterdir())


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="3 bytes given"), Writer(tmp_path, ENTRIES) as writer:
        writer.put("c", b"123")
    with pytest.raises(InternalError, match="twice"):
        Writer(tmp_path, [ENTRIES[0], ENTRIES[0]])
    with pytest.raises(InternalError, match="given twice"), Writer(tmp_path, ENTRIES) as writer:
        writer.put("c", content(ENTRIES[3]))
        writer.put("c", content(ENTRIES[3]))
    (tmp_path / "other").write_text("x")
    with pytest.raises(UserError, match="not an empty folder") as caught:
        Writer(tmp_path, ENTRIES)
    assert caught.value.code == "not_empty"
