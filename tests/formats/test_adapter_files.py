"""PEFT folders from headers alone: what fits, and every fault of what does not, in one error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from metainfer.core.errors import ModelError, RefusedError
from metainfer.formats.adapter_config import read_adapter_config
from metainfer.formats.adapters import Adapter, read_adapter
from metainfer.formats.completeness import CheckpointError

TARGETS = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in {
        "self_attn.q_proj": (12, 8),
        "self_attn.v_proj": (4, 8),
        "mlp.down_proj": (8, 20),
    }.items()
}
KEPT = {"model.embed_tokens": "no embeddings", "lm_head": "no head"}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}


def pairs(ends: tuple[str, ...] = ("q_proj", "v_proj"), rank: int = 2) -> dict[str, torch.Tensor]:
    found = {}
    for module, (n, k) in TARGETS.items():
        if module.endswith(ends):
            found[f"base_model.model.{module}.lora_A.weight"] = torch.ones(rank, k)
            found[f"base_model.model.{module}.lora_B.weight"] = torch.ones(n, rank)
    return found


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def read(folder: Path) -> Adapter:
    return read_adapter("sql", folder, TARGETS, KEPT)


def faults(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert caught.value.code == "bad_adapter"
    assert "sql" in caught.value.cause and str(folder) in caught.value.cause
    return [reason.message for reason in caught.value.reasons]


def test_pairs_by_module(tmp_path: Path) -> None:
    found = read(write(tmp_path, {"base_model_name_or_path": "org/base"}, pairs()))
    assert set(found.modules) == {m for m in TARGETS if not m.endswith("down_proj")}
    assert {(pair.rank, pair.scale) for pair in found.modules.values()} == {(2, 3.0)}
    assert (found.base, found.rank) == ("org/base", 2)


def test_patterns_choose_rank_and_scale(tmp_path: Path) -> None:
    """The end of a name after a dot, or all of it; the first pattern that matches."""
    tensors = pairs()
    first = "model.layers.1.self_attn.v_proj"
    for side, shape in (("A", (5, 8)), ("B", (4, 5))):
        tensors[f"base_model.model.{first}.lora_{side}.weight"] = torch.ones(shape)
    config = {
        "rank_pattern": {r"layers\.1\.self_attn\.v_proj": 5, "roj": 9},
        "alpha_pattern": {"v_proj": 10, first: 99},
        "use_rslora": True,
    }
    found = read(write(tmp_path, config, tensors)).modules
    assert (found[first].rank, found[first].scale) == (5, 10 / math.sqrt(5))
    other = found["model.layers.1.self_attn.q_proj"]
    assert (other.rank, other.scale) == (2, 6 / math.sqrt(2))


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        ({"target_modules": r".*\.1\.mlp\.down_proj"}, ["model.layers.1.mlp.down_proj"]),
        (
            {"target_modules": ["down_proj"], "layers_to_transform": [0, 2]},
            ["model.layers.0.mlp.down_proj", "model.layers.2.mlp.down_proj"],
        ),
        (
            {"target_modules": ["down_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
            ["model.layers.1.mlp.down_proj"],
        ),
        (
            {"target_modules": ["down_proj", "q_proj"], "exclude_modules": ["q_proj"]},
            [m for m in TARGETS if m.endswith("down_proj")],
        ),
        ({"target_modules": "all-linear"}, list(TARGETS)),
        ({"target_modules": "all-linear", "exclude_modules": r".*(q|v)_proj"},
         [m for m in TARGETS if m.endswith("down_proj")]),
    ],
)  # fmt: skip
def test_targets_as_peft_reads_them(
    config: Mapping[str, Any], modules: list[str], tmp_path: Path
) -> None:
    tensors = {
        name: tensor
        for name, tensor in pairs(("proj",)).items()
        if any(module in name for module in modules)
    }
    assert sorted(read(write(tmp_path, config, tensors)).modules) == sorted(modules)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is served"),
        ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA'"),
        ({"use_dora": True}, "DoRA (use_dora)"),
        ({"bias": "all"}, "trained biases (bias)"),
        ({"lora_bias": True}, "biases on B"),
        ({"modules_to_save": ["lm_head"]}, "whole modules (modules_to_save)"),
        ({"use_qalora": True}, "QALoRA"),
        ({"alora_invocation_tokens": [5, 6]}, "activated LoRA"),
        ({"trainable_token_indices": [1]}, "trained token rows"),
        ({"target_parameters": ["mlp.experts"]}, "parameters instead of modules"),
        ({"layer_replication": [[0, 2]]}, "repeated layers"),
        ({"fan_in_fan_out": True}, "transposed weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"init_lora_weights": "olora"}, "changes the base weights"),
        ({"use_new_method": True}, "its key 'use_new_method' is not known here"),
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"r": 2.0}, "r is 2.0"),
        ({"lora_alpha": "six"}, "lora_alpha is 'six'"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"target_modules": []}, "target_modules is []"),
        ({"target_modules": "(q_proj"}, "a regular expression"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern of 'q_proj' is -1"),
        ({"alpha_pattern": {"(": 4}}, "a regular expression"),
        ({"alpha_pattern": {"(?i)q_proj": 4}}, "a regular expression"),
        ({"layers_to_transform": 1, "layers_pattern": ["("]}, "a regular expression"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"rank_pattern": ["q_proj"]}, "a table of patterns"),
        ({"layers_to_transform": ["one"]}, "layer numbers"),
        ({"target_modules": ["c_attn"]}, "no module of this model is one of its targets: c_attn"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "it targets lm_head: no head"),
        ({"target_modules": ["q_proj", "v_proj", "embed_tokens"]}, "no embeddings"),
    ],
)  # fmt: skip
def test_what_is_not_plain_lora_is_refused_by_name(
    config: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    told = faults(write(tmp_path, config, pairs()))
    assert any(said in message for message in told), told


def test_values_that_ask_for_nothing_are_accepted(tmp_path: Path) -> None:
    nothing = {
        "bias": "none", "use_dora": False, "modules_to_save": None, "layer_replication": None,
        "megatron_core": "megatron.core", "qalora_group_size": 16, "loftq_config": {},
        "lora_dropout": 0.1, "init_lora_weights": "gaussian", "some_later_switch": False,
        "another": None, "exclude_modules": None, "layers_to_transform": None,
    }  # fmt: skip
    assert len(read(write(tmp_path, nothing, pairs())).modules) == 6


def test_every_fault_comes_at_once(tmp_path: Path) -> None:
    """Another kind, a missing side, a wrong shape, a wrong dtype, a stranger, the head."""
    tensors = pairs()
    stem = "base_model.model.model.layers"
    del tensors[f"{stem}.0.self_attn.q_proj.lora_B.weight"]
    tensors[f"{stem}.1.self_attn.q_proj.lora_A.weight"] = torch.ones(3, 8)
    tensors[f"{stem}.2.self_attn.q_proj.lora_B.weight"] = torch.ones(12, 2, dtype=torch.int32)
    tensors[f"{stem}.0.self_attn.q_proj.lora_magnitude_vector"] = torch.ones(12)
    tensors[f"{stem}.7.self_attn.q_proj.lora_A.weight"] = torch.ones(2, 8)
    tensors[f"{stem}.0.mlp.down_proj.lora_A.weight"] = torch.ones(2, 20)
    config = {"use_dora": True, "target_modules": ["q_proj", "v_proj", "lm_head"]}
    told = "\n".join(faults(write(tmp_path, config, tensors)))
    for said in (
        "DoRA",
        "it targets lm_head",
        "layers.0.self_attn.q_proj.lora_B [12, 2] is missing",
        "layers.1.self_attn.q_proj.lora_A F32 [3, 8] where model and rank say [2, 8]",
        "layers.2.self_attn.q_proj.lora_B I32 [12, 2] needs to be F32",
        "lora_magnitude_vector is no part of plain LoRA",
        "layers.7.self_attn.q_proj.lora_A.weight is none of this model's matrices",
        "down_proj.lora_A.weight is none of its own targets",
    ):
        assert said in told


def test_faults_of_a_kind_are_told_once(tmp_path: Path) -> None:
    """An adapter of a wider model: one line for each of its matrices, whatever the layers."""
    tensors = {name: torch.ones(t.shape[0], 16) if "lora_A" in name else t
               for name, t in pairs().items()}  # fmt: skip
    told = faults(write(tmp_path, {"base_model_name_or_path": "wider"}, tensors))
    assert len(told) == 2 and all("(and 2 more like it)" in message for message in told)
    with pytest.raises(RefusedError, match="made for 'wider'"):
        read(tmp_path)


def test_pickled_files_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, {}, pairs())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"holds only adapter_model\.bin") as caught:
        read(tmp_path)
    assert caught.value.code == "pickled_adapter"


def test_folders_that_hold_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        read(tmp_path)
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        read(tmp_path / "nowhere")
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="no weights"):
        read(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12")
    with pytest.raises(ModelError, match="not a sound safetensors"):
        read(tmp_path)


def test_b27_the_digest_is_of_content(tmp_path: Path) -> None:
    """Names and places do not count; a value or a scale does."""
    one = read(write(tmp_path / "a", {}, pairs()))
    copy = read_adapter("other", write(tmp_path / "b", {"r": 2}, pairs()), TARGETS, KEPT)
    assert copy.digest == one.digest
    changed = pairs()
    changed["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][0, 0] = 1.5
    assert read(write(tmp_path / "c", {}, changed)).digest != one.digest
    assert read(write(tmp_path / "d", {"lora_alpha": 7}, pairs())).digest != one.digest


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


_KEYS = st.sampled_from(
    [*CONFIG, "rank_pattern", "alpha_pattern", "bias", "layers_to_transform", "layers_pattern",
     "use_dora", "exclude_modules", "init_lora_weights", "x"]
)  # fmt: skip


@settings(max_examples=60)
@given(st.dictionaries(_KEYS, _JSON))
def test_any_configuration_is_read_or_refused(body: dict[str, Any]) -> None:
    config, reasons = read_adapter_config({"peft_type": "LORA", **body})
    assert (config is not None) or reasons
    if config is not None:
        for module in TARGETS:
            assert isinstance(config.targets_module(module), bool)
            assert config.rank_of(module) >= 1 and math.isfinite(config.scale_of(module))
