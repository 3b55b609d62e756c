"""A random model as files: same bytes for the same seed, and an interruption costs one shard."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from metainfer.core.errors import UserError
from metainfer.formats import export as module
from metainfer.formats.block_codecs import BlockTensor
from metainfer.formats.checkpoint import Checkpoint
from metainfer.formats.drawn import Drawn
from metainfer.formats.export import export
from metainfer.formats.quant import Stored
from metainfer.formats.random_source import RandomSource

DRAWS = {
    "embed.weight": Drawn((50, 64), "BF16"),
    **{f"layers.{i}.w.weight": Drawn((64, 96), "mxfp4") for i in range(6)},
    "layers.0.q.weight": Drawn((130, 64), "fp8_128"),
    "layers.0.tid2eid": Drawn((50, 2), "I64", below=4),
    "norm.weight": Drawn((64,), "BF16", mean=1.0),
    "scale": Drawn((3,), "F32"),
}
CONFIG = {"model_type": "deepseek_v4", "z": 1}


class Stopped(RandomSource):
    """Fails at one tensor, as a process that ends there."""

    def __init__(self, at: str) -> None:
        super().__init__(DRAWS, 0)
        self.at = at
        self.asked: list[str] = []

    def read(self, name: str) -> Stored:
        self.asked.append(name)
        if name == self.at:
            raise KeyboardInterrupt
        return super().read(name)


def write(folder: Path, seed: int = 0, source: RandomSource | None = None, **more: int) -> int:
    more.setdefault("shard_bytes", 8000)
    drawn = source or RandomSource(DRAWS, seed)
    return export(f"random:x?seed={seed}", CONFIG, drawn, folder, **more).kept


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_what_is_written_is_what_is_drawn(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = export("random:x", CONFIG, RandomSource(DRAWS, 0), tmp_path / "a", shard_bytes=8000,
                  progress=lambda *pair: seen.append(pair))  # fmt: skip
    checkpoint = Checkpoint.open(tmp_path / "a")
    tensors = checkpoint.index.tensors
    assert done.nbytes == checkpoint.index.nbytes and done.tensors == len(tensors) == 18
    assert seen[-1] == (done.nbytes, done.nbytes) and len(seen) == len(DRAWS)
    assert tensors["layers.1.w.weight"].scheme == "I8"
    assert tensors["layers.1.w.scale"].scheme == "F8_E8M0"
    assert tensors["layers.1.w.scale"].shape == (64, 3)
    assert tensors["layers.0.q.scale"].shape == (2, 1)
    source = RandomSource(DRAWS, 0)
    for name in DRAWS:
        wanted, stored = source.read(name), checkpoint.read(name).data
        if isinstance(wanted, BlockTensor):
            assert torch.equal(stored.view(torch.uint8), wanted.data)
            scale = checkpoint.read(name.replace(".weight", ".scale")).data
            assert torch.equal(scale.view(torch.uint8), wanted.scale)
        else:
            assert torch.equal(stored, wanted.data)
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == CONFIG


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, seed)
    a, b, c = (content(tmp_path / name) for name in "abc")
    assert a == b and len(a) > 4 and set(a) == set(c) and a != c


@pytest.mark.parametrize("at", ["embed.weight", "layers.3.w.weight", "scale"])
def test_an_interruption_keeps_finished_shards(tmp_path: Path, at: str) -> None:
    write(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", source=Stopped(at))
    left = content(tmp_path / "a")
    assert not any(name.endswith((".part", ".json")) for name in left)
    counting = Stopped("")
    kept = write(tmp_path / "a", source=counting)
    assert content(tmp_path / "a") == content(tmp_path / "whole")
    assert (kept > 0) == bool(left) and (len(counting.asked) < len(DRAWS)) == bool(left)


def test_a_killed_run_leaves_a_part_that_is_begun_again(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "a")
    (victim,) = (tmp_path / "a").glob("model-00002-*.safetensors")
    victim.rename(victim.with_name(victim.name + ".part"))
    (tmp_path / "a" / "config.json").unlink()
    left: list[Path] = []  # what is there when the first tensor is drawn
    first = threading.Lock()  # tensors are drawn on several threads: the first one looks, alone

    class Watching(RandomSource):
        def read(self, name: str) -> Stored:
            with first:
                if not left:
                    left.extend(tmp_path.glob("a/*"))
            return super().read(name)

    assert write(tmp_path / "a", source=Watching(DRAWS, 0)) > 0
    assert left and not any(path.name.endswith(".part") for path in left)
    assert content(tmp_path / "a") == content(tmp_path / "whole")
    assert write(tmp_path / "a") == Checkpoint.open(tmp_path / "a").index.nbytes


def test_foreign_folders_are_refused_and_untouched(tmp_path: Path) -> None:
    write(tmp_path / "a")
    before = content(tmp_path / "a")
    with pytest.raises(UserError, match="another model, seed or run") as caught:
        write(tmp_path / "a", seed=1)
    assert caught.value.code == "other_checkpoint"
    (first,) = (tmp_path / "a").glob("model-00001-*.safetensors")
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(UserError, match="another model, seed or run"):
        write(tmp_path / "a")
    first.write_bytes(before[first.name])
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        write(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").unlink()
    assert content(tmp_path / "a") == before


def test_a_small_disk_is_known_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(module.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match=r"needs 0\.0 GB more") as caught:
        write(tmp_path / "a")
    assert caught.value.code == "disk_full" and not content(tmp_path / "a")
