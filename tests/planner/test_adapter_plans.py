"""Adapters in a plan: rows of the ledger, decisions, graphs, layouts and families that refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_decisions import REGISTRY, card, decision

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import Evidence
from metainfer.planner.adapters import adapter_rows
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved, resolve
from metainfer.planner.weights import parts_held

MODEL = "random:qwen3-8b?layers=2"
QUERY, VALUE, MIDDLE = (4096, 4096), (1024, 4096), (4096, 12288)


def save(folder: Path, rank: int, leaves: dict[str, tuple[int, int]]) -> str:
    """An adapter of zeros on both layers."""
    tensors = {}
    for layer in range(2):
        for leaf, (n, k) in leaves.items():
            stem = f"base_model.model.model.layers.{layer}.{leaf}"
            tensors[f"{stem}.lora_A.weight"] = torch.zeros(rank, k)
            tensors[f"{stem}.lora_B.weight"] = torch.zeros(n, rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [leaf.rpartition(".")[2] for leaf in leaves],
        "base_model_name_or_path": "org/qwen3",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    attention = {"self_attn.q_proj": QUERY, "self_attn.v_proj": VALUE}
    return {
        "sql": save(root / "sql", 4, attention),
        "law": save(root / "law", 8, {"self_attn.q_proj": QUERY, "mlp.down_proj": MIDDLE}),
    }


def resolved(adapters: dict[str, str], without: tuple[str, ...] = (), **intent: Any) -> Resolved:
    model = open_model(MODEL, adapters=adapters)
    policy = Policy(min_evidence=Evidence.NONE, allow_fallback=frozenset({"all"}))
    wish = Intent(model=MODEL, adapters=adapters, **intent)
    return resolve(wish, model.facts, card(), REGISTRY.without(*without), policy)


def test_every_adapter_has_its_row_of_device_bytes(folders: dict[str, str]) -> None:
    plan = resolved(folders).plan
    rows = {row.item: row for row in plan.ledger if row.item.startswith("adapter ")}
    assert list(rows) == ["adapter law", "adapter sql"]  # places follow names
    own = {
        "law": 2 * 8 * (sum(QUERY) + sum(MIDDLE)) * 2,
        "sql": 2 * 4 * (sum(QUERY) + sum(VALUE)) * 2,
    }
    assert {row.item: row.logical_bytes for row in rows.values()} == {
        f"adapter {name}": held for name, held in own.items()
    }
    # Of each layer: q and v of both to rank 8 with two scales, down of both to rank 8 with one.
    qkv = 2 * 8 * (2 * 4096 + 4096 + 1024) * 2 + 2 * 2 * 4
    down = 2 * 8 * sum(MIDDLE) * 2 + 2 * 4
    assert sum(row.bytes for row in rows.values()) == 2 * (qkv + down)
    assert all(row.memory == "device" and row.kind == "weights" for row in rows.values())


def test_the_rows_add_up_to_the_card_with_adapters_too(folders: dict[str, str]) -> None:
    with_them, without = resolved(folders), resolved({})
    for each in (with_them, without):
        device = [row.bytes for row in each.plan.ledger if row.memory == "device"]
        assert sum(device) == card().device.memory_bytes
    assert with_them.plan.kv_tokens <= without.plan.kv_tokens


def test_what_is_decided_and_by_whom(folders: dict[str, str]) -> None:
    plan = resolved(folders)
    assert [(a.name, a.rank) for a in plan.plan.adapters] == [("law", 8), ("sql", 4)]
    named = decision(plan, "adapters")
    assert (named.value, named.origin) == (["law", "sql"], Origin.FLAG)
    assert decision(plan, "adapters.max_count").value == 2
    assert decision(plan, "adapters.max_rank").value == 8
    assert "trained on 'org/qwen3' by its own word" in decision(plan, "adapters.sql").why
    nobody = resolved({})
    assert decision(nobody, "adapters").value == "none"
    assert nobody.plan.fingerprint != plan.plan.fingerprint
    assert not [key for key in nobody.plan.values() if "adapter" in key or "lora" in key]


def test_decode_stays_captured_on_a_card(folders: dict[str, str]) -> None:
    """The version that sorts on the host is not offered there, so adapters cost no graph."""
    plan = resolved(folders)
    sites = ("lora.qkv", "lora.down")
    assert {plan.plan.ops[f"{site}@decode"].impl for site in sites} == {"lora/torch"}
    assert plan.plan.graph_buckets == resolved({}).plan.graph_buckets != ()
    lost = {loser.value: loser for loser in decision(plan, "ops.lora.qkv@decode").losers}
    assert [reason.code for reason in lost["grouped"].reasons] == ["graph"]
    eager = resolved(folders, without=("lora/torch", "lora/grouped"))
    assert eager.plan.graph_buckets == ()  # and the plan says why
    reasons = decision(eager, "graph_buckets").losers[0].reasons
    assert any("lora/ref at lora." in each.message for each in reasons)


def test_pairs_are_cut_as_their_matrices_are(folders: dict[str, str]) -> None:
    """Over two ranks: B of q and v by rows, A of down by columns; the rest is on both. Chunks of a
    pair of layouts compute with the parts of both."""
    arch = open_model(MODEL, adapters=folders).arch
    for layout, beside in (
        (LayoutPlan(name="tp2", tensor=2), 1),
        (LayoutPlan(name="cp2/tp2", tensor=2, prefill=2), 2),
    ):
        assert arch.layout_objections(layout, {}).accepted
        rank = arch.on_rank(layout)
        asked = {
            each.site: each for each in rank.op_requests(Phase.CHUNK, 64, 1, "bfloat16", {}, 16)
        }
        qkv, down = asked["lora.qkv"].shape, asked["lora.down"].shape
        assert (qkv["n"], qkv["k"]) == (2048 + 512, 4096)
        assert (down["n"], down["k"]) == (4096, 12288 // 2)
        assert {parts_held(arch, site, layout) for site in ("lora.qkv", "lora.down")} == {beside}
        rows = adapter_rows(rank.adapters, 2)
        qkv_bytes = 2 * 8 * (2 * 4096 + beside * (2048 + 512)) * 2 + 2 * 2 * 4
        down_bytes = 2 * 8 * (beside * 6144 + 4096) * 2 + 2 * 4
        assert sum(row.bytes for row in rows) == 2 * (qkv_bytes + down_bytes)
        q, v = 4096 + beside * 2048, 4096 + beside * 512
        assert [row.logical_bytes for row in rows] == [
            2 * 8 * (q + beside * 6144 + 4096) * 2,
            2 * 4 * (q + v) * 2,
        ]
        assert {row.share for row in rows} == {"cut like their matrices"}


@pytest.mark.parametrize("model", ["random:tiny-deepseek-v4", "random:deepseek-v4-flash?layers=2"])
def test_deepseek_v4_refuses_them_by_name(model: str, folders: dict[str, str]) -> None:
    with pytest.raises(RefusedError, match="deepseek_v4 models take no adapters: sql") as caught:
        open_model(model, adapters={"sql": folders["sql"]})
    assert caught.value.code == "adapters_refused"
    assert any("experts" in reason.message for reason in caught.value.reasons)


def test_an_adapter_of_another_model_is_refused_with_every_fault(folders: dict[str, str]) -> None:
    with pytest.raises(RefusedError, match="made for 'org/qwen3'") as caught:
        open_model("random:tiny-qwen3", adapters={"sql": folders["sql"]})
    assert caught.value.code == "bad_adapter" and len(caught.value.reasons) > 2


def test_an_adapter_may_not_be_called_as_the_model(folders: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="the model's own name"):
        open_model(MODEL, adapters={MODEL: folders["sql"]})
