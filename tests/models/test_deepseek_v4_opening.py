"""DeepSeek-V4 checkpoints opened: every fault of the headers in one error, each in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from metainfer.core.errors import ModelError, UserError
from metainfer.formats.completeness import CheckpointError
from metainfer.formats.export import export
from metainfer.formats.index import CheckpointIndex
from metainfer.formats.random_source import RandomSource
from metainfer.formats.safetensors_writer import Entry, Writer
from metainfer.models.registry import random_draws
from metainfer.planner.opening import open_model

FP4 = "random:tiny-deepseek-v4-fp4?layers=4"


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The publisher's layout: FP8 blocks and MXFP4 experts, in several shards."""
    folder = tmp_path_factory.mktemp("official") / "model"
    model = open_model(FP4)
    source = RandomSource(model.draws, 0)
    export(FP4, model.source.config, source, folder, shard_bytes=1_000_000)
    return folder


Edit = Callable[[dict[str, Entry]], None]


@pytest.fixture
def edited(official: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy with other headers (data is zeros) and other config keys."""

    def make(
        edit: Edit = lambda entries: None, section: Mapping[str, Any] | None = None, **config: Any
    ) -> Path:
        folder = tmp_path / f"edited-{len(list(tmp_path.iterdir()))}"
        found = CheckpointIndex.open(official).tensors.values()
        entries = {info.name: Entry(info.name, info.scheme, info.shape) for info in found}
        edit(entries)
        with Writer(folder, list(entries.values())) as writer:
            for entry in entries.values():
                writer.put(entry.name, bytes(entry.nbytes))
        text = json.loads((official / "config.json").read_text()) | config
        text["quantization_config"] |= section or {}
        kept = {key: value for key, value in text.items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(kept))
        return folder

    return make


def put(name: str, scheme: str, *shape: int) -> Edit:
    return lambda entries: entries.update({name: Entry(name, scheme, shape)})


def drop(*names: str) -> Edit:
    return lambda entries: [entries.pop(name) for name in names] and None


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_model(str(folder))
    assert isinstance(caught.value, ModelError) and "\n" not in str(caught.value)
    return caught.value


def test_the_published_layout_opens(official: Path) -> None:
    model = open_model(str(official))
    scheme = model.facts.scheme_of
    assert scheme("layers.0.attn.wq_a.weight") == "fp8_128"
    assert scheme("layers.3.ffn.experts.7.w2.weight") == "mxfp4"
    assert scheme("layers.3.attn.compressor.wkv.weight") == "BF16"
    assert scheme("layers.0.ffn.gate.tid2eid") == "I64"
    assert scheme("layers.0.hc_attn_fn") == "F32"
    random = open_model(FP4)
    names = [n for spec in random.arch.packed_weights() for n in spec.tensors]
    assert [scheme(n) for n in names] == [random.facts.scheme_of(n) for n in names]
    assert model.facts.parameters == random.facts.parameters


def test_the_ledger_of_the_real_shape_counts_stored_bytes() -> None:
    facts = open_model("random:deepseek-v4-flash").facts
    assert facts.parameters == pytest.approx(284.33e9, abs=1e7)
    found: dict[str, set[str]] = {}
    for spec in facts.arch.packed_weights():
        found.setdefault(spec.site, set()).update(map(facts.scheme_of, spec.tensors))
    assert {site for site, schemes in found.items() if schemes == {"mxfp4"}} == {
        "experts.w13", "experts.w2",
    }  # fmt: skip
    assert {site for site, schemes in found.items() if schemes == {"BF16"}} == {
        "embed", "linear.lm_head", "linear_f32.csa", "linear_f32.hca",
    }  # fmt: skip


def test_a_draft_is_drawn_as_it_is_published() -> None:
    model = open_model(FP4)
    arch = model.arch.with_draft()
    found = random_draws(arch, model.source.config)
    assert {found[f"mtp.0.{name}.weight"].scheme for name in ("e_proj", "h_proj", "attn.wkv")} == {
        "fp8_128"
    }
    assert found["mtp.0.ffn.experts.7.w1.weight"].scheme == "mxfp4"
    assert found["mtp.0.enorm.weight"].mean == found["mtp.0.norm.weight"].mean == 1.0


def test_the_april_config_does_not_name_the_experts(edited: Callable[..., Path]) -> None:
    model = open_model(str(edited(expert_dtype=...)))
    assert model.facts.scheme_of("layers.0.ffn.experts.0.w1.weight") == "mxfp4"


W1 = "layers.1.ffn.experts.3.w1"
WQ = "layers.2.attn.wq_a"
FAULTS: list[tuple[Edit, dict[str, Any], str]] = [
    (put("norm.weight", "BF16", 255), {}, "norm.weight BF16 [255] where the config says [256]"),
    (
        put(f"{WQ}.weight", "F8_E4M3", 64, 256),
        {},
        f"{WQ}.weight F8_E4M3 [64, 256] where a [128, 256] matrix needs F8_E4M3 [128, 256]",
    ),
    (drop(f"{WQ}.scale"), {}, f"{WQ}.weight F8_E4M3 [128, 256] has no {WQ}.scale"),
    (drop(f"{W1}.scale"), {}, f"{W1}.weight I8 [128, 128] has no {W1}.scale"),
    (
        put(f"{W1}.scale", "F8_E8M0", 128, 4),
        {},
        f"{W1}.scale F8_E8M0 [128, 4] where a [128, 256] matrix needs F8_E8M0 or U8 [128, 8]",
    ),
    (drop("layers.0.hc_ffn_base"), {}, "layers.0.hc_ffn_base [24] is missing"),
    (drop(f"{W1}.weight", f"{W1}.scale"), {}, f"{W1}.weight [128, 256] is missing"),
    (
        put("layers.0.ffn.gate.tid2eid", "F32", 512, 2),
        {},
        "layers.0.ffn.gate.tid2eid F32 [512, 2] needs to be I64 or I32",
    ),
    (
        put("layers.3.ffn.gate.bias", "I64", 8),
        {},
        "layers.3.ffn.gate.bias I64 [8] needs to be F32 or F16 or BF16 or F64",
    ),
    (put("layers.0.attn.bias", "F32", 4), {}, "layers.0.attn.bias is not used by the model"),
    (put("vision.norm.weight", "F32", 4), {}, "vision.norm.weight is not used by the model"),
    (
        put("mtp.0.e_proj.weight", "BF16", 256, 255),
        {},
        "mtp.0.e_proj.weight BF16 [256, 255] where the config says [256, 256]",
    ),
]


@pytest.mark.parametrize(("edit", "config", "message"), FAULTS)
def test_each_fault_is_one_clear_line(
    edited: Callable[..., Path], edit: Edit, config: dict[str, Any], message: str
) -> None:
    found = refused(edited(edit, **config)).reasons
    assert len(found) == 1 and message in found[0].message
    assert "\n" not in found[0].message


def test_all_faults_come_in_one_pass(edited: Callable[..., Path]) -> None:
    # Not all: edits of one tensor would hide each other.
    several = [FAULTS[at] for at in (0, 2, 4, 5, 7, 8, 9, 11)]

    def edit(entries: dict[str, Entry]) -> None:
        for each, _, _ in several:
            each(entries)

    error = refused(edited(edit))
    told = "\n".join(reason.message for reason in error.reasons)
    assert all(message in told for _, _, message in several)
    assert len(error.reasons) == len(several) and error.code == "bad_checkpoint"


def test_faults_of_many_layers_are_told_once(edited: Callable[..., Path]) -> None:
    error = refused(edited(num_hidden_layers=5, compress_ratios=[0, 0, 4, 128, 4]))
    assert error.code == "missing_tensor" and "lacks 55 tensors" in error.cause
    experts = [r for r in error.reasons if "layers.4.ffn.experts" in r.message]
    assert [r.data["count"] for r in experts] == [8, 8, 8]
    error = refused(edited(num_hidden_layers=3, compress_ratios=[0, 0, 4]))
    assert error.code == "unused_tensor" and len(error.reasons) < 30


def test_experts_in_another_format_than_the_config_says(edited: Callable[..., Path]) -> None:
    found = refused(edited(expert_dtype="fp8")).reasons
    assert [reason.data["count"] for reason in found] == [32, 32, 32]
    assert all("is FP4 where the config says fp8" in reason.message for reason in found)


def test_a_draft_is_recognised_and_left_alone(edited: Callable[..., Path]) -> None:
    def edit(entries: dict[str, Entry]) -> None:
        for name, scheme, shape in (
            ("mtp.0.e_proj.weight", "F8_E4M3", (256, 256)),
            ("mtp.0.e_proj.scale", "F8_E8M0", (2, 2)),
            ("mtp.0.enorm.weight", "BF16", (256,)),
            ("mtp.0.ffn.experts.0.w1.weight", "I8", (128, 128)),
            ("mtp.0.ffn.experts.0.w1.scale", "F8_E8M0", (128, 8)),
            ("mtp.0.something.new", "F32", (3,)),
        ):
            entries[name] = Entry(name, scheme, shape)

    model = open_model(str(edited(edit)))
    assert not [n for spec in model.arch.packed_weights() for n in spec.tensors if "mtp" in n]


@pytest.mark.parametrize(
    ("key", "value"), [("fmt", "e5m2"), ("scale_fmt", "linear"), ("expert_dtype", "int4")]
)
def test_formats_that_are_not_known_are_refused_by_name(
    edited: Callable[..., Path], key: str, value: str
) -> None:
    at_top = key == "expert_dtype"
    folder = edited(section={} if at_top else {key: value}, **({key: value} if at_top else {}))
    with pytest.raises(UserError, match=rf"{key} (is|=) '{value}'"):
        open_model(str(folder))


def test_truncated_and_missing_shards(official: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(official, folder)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 3
    for shard in shards[:2]:
        shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ModelError) as caught:
        open_model(str(folder))
    assert all(shard.name in str(caught.value) for shard in shards[:2])
    assert "the file has" in str(caught.value) and "\n" not in str(caught.value)
    shards[0].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of .* shards: {shards[0].name}"):
        open_model(str(folder))


def test_names_of_modelopt_and_inputs_are_used(edited: Callable[..., Path]) -> None:
    def edit(entries: dict[str, Entry]) -> None:
        for name in [name for name in entries if ".experts." in name]:
            stem, _, leaf = name.rpartition(".")
            old = entries.pop(name)
            if leaf == "weight":
                for new, scheme, shape in (
                    ("weight", "U8", old.shape),
                    ("weight_scale", "F8_E4M3", (old.shape[0], old.shape[1] // 8)),
                    ("weight_scale_2", "F32", ()),
                    ("input_scale", "F32", ()),
                ):
                    entries[f"{stem}.{new}"] = Entry(f"{stem}.{new}", scheme, shape)

    section = {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16}
    model = open_model(str(edited(edit, section)))
    assert model.facts.scheme_of("layers.3.ffn.experts.0.w1.weight") == "nvfp4"
