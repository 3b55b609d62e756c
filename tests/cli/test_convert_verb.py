"""``convert`` through the command line: one document, exit codes, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import cli

from metainfer.formats.safetensors_writer import Entry, Writer

W1 = "layers.0.ffn.experts.0.w1"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One MXFP4 matrix [2, 64]; its scales span 40 powers of two."""
    folder = tmp_path / "source"
    entries = [Entry(f"{W1}.weight", "I8", (2, 32)), Entry(f"{W1}.scale", "F8_E8M0", (2, 2))]
    with Writer(folder, entries) as writer:
        writer.put(f"{W1}.weight", bytes([0x21] * 64))
        writer.put(f"{W1}.scale", bytes([120, 121, 120, 160]))
    config = {"quantization_config": {"weight_block_size": [128, 128]}, "expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_document_and_a_new_folder(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    done = cli("convert", str(checkpoint), str(target), "--to", "nvfp4", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["converted"], document["exact"]) == (1, 0)
    assert document["rounded"] == [f"{W1}.weight"]
    assert (target / "model.safetensors").is_file()


def test_lossless_refuses_by_name_and_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    done = cli("convert", str(checkpoint), str(target), "--to", "nvfp4", "--lossless")
    assert done.returncode == 1 and done.stdout == ""
    assert f"'{W1}.weight' span 40 (2^-7 .. 2^33), NVFP4 holds 17" in done.stderr
    assert done.stderr.count("\n") == 1 and not target.exists()


def test_bad_usage(tmp_path: Path) -> None:
    assert cli("convert", "a", "b", "--to", "int4").returncode == 2
    missing = cli("convert", str(tmp_path / "none"), str(tmp_path / "b"), "--to", "fp8")
    assert missing.returncode == 1 and "There is no folder" in missing.stderr


def test_what_has_no_random_numbers_is_told_before_anything_is_written(tmp_path: Path) -> None:
    target = tmp_path / "m"
    done = cli("convert", "random:glm-5.3-nvfp4?layers=1", str(target), "--to", "official")
    assert done.returncode == 1 and not target.exists()
    assert "drawn as fp8_128_f32. Write another" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_random_model_becomes_its_publisher_s_files(tmp_path: Path) -> None:
    target, model = tmp_path / "m", "random:tiny-deepseek-v4-fp4?layers=3"
    for kept in (0, 1):  # the second run finds all of it there
        done = cli("convert", model, str(target), "--to", "official", "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["bytes_kept"] == kept * document["bytes"]
    assert document["tensors"] > 100
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 3
    assert (target / "model.safetensors").stat().st_size > document["bytes"]
    other = cli("convert", f"{model}&seed=1", str(target), "--to", "official")
    assert other.returncode == 1 and "another model, seed or run" in other.stderr


def test_what_goes_to_official_and_what_does_not(checkpoint: Path, tmp_path: Path) -> None:
    for source, to in ((str(checkpoint), "official"), ("random:tiny-deepseek-v4", "fp8")):
        done = cli("convert", source, str(tmp_path / "t"), "--to", to)
        assert done.returncode == 2 and f"cannot be converted to {to}" in done.stderr
    assert not (tmp_path / "t").exists()
