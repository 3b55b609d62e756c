"""Kernels with one fault each, called proven by the machine's records: `verify` names the fault.

Where other checks would only repeat the name, the fault meets the check that has to find it; the
whole `verify` of every fault is `matrix.py`, whose outcome is in docs/verify.md.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from planting import SEED, machine_with, named, verified

from metainfer.verifier.checks.ops import case_row
from metainfer.verifier.rows import FAILED
from metainfer.verifier.subject import Subject

MISTRAL = "random:tiny-mistral"


@pytest.mark.parametrize(
    ("impl", "fault", "name"),
    [
        ("kv_write/c", "page_stride_wrong", "page stride"),
        ("attn_paged/c", "window_one_more", "window edge"),
        ("swiglu/c", "gate_up_swapped", "gate and up swapped"),
        ("rope/c", "rope_half_wrong", "rope half"),
        ("linear/onednn", "tail_truncated", "truncated tail"),
        ("sample/torch", "seed_ignored", "seed"),
    ],
)
def test_a_dense_models_kernel_is_named(impl: str, fault: str, name: str, tmp_path: Path) -> None:
    document = verified(MISTRAL, {impl: fault}, tmp_path, only=("ops",))
    assert document["verdict"] == FAILED
    failed = [row["what"] for row in document["checks"] if row["verdict"] == FAILED]
    assert failed == [impl]  # nothing else is accused
    assert name in named(document)


@pytest.mark.parametrize(
    ("impl", "fault", "name", "dtype"),
    [
        ("swiglu_clamp/torch", "clamp_skipped", "swiglu clamp", "float32"),
        ("attn_sparse/torch", "sink_dropped", "sink", "float32"),
        ("attn_sparse/torch", "dense_for_sparse", "sparse selection", "float32"),
        ("moe_route/torch", "routed_scale_twice", "double routed scale", "float32"),
        ("index_select/torch", "ties_to_the_last", "tie order", "float32"),
        ("linear/recipe", "scale_column_stale", "stale scale column", "float32"),
        ("linear/recipe", "scale_group_wrong", "scale group", "bfloat16"),
    ],
)
def test_a_sparse_models_kernel_is_named(
    impl: str, fault: str, name: str, dtype: str, tmp_path: Path
) -> None:
    machine = machine_with({impl: fault}, tmp_path)
    (wrong,) = [found for found in machine.registry.impls() if found.id == impl]
    plan = SimpleNamespace(model=SimpleNamespace(dtype=dtype))
    subject: Any = SimpleNamespace(machine=machine, plan=plan, seed=SEED)
    row = case_row(cast(Subject, subject), wrong, ["where it is used"])
    assert row.verdict == FAILED and row.where == ("where it is used",)
    assert name in row.named


def test_end_to_end_the_healing_op_is_named(tmp_path: Path) -> None:
    document = verified(MISTRAL, {"rope/c": "rope_half_wrong"}, tmp_path, only=("end to end",))
    assert document["verdict"] == FAILED
    assert list(named(document)) == ["op rope"]
    assert "rope, every call" in named(document)["op rope"]


def test_in_place_a_call_of_the_model_is_named(tmp_path: Path) -> None:
    document = verified(MISTRAL, {"swiglu/c": "gate_up_swapped"}, tmp_path, only=("ops in place",))
    found = named(document)
    assert list(found) == ["gate and up swapped"]
    assert found["gate and up swapped"][0] == "swiglu@chunk, call 1"


def test_a_page_that_keeps_its_last_owner_is_named(tmp_path: Path) -> None:
    faults = {"kv_write/c": "page_kept"}
    assert verified(MISTRAL, faults, tmp_path, only=("ops",))["verdict"] == "passed"
    document = verified(MISTRAL, faults, tmp_path, only=("invariance",))
    assert named(document)["op kv_write"] == ["kv_write"]
    assert "page reuse" in named(document)
