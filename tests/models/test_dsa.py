"""DeepSeek-V3.2 and GLM-5.x, planned: tensors, caches and costs against published counts."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from metainfer.core.errors import ModelError, RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.plan import LayoutPlan
from metainfer.engine.elsewhere import describe
from metainfer.engine.engine import Engine
from metainfer.formats.completeness import CheckpointError
from metainfer.kv.book.spec import CacheSpec
from metainfer.models.arch import Cut, WeightSpec
from metainfer.models.dsa import cost, weights
from metainfer.models.dsa.arch import DsaArch
from metainfer.models.dsa.config import read_arch
from metainfer.models.dsa.shapes import random_configs
from metainfer.models.registry import random_draws
from metainfer.planner.opening import open_model
from metainfer.planner.report import plan_document
from metainfer.planner.resolve import Resolved

CONFIGS = random_configs()
GLM, V32 = CONFIGS["glm-5.3"], CONFIGS["deepseek-v3.2"]
NO_SHARING = ("index_topk_freq", "index_skip_topk_offset")
GLM_51 = {key: value for key, value in GLM.items() if key not in NO_SHARING}
K, M = 8192, 1 << 20


def arch_of(config: dict[str, Any], **options: str) -> DsaArch:
    return read_arch(config).with_options(options)


def stored_bytes(name: str) -> int:
    """Bytes of every stored tensor of a random model, the draft layer with it."""
    config = CONFIGS[name]
    arch = read_arch(config).with_draft()
    width = {"BF16": 2, "F32": 4}
    found = 0
    for drawn in random_draws(arch, config).values():
        count = 1
        for extent in drawn.shape:
            count *= extent
        fmt = drawn.format
        found += count * width[drawn.scheme] if fmt is None else fmt.nbytes(*drawn.shape)
    return found


# -- tensors ---------------------------------------------------------------------------------------


def active_parameters(arch: DsaArch) -> int:
    """Parameters that one token passes, with the head and without the embedding."""
    packed = weights.packed_weights(arch)
    routed = sum(spec.elements for spec in packed if spec.role == "experts")
    embed = arch.vocab_size * arch.hidden
    return cost.parameters(arch) - embed - routed + routed * arch.experts_per_token // arch.experts


def bytes_per_token(specs: tuple[CacheSpec, ...]) -> int:
    """What one more token costs over all layers."""
    return sum(spec.form.bytes for spec in specs)


def test_parameters_and_bytes_are_those_of_the_published_index() -> None:
    """753,329,940,480 parameters; two bytes each, and two more for 76 router biases in float32,
    are the ``total_size`` of the BF16 files."""
    arch = read_arch(GLM).with_draft()
    assert cost.parameters(arch) == 753_329_940_480
    biases = sum(s.elements for s in arch.plain_weights() if "e_score" in s.tensors[0])
    assert biases == 76 * 256
    assert 2 * cost.parameters(arch) + 2 * biases == 1_506_659_919_872


@pytest.mark.parametrize(
    ("config", "total", "active"), [(GLM, 753.3, 40.3), (GLM_51, 753.9, 40.8), (V32, 683.5, 37.5)]
)
def test_totals_are_those_of_the_table(config: dict[str, Any], total: float, active: float) -> None:
    arch = read_arch(config)
    assert cost.parameters(arch.with_draft()) / 1e9 == pytest.approx(total, abs=0.05)
    assert active_parameters(arch) / 1e9 == pytest.approx(active, abs=0.05)


def test_names_are_as_many_as_the_files_hold_and_as_many_in_fp8() -> None:
    arch = read_arch(GLM).with_draft()
    drawn = random_draws(arch, GLM)
    kinds = Counter(each.format is not None for each in drawn.values())
    assert (len(drawn), kinds[True], kinds[False]) == (59_585, 59_044, 541)


@pytest.mark.parametrize(("name", "gigabytes"), [("glm-5.3", 756), ("glm-5.2-nvfp4", 464.8)])
def test_files_weigh_what_is_published(name: str, gigabytes: float) -> None:
    assert stored_bytes(name) / 1e9 == pytest.approx(gigabytes, rel=0.002)


def test_layers_with_an_indexer_are_the_published_ones() -> None:
    full = [layer for layer, own in enumerate(read_arch(GLM).full) if own]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert len(full) == 21
    assert all(read_arch(GLM_51).full)
    said = ["full" if layer in full else "shared" for layer in range(78)]
    letters = "".join(word[0].upper() for word in said)
    assert read_arch({**GLM_51, "indexer_types": said}).full == read_arch(GLM).full
    assert read_arch({**GLM_51, "index_topk_pattern": letters}).full == read_arch(GLM).full
    read = {name for spec in read_arch(GLM).packed_weights() for name in spec.tensors}
    assert "model.layers.6.self_attn.indexer.wk.weight" in read
    assert "model.layers.7.self_attn.indexer.wk.weight" not in read


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"indexer_types": ["shared"] * 78}, "full for the first"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"layer_types": ["linear_attention"] * 78}, "linear_attention"),
        ({"mlp_layer_types": ["sparse"] * 77 + ["dense"]}, "mlp_layer_types"),
        ({"topk_group": 2}, "topk_group exceeds n_group"),
        ({"kv_lora_rank": 0}, "kv_rank must be above zero"),
        ({"index_kpool": 4}, "index_kpool"),
        ({"model_type": "glm5_next"}, "glm5_next"),
    ],
)
def test_a_config_that_is_not_planned_for_is_refused_by_name(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read_arch({**GLM, **change})


# -- caches and costs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "cache", "each"),
    [
        (GLM_51, "bf16", 100_152), (GLM_51, "fp8", 61_464), (GLM_51, "fp8-raw", 55_224),
        (GLM, "bf16", 92_628), (GLM, "fp8", 53_940), (GLM, "fp8-raw", 47_700),
        (V32, "bf16", 78_324), (V32, "fp8", 48_068), (V32, "fp8-raw", 43_188),
    ],
)  # fmt: skip
def test_a_token_costs_what_the_table_says(config: dict[str, Any], cache: str, each: int) -> None:
    specs = arch_of(config, cache=cache).cache_specs("bfloat16", {})
    assert bytes_per_token(specs) == each


@pytest.mark.parametrize(("cache", "each"), [("bf16", 1152), ("fp8", 656), ("fp8-raw", 576)])
def test_a_latent_has_its_published_width(cache: str, each: int) -> None:
    specs = arch_of(GLM, cache=cache).cache_specs("bfloat16", {})
    assert {spec.form.bytes for spec in specs if spec.name == "kv"} == {each}
    assert {spec.form.bytes for spec in specs if spec.name == "index"} == {132}
    drafted = arch_of(GLM, cache=cache).with_draft().cache_specs("bfloat16", {})
    assert bytes_per_token(drafted) == bytes_per_token(specs) + each + 132


def test_an_unknown_form_of_the_cache_is_bad_usage() -> None:
    with pytest.raises(UsageError, match="bf16 or fp8 or fp8-raw"):
        arch_of(GLM, cache="int8")


@pytest.mark.parametrize(
    ("config", "context", "gflop", "megabytes"),
    [
        (GLM, K, 1.4, 23), (GLM, 16 * K, 22.5, 363), (GLM, M, 180, 2907),
        (GLM_51, K, 5.2, 84), (GLM_51, 16 * K, 84, 1350), (GLM_51, M, 670, 10_796),
        (V32, K, 8.2, 66), (V32, 16 * K, 131, 1055), (V32, M, 1048, 8443),
    ],
)  # fmt: skip
def test_scoring_costs_what_the_table_says(
    config: dict[str, Any], context: int, gflop: float, megabytes: float
) -> None:
    costs = cost.Costs(arch_of(config, cache="fp8"))
    assert costs.decode_attention_flops(context)[1] / 1e9 == pytest.approx(gflop, rel=0.03)
    keys = [s for s in costs.arch.cache_specs("bfloat16", {}) if s.name == "index"]
    assert costs.cache_reads(keys, context) / 1e6 == pytest.approx(megabytes, rel=0.03)


@pytest.mark.parametrize(("config", "gflop", "megabytes"), [(GLM, 22, 105), (V32, 35, 82)])
def test_attention_is_flat_beyond_what_is_chosen(
    config: dict[str, Any], gflop: float, megabytes: float
) -> None:
    costs = cost.Costs(arch_of(config, cache="fp8"))
    projections = cost.Costs(costs.arch).decode_attention_flops(0)[0]
    for context in (2048, 16 * K, M):
        near = costs.decode_attention_flops(context)[0] - projections
        assert near / 1e9 == pytest.approx(gflop, rel=0.02)
        latents = [s for s in costs.arch.cache_specs("bfloat16", {}) if s.name == "kv"]
        assert costs.cache_reads(latents, context) / 1e6 == pytest.approx(megabytes, rel=0.01)


@pytest.mark.parametrize("tokens", [1, 2047, 2048, 2049, 5000])
def test_a_prompt_costs_the_sum_of_its_tokens(tokens: int) -> None:
    costs = cost.Costs(read_arch(CONFIGS["glm-5.3"]))
    each = [costs.decode_attention_flops(n) for n in range(1, tokens + 1)]
    near, scored = costs.prefill_attention_flops(tokens)
    assert near == pytest.approx(sum(one[0] for one in each))
    assert scored == pytest.approx(sum(one[1] for one in each), rel=1 / tokens)


# -- layouts ---------------------------------------------------------------------------------------

BLOCKS = {
    **dict.fromkeys(("linear.q_b", "linear.o", "linear.gate_up", "linear.down"), (128, 128)),
    **dict.fromkeys(("linear.shared13", "linear.shared2"), (128, 128)),
    **dict.fromkeys(("experts.w13", "experts.w2"), (128, 128)),
}


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
def test_degrees_that_keep_blocks_whole_are_accepted(tensor: int) -> None:
    assert read_arch(GLM).layout_objections(LayoutPlan(name="t", tensor=tensor), BLOCKS).accepted


def test_every_objection_comes_at_once() -> None:
    layout = LayoutPlan(name="odd", tensor=6, expert=7)
    said = " ".join(r.message for r in read_arch(GLM).layout_objections(layout, BLOCKS).reasons)
    for part in ("64 query heads", "vocabulary", "experts", "expert ranks", "shared13", "linear.o"):
        assert part in said, part


def test_the_latent_and_the_indexer_are_whole_on_every_tensor_rank() -> None:
    arch, layout = read_arch(GLM), LayoutPlan(name="tp8", tensor=8)
    whole = {s.site for s in arch.packed_weights() if arch.cut(s, layout) == (Cut.WHOLE, 1)}
    assert whole == {"linear.qkv_a", "linear.index_q", "linear.index_k", "linear_f32.index_w"}
    assert arch.cut(WeightSpec("", "absorb", (), (0,)), layout) == (Cut.ROWS, 8)
    one = arch.on_rank(layout)
    specs = [each.cache_specs("bfloat16", {}) for each in (arch, one)]
    assert bytes_per_token(specs[0]) == bytes_per_token(specs[1])


# -- plans -----------------------------------------------------------------------------------------


def plan_of(reference: str, **wishes: Any) -> Resolved:
    machine = wishes.pop("machine", "8x-rtx-pro-6000d")
    intent = Intent(model=reference, **wishes)
    return describe(machine, intent).resolve(open_model(reference), intent)


def test_it_is_planned_and_priced_and_refused_by_name() -> None:
    resolved = plan_of("random:glm-5.3-nvfp4", context=K, concurrency=1, parallel="tp8")
    refusal = resolved.refusal()
    assert refusal is not None and refusal.code == "planned_only"
    assert "glm_moe_dsa" in refusal.cause and "planned only" in refusal.cause
    assert len(refusal.reasons) == 4
    rows = plan_document(resolved)["layouts"]
    assert rows[0]["decode_tok_s"] > 0
    assert not any(row["built"] for row in rows)
    assert all(any(r["code"] == "not-built" for r in row["reasons"]) for row in rows)


def test_what_runs_nowhere_is_not_told_to_find_more_memory() -> None:
    """Before any plan: neither this machine's memory nor a context is the obstacle."""
    engine = Engine(Intent(model="random:glm-5.3-nvfp4", platform="cpu"))
    with pytest.raises(RefusedError, match="planned only") as caught:
        engine.start()
    assert caught.value.code == "planned_only" and len(caught.value.reasons) == 4


def test_b20_a_bf16_cache_on_every_card_holds_what_was_published(tmp_path: Path) -> None:
    """270 thousand tokens were reported of eight cards of 84 GB: between what they hold with all
    but the experts in BF16 and in FP8, 84 GB being the 84 GiB of 28 chips of 3 GiB."""
    shipped = resources.files("metainfer.platform") / "machines" / "8x-rtx-pro-6000d.toml"
    text = shipped.read_text()
    assert "84_000_000_000" in text
    machine = tmp_path / "gib.toml"
    machine.write_text(text.replace("84_000_000_000", str(84 << 30)))
    held = []
    for weight in ("dense@1", "stored@1"):
        resolved = plan_of(
            "random:glm-5.3-nvfp4",
            machine=str(machine),
            context=K,
            concurrency=1,
            parallel="tp8",
            layouts={"weight": weight},
        )
        held.append(resolved.chosen.longest or 0)
    assert 230_000 < held[0] < 270_000 < held[1] < 300_000


def test_b20_b26_an_fp8_cache_dealt_over_eight_cards_holds_a_million_tokens() -> None:
    """1.05 million tokens were reported: about 7 GB a card. Whole on every card it does not fit."""
    resolved = plan_of(
        "random:glm-5.3-nvfp4", concurrency=1, model_options={"cache": "fp8"}, parallel="tp8cs8"
    )
    rows = {row["name"]: row for row in plan_document(resolved)["layouts"]}
    dealt, whole = rows["tp8cs8"], rows["tp8"]
    assert dealt["feasible"] and dealt["max_context"] == 1_048_576
    assert dealt["kv_bytes"] / 1e9 == pytest.approx(53_940 * 1_048_576 / 8e9, rel=0.001)
    assert dealt["kv_bytes"] / 1e9 == pytest.approx(7, abs=0.1)
    assert not whole["feasible"] and 270_000 < whole["max_context"] < 400_000


def test_the_published_file_does_not_fit_eight_cards() -> None:
    with pytest.raises(RefusedError) as told:
        plan_of("random:glm-5.3", context=K, concurrency=1)
    assert told.value.code == "does_not_fit"
    layouts = {reason.data.get("layout") for reason in told.value.reasons}
    assert {"single", "tp8", "ep8", "tp8ep8"} <= layouts


def test_nvfp4_experts_on_8_0_are_refused_a_kernel_with_every_reason() -> None:
    """Asked for by name, the kernel says all that stands against it at once; unasked, the plan
    takes the path that widens blocks, and no faster one is lost without its reasons."""
    wishes: dict[str, Any] = {"machine": "8x-a800-pcie", "context": K, "concurrency": 1}
    reference = "random:glm-5.3-nvfp4?layers=5"
    with pytest.raises(RefusedError) as told:
        plan_of(reference, **wishes, ops={"moe_experts": "triton"})
    said = " ".join(reason.message for reason in told.value.reasons)
    for part in ("nvfp4", "float8_e4m3fn", "capability 8.9"):
        assert part in said, part
    plan = plan_of(reference, **wishes).plan
    decision = next(d for d in plan.decisions if d.key == "ops.moe_experts@chunk")
    lost = {loser.value: [r.message for r in loser.reasons] for loser in decision.losers}
    assert len(lost["triton"]) >= 3 and all(lost.values())


def test_one_card_of_24_gb_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(RefusedError) as told:
        plan_of(
            "random:glm-5.3-nvfp4", machine="8x-4090", context=K, concurrency=1, parallel="single"
        )
    assert told.value.code == "does_not_fit" and "one RTX 4090" in told.value.cause
    (reason,) = [r for r in told.value.reasons if r.code == "memory"]
    need, have = reason.data["need"], reason.data["have"]
    assert isinstance(need, int) and isinstance(have, int) and need > 15 * have


# -- checkpoints -----------------------------------------------------------------------------------


def test_what_transformers_saves_opens_tensor_for_tensor(tmp_path: Path) -> None:
    """The library's own names and shapes are the wanted ones, for both families."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in ("tiny-glm-5.3", "tiny-deepseek-v3.2"):
        config: dict[str, Any] = dict(CONFIGS[name])
        del config["torch_dtype"]
        folder = tmp_path / name
        kind = str(config.pop("model_type"))
        told = AutoConfig.for_model(kind, **config)
        with torch.device("cpu"):
            model = AutoModelForCausalLM.from_config(told)  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        opened = open_model(str(folder))
        count = sum(p.numel() for p in model.parameters())
        buffers = sum(b.numel() for n, b in model.named_buffers() if "e_score" in n)
        assert opened.facts.parameters == count + buffers
        assert opened.facts.missing
    index = folder / "config.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "n_routed_experts": 12}))
    with pytest.raises(CheckpointError):
        open_model(str(folder))
