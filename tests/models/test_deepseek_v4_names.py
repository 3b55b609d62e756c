"""Three spellings of DeepSeek-V4's tensors, and what cannot be one of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from metainfer.formats.checkpoint import Checkpoint
from metainfer.formats.completeness import Names
from metainfer.formats.index import CheckpointIndex, TensorInfo
from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch
from metainfer.models.deepseek_v4.drafts import Draft, DraftKind, draft_shapes, find_draft
from metainfer.models.deepseek_v4.names import checkpoint_names, official, resolve_names
from metainfer.models.registry import random_config, read_arch

Spec = dict[str, tuple[str, tuple[int, ...]]]
BYTES = {"BF16": 2, "F32": 4, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I64": 8}


def tiny() -> DeepSeekV4Arch:
    arch = read_arch(random_config("tiny-deepseek-v4", {}), "tiny")
    assert isinstance(arch, DeepSeekV4Arch)
    return arch


def headers(spec: Spec) -> dict[str, TensorInfo]:
    found, place = {}, 1000
    for name, (scheme, shape) in spec.items():
        size = BYTES[scheme] * math.prod(shape)
        found[name] = TensorInfo(name, scheme, shape, size, Path("m.safetensors"), place)
        place += size
    return found


def wanted(arch: DeepSeekV4Arch) -> dict[str, tuple[int, ...]]:
    specs = (*arch.packed_weights(), *arch.plain_weights())
    return {n: s for spec in specs
            for n, s in zip(spec.tensors, spec.tensor_shapes(), strict=True)}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny model of transformers, as it saves itself, and its state by module names."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**random_config("tiny-deepseek-v4", {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape))
        elif "tid2eid" in name:
            tensor.copy_(torch.randint(0, 8, tensor.shape))
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    return folder, model.state_dict()


def test_what_transformers_saves_is_what_it_held(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    folder, state = saved
    index = CheckpointIndex.open(folder)
    names = checkpoint_names(tiny(), {}, index.tensors, None)
    assert (names.reasons, names.unknown) == ([], [])
    assert {name: info.shape for name, info in names.tensors.items()} == wanted(tiny())
    read = Checkpoint(CheckpointIndex(names.tensors, {})).read
    for module, mine in {
        "model.layers.3.self_attn.kv_norm.weight": "layers.3.attn.kv_norm.weight",
        "model.layers.3.self_attn.compressor.kv_norm.weight":
            "layers.3.attn.compressor.norm.weight",
        "model.layers.2.self_attn.compressor.indexer.kv_norm.weight":
            "layers.2.attn.indexer.compressor.norm.weight",
        "model.layers.2.self_attn.compressor.indexer.gate_proj.weight":
            "layers.2.attn.indexer.compressor.wgate.weight",
        "model.embed_tokens.weight": "embed.weight",
        "model.hc_head.hc_fn": "hc_head_fn",
        "lm_head.weight": "head.weight",
    }.items():  # fmt: skip
        assert torch.equal(read(mine).data, state[module]), module


def test_module_names_and_fused_experts(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, state = saved
    schemes = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
    spec = {name: (schemes[t.dtype], tuple(t.shape)) for name, t in state.items()}
    names = checkpoint_names(tiny(), {}, headers(spec), None)
    assert (names.reasons, names.unknown) == ([], [])
    assert {name: info.shape for name, info in names.tensors.items()} == wanted(tiny())
    # Each slice lies where the fused tensor has it: the publisher's own file says what it holds.
    own = checkpoint_names(tiny(), {}, CheckpointIndex.open(folder).tensors, None)
    read = Checkpoint(CheckpointIndex(own.tensors, {})).read
    for expert, (weight, module) in enumerate(
        [("w1", "gate_up_proj"), ("w3", "gate_up_proj"), ("w2", "down_proj")]
    ):
        info = names.tensors[f"layers.4.ffn.experts.{expert}.{weight}.weight"]
        fused = state[f"model.layers.4.mlp.experts.{module}"]
        base = headers(spec)[f"model.layers.4.mlp.experts.{module}"].offset
        start, size = (info.offset - base) // fused.itemsize, info.nbytes // fused.itemsize
        piece = fused.flatten()[start : start + size].reshape(info.shape)
        assert torch.equal(piece, read(f"layers.4.ffn.experts.{expert}.{weight}.weight").data)


@pytest.mark.parametrize(
    ("stored", "mine"),
    [
        ("layers.0.attn.wq_a.scale", "layers.0.attn.wq_a.scale"),
        ("model.layers.0.self_attn.q_a_proj.weight_scale_inv",
         "layers.0.attn.wq_a.weight_scale_inv"),
        ("model.layers.1.mlp.experts.7.up_proj.weight", "layers.1.ffn.experts.7.w3.weight"),
        ("model.layers.1.mlp.shared_experts.down_proj.weight",
         "layers.1.ffn.shared_experts.w2.weight"),
        ("layers.1.ffn.experts.7.w1.weight_scale_2", "layers.1.ffn.experts.7.w1.weight_scale_2"),
        ("mtp.0.e_proj.weight", "mtp.0.e_proj.weight"),
        ("model.layers.1.attn.norm.weight", "layers.1.attn.kv_norm.weight"),
        ("layers.1.attn.norm.weight", "layers.1.attn.norm.weight"),
        ("model.layers.1.mlp.router.weight", None),
        ("vision.norm.weight", None),
        ("rope_freqs.weight", None),
    ],
)  # fmt: skip
def test_single_names(stored: str, mine: str | None) -> None:
    assert official(stored) == mine


def reasons(spec: Spec, block: tuple[int, int] | None = (128, 128)) -> tuple[Names, list[str]]:
    names = resolve_names(headers(spec), block)
    return names, [reason.message for reason in names.reasons]


EXPERTS = "model.layers.3.mlp.experts"


def test_fused_scales_are_cut_with_their_rows() -> None:
    names, wrong = reasons(
        {
            f"{EXPERTS}.gate_up_proj": ("F8_E4M3", (2, 512, 384)),
            f"{EXPERTS}.gate_up_proj_scale_inv": ("F8_E8M0", (2, 4, 3)),
            f"{EXPERTS}.down_proj": ("I8", (2, 384, 128)),
            f"{EXPERTS}.down_proj_scale_inv": ("F8_E8M0", (2, 384, 8)),
        }
    )
    assert wrong == []
    w3, scale = (names.tensors[f"layers.3.ffn.experts.1.w3.{leaf}"]
                 for leaf in ("weight", "weight_scale_inv"))  # fmt: skip
    assert (w3.shape, w3.offset) == ((256, 384), 1000 + (512 + 256) * 384)
    assert (scale.shape, scale.nbytes, scale.offset) == ((2, 3), 6, 1000 + 2 * 512 * 384 + 6 * 3)
    assert names.tensors["layers.3.ffn.experts.1.w2.weight_scale_inv"].shape == (384, 8)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"up_gate_proj": ("BF16", (2, 64, 8))}, "declares the rows of w3 (up) before those of w1"),
        ({"gate_up_proj": ("BF16", (2, 63, 8))}, "needs [experts, rows, columns], the rows in two"),
        ({"gate_up_proj": ("BF16", (64, 8))}, "needs [experts, rows, columns], the rows in two"),
        ({"down_proj": ("BF16", (64, 8))}, "needs [experts, rows, columns]"),
        (
            {
                "gate_up_proj": ("F8_E4M3", (2, 192, 128)),
                "gate_up_proj_scale_inv": ("F8_E8M0", (2, 2, 1)),
            },
            "the 96 rows of a gate are not whole blocks of 128, so one scale would serve gate and",
        ),
    ],
)
def test_fused_tensors_that_cannot_be_cut(spec: Spec, message: str) -> None:
    names, (wrong,) = reasons({f"{EXPERTS}.{leaf}": what for leaf, what in spec.items()})
    assert message in wrong and EXPERTS in wrong
    assert names.excused == ["layers.3.ffn.experts."]


def test_two_spellings_of_one_tensor_are_refused() -> None:
    spec: Spec = {"embed.weight": ("BF16", (4, 4)), "model.embed_tokens.weight": ("BF16", (4, 4))}
    _, wrong = reasons(spec)
    assert wrong == ["embed.weight and model.embed_tokens.weight are both embed.weight"]


def block(stage: int) -> list[str]:
    return [f"mtp.{stage}.attn.wq_a.weight", f"mtp.{stage}.ffn.experts.0.w1.weight"]


def test_drafts_are_told_by_their_tensors() -> None:
    arch = tiny()
    assert find_draft(arch, ["embed.weight"]) is None
    assert find_draft(arch, [*block(0), "mtp.0.e_proj.weight"]) == Draft(DraftKind.MTP, 1)
    dspark = [*block(0), *block(2), "mtp.2.markov_head.markov_w1.weight"]
    assert find_draft(arch, dspark) == Draft(DraftKind.DSPARK, 3)
    keyed = read_arch({**random_config("tiny-deepseek-v4", {}), "dspark_block_size": 5}, "x")
    assert isinstance(keyed, DeepSeekV4Arch)
    assert find_draft(keyed, block(1)) == Draft(DraftKind.DSPARK, 2)
    assert find_draft(keyed, ["mtp.0.enorm.weight"]) == Draft(DraftKind.MTP, 1)


def test_shapes_of_drafts_sum_to_the_published_sizes() -> None:
    arch = read_arch(random_config("deepseek-v4-flash", {}), "x")
    assert isinstance(arch, DeepSeekV4Arch)

    def billions(kind: DraftKind, stages: int) -> float:
        shapes = draft_shapes(arch, Draft(kind, stages))
        return sum(math.prod(shape) for shape in shapes.values()) / 1e9

    assert billions(DraftKind.MTP, 1) == pytest.approx(6.61, abs=0.01)
    assert billions(DraftKind.DSPARK, 3) == pytest.approx(19.85, abs=0.02)
    shapes = draft_shapes(arch, Draft(DraftKind.DSPARK, 3))
    assert shapes["mtp.0.main_proj.weight"] == (4096, 12288)
    assert shapes["mtp.2.confidence_head.proj.weight"] == (1, 4352)
    assert shapes["mtp.1.ffn.gate.bias"] == (256,) and "mtp.1.norm.weight" not in shapes
    assert "mtp.0.attn.compressor.ape" not in shapes and "mtp.0.ffn.gate.tid2eid" not in shapes


def test_draft_tensors_are_optional_with_their_shapes() -> None:
    spec: Spec = {
        "mtp.0.e_proj.weight": ("BF16", (64, 64)),
        "mtp.0.main_thing.weight": ("BF16", (9,)),
        "mtp.2.markov_head.markov_w1.weight": ("BF16", (512, 16)),
    }
    names = checkpoint_names(tiny(), {"dspark_markov_rank": 16}, headers(spec), None)
    assert names.optional["mtp.2.markov_head.markov_w1.weight"] == (512, 16)
    assert names.optional["mtp.0.main_thing.weight"] == ()
