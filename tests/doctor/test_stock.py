"""The stock audit: tables that hold together, and what each says of known machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_machines import card, healthy, peer, with_facts

from metainfer.core.errors import UsageError
from metainfer.doctor import report
from metainfer.doctor.data_files import load, rows
from metainfer.doctor.finding import Severity
from metainfer.doctor.stock import chunks, moe_tables
from metainfer.doctor.stock.audit import OUTCOMES, StockRequest, audit, fill
from metainfer.doctor.stock.command_line import ENGINES, read_line, table
from metainfer.doctor.stock.conditions import fact_of, holds
from metainfer.doctor.stock.models import recognise
from metainfer.doctor.stock.subject import subject
from metainfer.platform.facts import Facts, LinkFacts
from metainfer.platform.machine_catalog import SHIPPED, find_machine

UNKNOWN = str(Path(__file__).parent / "fixtures" / "unknown-card.toml")
V32, GLM, FLASH = "deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5.3-FP8", "zai-org/GLM-5.3-Flash"
V4 = "deepseek-ai/DeepSeek-V4-Flash"
DESCRIBED = "card of a data centre"


def cards(
    capability: tuple[int, int] | None, count: int = 8, nvlink: bool = False, peers: bool = True
) -> Facts:
    links: list[LinkFacts] = [
        peer(i, j, peer_read=peers, peer_write=peers, kind="nvlink" if nvlink else "pcie")
        for i in range(count)
        for j in range(count)
        if i != j
    ]
    inputs = with_facts(
        healthy(),
        devices=tuple(card(capability=capability, name=DESCRIBED) for _ in range(count)),
        links=tuple(links),
        origins={"devices": "vendor: sheet", "links": "field: owner"},
    )
    return inputs.facts


def outcomes(facts: Facts, engine: str, text: str, **more: Any) -> dict[str, str]:
    return {
        row["id"]: row["outcome"]
        for row in audit(facts, StockRequest(engine, text), **more)["rows"]
    }


# the tables


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", [V32, GLM, FLASH, V4, "meta-llama/Llama-3-8B", "who/knows", ""])
def test_every_condition_is_about_a_fact_and_every_text_fills(engine: str, model: str) -> None:
    for pair in ((8, 0), (9, 0), (10, 0), (12, 0), None):
        about = subject(cards(pair), read_line(engine, "--tp 4" if engine == "sglang" else "-tp 4"),
                        recognise(model))  # fmt: skip
        for name in ("path", "resolve", "candidate"):
            for row in load(table(engine)).get(name, ()):
                for when in (row.get("when"), row.get("listed")):
                    assert when is None or holds(when, about.facts) in (True, False, None)
                assert fill(row.get("what", ""), about.facts) is not None
        assert set(about.facts) == set(about.origins)


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_are_well_formed(engine: str) -> None:
    flags = rows(table(engine), "flag")
    names = [name for row in flags for name in row["names"]]
    assert len(names) == len(set(names))
    assert all(row["kind"] in ("int", "text", "switch") for row in flags)
    paths = rows(table(engine), "path")
    assert len({row["id"] for row in paths}) == len(paths)
    for row in paths:
        assert row["outcome"] in OUTCOMES and row["when"] and row["ours"]
        assert isinstance(row["built"], bool) and not row["what"].endswith(".")
        assert all(fact_of(key) for key in row["when"])


def test_every_backend_that_sglang_resolves_has_its_kernels_listed() -> None:
    known = {row["name"] for row in rows("stock-sglang.toml", "kernel")}
    for row in rows("stock-sglang.toml", "resolve"):
        assert row["key"] == "kv" or row["value"] in known


def test_a_condition_on_nothing_is_a_defect() -> None:
    with pytest.raises(KeyError):
        holds({"colour": "red"}, {"size": 3})


@pytest.mark.parametrize(
    ("when", "verdict"),
    [
        ({"a": 3}, True), ({"a": [1, 3]}, True), ({"a": 4}, False), ({"a_not": [3]}, False),
        ({"a_min": 3, "a_max": 3}, True), ({"a_min": 4}, False), ({"n": 1}, None),
        ({"n": 1, "a": 4}, False), ({"n": 1, "a": 3}, None), ({"n_not": [1]}, None), ({}, True),
        ({"capability_min": "8.9"}, True), ({"capability_max": "9.0"}, False),
        ({"capability_max": "12.0"}, True), ({"capability_not": ["9.0", "12.0"]}, True),
    ],
)  # fmt: skip
def test_conditions(when: dict[str, Any], verdict: bool | None) -> None:
    assert holds(when, {"a": 3, "n": None, "capability": "10.0"}) is verdict


# attention: the published table of outcomes


@pytest.mark.parametrize(
    ("pair", "model", "flags", "chosen", "fails"),
    [
        # auto is bfloat16 on 9.0
        ((9, 0), V32, "", ("flashmla_sparse", "fa3"), ()),
        ((9, 0), V32, "--kv-cache-dtype fp8_e4m3", ("flashmla_kv", "flashmla_kv"), ()),
        ((9, 0), FLASH, "--kv-cache-dtype fp8_e4m3", ("flashmla_kv", "flashmla_kv"), ("tail",)),
        ((9, 0), FLASH, "", ("fa3", "fa3"), ()),
        ((10, 0), GLM, "", ("trtllm", "trtllm"), ()),
        ((10, 3), FLASH, "", ("trtllm", "trtllm"), ()),
        ((12, 0), GLM, "", ("flashinfer_sparse_mla", "flashinfer_sparse_mla"), ()),
        ((12, 0), V32, "", ("trtllm", "trtllm"), ("prefill", "decode")),
        ((12, 0), FLASH, "", ("trtllm", "trtllm"), ("prefill", "decode")),
        ((12, 0), V32, "--kv-cache-dtype bfloat16", ("flashmla_sparse", "trtllm"),
         ("prefill", "decode")),
        ((12, 0), FLASH, "--dsa-prefill-backend tilelang --dsa-decode-backend tilelang",
         ("tilelang", "tilelang"), ()),
        ((12, 1), GLM, "--dsa-decode-backend trtllm", ("flashinfer_sparse_mla", "trtllm"),
         ("decode",)),
        ((8, 9), GLM, "--kv-cache-dtype fp8_e4m3", ("flashmla_kv", "flashmla_kv"),
         ("prefill", "decode")),
        ((8, 0), V32, "", ("flashmla_sparse", "fa3"), ("prefill", "decode")),
    ],
)  # fmt: skip
def test_b01_sglang_sends_a_family_to_kernels_that_cannot_run(
    pair: tuple[int, int], model: str, flags: str, chosen: tuple[str, str], fails: tuple[str, ...]
) -> None:
    made = audit(cards(pair), StockRequest("sglang", f"--model-path {model} --tp 8 {flags}"))
    assert (made["chosen"]["dsa_prefill"], made["chosen"]["dsa_decode"]) == chosen
    failing = {row["id"] for row in made["rows"] if row["outcome"] == "fails"}
    assert {name for name in failing if name.startswith("attention")} == {
        f"attention-{name}" for name in fails
    }


def test_a_choice_that_turns_on_an_unknown_fact_is_not_guessed() -> None:
    line = f"--model-path {FLASH} --tp 8 --kv-cache-dtype bfloat16"
    made = audit(cards(None), StockRequest("sglang", line))
    assert "dsa_prefill" not in made["chosen"]  # a later row would hold, an earlier one might


@pytest.mark.parametrize(
    ("pair", "model", "flags", "outcome"),
    [
        ((12, 0), GLM, "", None),
        ((12, 0), GLM, "--kv-cache-dtype int8", "fails"),
        ((12, 0), FLASH, "", None),
        ((9, 0), V32, "", None),
        ((10, 0), V32, "", None),
        ((8, 9), V32, "", "fails"),
        ((12, 0), V4, "", "unknown"),
        ((12, 0), "who/knows", "", "unknown"),
        (None, V32, "", "unknown"),
    ],
)
def test_b01_vllm_refuses_with_every_objection(
    pair: tuple[int, int] | None, model: str, flags: str, outcome: str | None
) -> None:
    made = audit(cards(pair), StockRequest("vllm", f"serve {model} -tp 8 {flags}"))
    found = {row["id"]: row for row in made["rows"]}
    assert (found["attention"]["outcome"] if "attention" in found else None) == outcome
    if flags:
        assert "TRITON_MLA: it is not sparse" in found["attention"]["what"]
        assert "a cache of type int8" in found["attention"]["what"]


# collectives


@pytest.mark.parametrize("engine", ENGINES)
def test_b12_every_gate_that_closes_custom_all_reduce(engine: str) -> None:
    flag = "--tp" if engine == "sglang" else "-tp"

    def lost(count: int, facts: Facts, more: str = "") -> set[str]:
        found = outcomes(facts, engine, f"--model {V32} {flag} {count} {more}")
        return {name for name, how in found.items() if name.startswith("custom") and how == "loses"}

    nvlink = cards((9, 0), nvlink=True)
    assert lost(8, nvlink) == set() and lost(1, cards((12, 0))) == set()
    assert lost(4, cards((12, 0))) == {"custom-all-reduce"}
    assert lost(3, cards((12, 0))) == {"custom-all-reduce", "custom-all-reduce-ranks"}
    assert lost(3, nvlink) == {"custom-all-reduce-ranks"}
    assert lost(2, cards((12, 0), peers=False)) == {"custom-all-reduce-peers"}
    chunk = "--chunked-prefill-size" if engine == "sglang" else "--max-num-batched-tokens"
    edge = 8 * 1024 * 1024 // (7168 * 2)
    assert lost(2, cards((12, 0)), f"{chunk} {edge}") == set()
    assert lost(2, cards((12, 0)), f"{chunk} {edge + 1}") == {"custom-all-reduce-size"}
    assert lost(8, cards((12, 0)), "--disable-custom-all-reduce") == set()


def test_b12_what_is_unknown_of_links_is_not_decided() -> None:
    unlinked = with_facts(healthy(), devices=(card(capability=(8, 0)),) * 4, links=()).facts
    found = outcomes(unlinked, "sglang", f"--model-path {V32} --tp 4")
    assert found["custom-all-reduce"] == "unknown" and found["nccl-host"] == "unknown"


def test_b15_without_peers_nccl_goes_through_host_memory() -> None:
    def found(peers: bool) -> dict[str, str]:
        facts = cards((12, 0), peers=peers)
        return outcomes(facts, "vllm", f"--model {GLM} -tp 4")

    assert found(False)["nccl-host"] == "loses" and "nccl-host" not in found(True)


def test_b26_a_layout_that_the_machine_cannot_hold_fails() -> None:
    facts = cards((12, 0), count=4)
    assert outcomes(facts, "sglang", "--model-path x --tp 8")["ranks"] == "fails"
    assert "ranks" not in outcomes(facts, "sglang", "--model-path x --tp 4 --dp 4")
    assert outcomes(facts, "vllm", "--model x -tp 4 -dp 2")["ranks"] == "fails"


# chunks


@given(
    st.integers(1, 60_000),
    st.sampled_from([2048, 4096, 8192, 32768]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_b04_rows_after_division_against_a_loop(prompt: int, chunk: int, dp: int) -> None:
    rows_each, left, fast = chunk // dp, prompt, 0
    while left > 0:
        step = min(left, rows_each)
        fast += step if step >= chunks.THRESHOLD else 0
        left -= step
    assert chunks.fast_rows(prompt, chunk, dp) == fast
    (interval,) = [
        each
        for each in chunks.reached(chunk, dp)
        if each.low <= prompt and (each.high is None or prompt <= each.high)
    ]
    if interval.fast == "no chunk":
        assert fast == 0
    elif interval.fast == "every chunk":
        assert fast == prompt
    else:
        assert 0 < fast <= prompt and prompt - fast < chunks.THRESHOLD


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk", [2048, 4096, 8192, 32768])
def test_b04_a_divided_chunk_misses_the_threshold_and_the_advice_reaches_it(
    chunk: int, dp: int
) -> None:
    text = f"--model-path {GLM} --tp 8 --enable-dp-attention --dp {dp} --chunked-prefill-size {{}}"
    made = audit(cards((12, 0)), StockRequest("sglang", text.format(chunk)))
    row = next((r for r in made["rows"] if r["id"] == "chunk-threshold"), None)
    assert (row is not None) == (dp > 1 and chunk // dp < 8192)
    if row is not None:
        advised = row["what"].split("--chunked-prefill-size ")[1].split()[0]
        assert int(advised) == 8192 * dp
        again = audit(cards((12, 0)), StockRequest("sglang", text.format(advised)))
        assert not any(r["id"] == "chunk-threshold" for r in again["rows"])
        assert chunks.fast_rows(100_000, int(advised), dp) > 0


# memory


@pytest.mark.parametrize(
    ("model", "chunk", "context", "expected"),
    [
        (V32, 8192, 131072, 8192 * 131072 * 4),
        (V32, 2048, 131071, 0),  # just below a GiB
        (V32, 2048, 131072, 1 << 30),
        (V4, 8192, 131072, 1 << 30),  # a key for each 4 tokens
        (V4, 8192, 131068, 0),
        ("meta-llama/Llama-3-8B", 65536, 131072, 0),
    ],
)
def test_b19_scores_that_no_budget_counts(
    model: str, chunk: int, context: int, expected: int
) -> None:
    line = f"serve {model} --max-num-batched-tokens {chunk} --max-model-len {context}"
    made = audit(cards((12, 0)), StockRequest("vllm", line))
    (what,) = [r["what"] for r in made["rows"] if r["id"] == "indexer-transient"] or [""]
    assert (f"{expected:,} B" in what) if expected else what == ""
    assert "indexer-transient" not in outcomes(cards((12, 0)), "vllm", f"serve {V32}")


@pytest.mark.parametrize(
    ("limit", "outcome"), [(101_376, "loses"), (166_912, None), (232_448, None), (None, "unknown")]
)
def test_b02_default_tiles_against_the_cards_limit(limit: int | None, outcome: str | None) -> None:
    devices = (card(capability=(12, 0), shared_bytes_per_block=limit),) * 2
    facts = with_facts(healthy(), devices=devices).facts
    assert outcomes(facts, "sglang", f"--model-path {GLM}").get("tiles") == outcome


# tuned tables


def test_b07_a_table_is_found_by_the_full_name_only(tmp_path: Path) -> None:
    folder = tmp_path / "layers" / "configs" / "triton_3_6"
    folder.mkdir(parents=True)
    name = "E=256,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition"
    (folder / f"{name},dtype=fp8_w8a8,block_shape=[128, 128].json").touch()
    (folder / "E=256,N=512,device_name=NVIDIA_H200.json").touch()
    facts = {"experts": 256, "moe_intermediate": 2048, "tp": 8}
    chip = "NVIDIA RTX PRO 6000 Blackwell {} Edition"
    hit = moe_tables.search(facts, chip.format("Workstation"), tmp_path)
    assert hit is not None and hit.found is not None
    for other in ("Server", "Max-Q Workstation"):
        miss = moe_tables.search(facts, chip.format(other), tmp_path)
        assert miss is not None and miss.known and miss.found is None
        assert miss.near == ("NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition",)
    shorter = moe_tables.search(facts, "NVIDIA RTX PRO 6000", tmp_path)  # a prefix is no match
    assert shorter is not None and shorter.found is None
    other_size = moe_tables.search({**facts, "tp": 4}, "NVIDIA H200", tmp_path)
    assert other_size is not None and other_size.found is not None
    assert moe_tables.search({**facts, "experts": None}, "x", tmp_path) is None
    unseen = moe_tables.search(facts, "x", None)
    assert unseen is not None and not unseen.known


def test_b07_a_described_card_has_no_name_to_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"--model-path {V32} --tp 8"
    assert outcomes(find_machine("8x-l40s").facts, "sglang", line)["expert-tables"] == "unknown"
    here = with_facts(healthy(), origins={"devices.0": "probed: nvidia-smi"}).facts
    assert outcomes(here, "sglang", line)["expert-tables"] == "unknown"  # not installed
    monkeypatch.setattr(
        "metainfer.doctor.stock.audit.package_folder", lambda package: Path("/nowhere/at/all")
    )
    assert outcomes(here, "sglang", line)["expert-tables"] == "loses"
    described = find_machine("8x-l40s").facts
    assert outcomes(described, "sglang", line)["expert-tables"] == "unknown"


# command lines


def test_flags_in_every_spelling() -> None:
    text = 'python3 -m sglang.launch_server --model-path "a b" --tp=4 --dp_size 2 --tp 8'
    line = read_line("sglang", f"{text} --page-size 64")
    assert line.given == {"model": "a b", "tp": 8, "dp": 2, "page": 64}
    assert line.not_understood == ()
    assert read_line("vllm", "vllm serve org/m -tp 2 --enforce-eager").given == {
        "model": "org/m",
        "tp": 2,
        "no_graphs": True,
    }
    assert read_line("sglang", "--kv-cache-dtype auto").given == {}


def test_what_is_not_understood_is_listed_word_by_word() -> None:
    text = "--tp 2 --frobnicate 3 --x=5 --flag --host 0.0.0.0 extra more"
    line = read_line("sglang", text)
    assert line.not_understood == ("--frobnicate 3", "--x=5", "--flag", "more")
    assert line.given == {"tp": 2, "model": "extra"} and line.neutral == ("--host",)
    made = audit(cards((12, 0)), StockRequest("sglang", text))
    found = [f for f in made["findings"] if f.id == "stock.sglang.flag.unknown"]
    assert [f.where for f in found] == list(line.not_understood)
    assert made["not_understood"] == list(line.not_understood)
    assert "4 flags not understood" in made["summary"]


@pytest.mark.parametrize(
    ("engine", "text", "words"),
    [
        ("sglang", "--tp", "needs a value"),
        ("sglang", "--tp --dp 2", "needs a value"),
        ("vllm", "-tp two", "no whole number"),
        ("sglang", "--tp 'a", "cannot be read"),
        ("trt", "", "no audit for engine 'trt'"),
    ],
)
def test_bad_command_lines_are_usage_errors(engine: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        audit(cards((12, 0)), StockRequest(engine, text))


# models


def test_a_folder_overrules_a_name(tmp_path: Path) -> None:
    body: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "hidden_size": 96,
        "indexer_types": ["full", "shared"],
        "quantization_config": {"quant_algo": "NVFP4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(body))
    traits = recognise(str(tmp_path))
    assert traits.facts["family"] == "glm_dsa_shared" and traits.facts["hidden"] == 96
    assert traits.facts["weights"] == "nvfp4" and "config.json" in traits.how
    body["indexer_types"] = []
    del body["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(body))
    traits = recognise(str(tmp_path))
    assert traits.facts["family"] == "glm_dsa" and traits.facts["weights"] == "bf16"


def test_a_larger_sister_does_not_borrow_sizes() -> None:
    assert recognise("DeepSeek-V4-Pro").facts["hidden"] == 7168
    assert "experts" not in recognise("DeepSeek-V4-Pro").facts
    assert recognise("deepseek-v4.1-flash").facts["experts"] == 384


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (V32, "deepseek_v32"), ("random:deepseek-v3.2", "deepseek_v32"), ("GLM-5.1", "glm_dsa"),
        ("GLM-5.3", "glm_dsa_shared"), (FLASH, "glm_flash"), (V4, "deepseek_v4"),
        ("random:deepseek-v4-flash", "deepseek_v4"),
        ("deepseek-v4.1-flash", "deepseek_v41"),
        ("DeepSeek-V4-Pro", "deepseek_v4"), ("random:qwen3-8b", "dense"), ("x", None),
    ],
)  # fmt: skip
def test_names(name: str, family: str | None) -> None:
    assert recognise(name).facts.get("family") == family


def test_an_unknown_model_is_said_and_decides_nothing_by_itself() -> None:
    made = audit(cards((12, 0)), StockRequest("sglang", "--model-path who/knows --tp 8"))
    assert any(f.id == "stock.sglang.model.unknown" for f in made["findings"])
    assert {r["id"] for r in made["rows"] if r["outcome"] != "unknown"} == {
        "custom-all-reduce", "nccl-thresholds", "blackwell-constants",
    }  # fmt: skip


def test_variables_of_the_engine_count() -> None:
    environ = {"SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1", "VLLM_SKIP_P2P_CHECK": "1"}
    found = outcomes(cards((12, 0)), "sglang", f"--model-path {V32}", environ=environ)
    assert found["env-sglang-fp8-paged-mqa-logits-torch"] == "loses"
    assert not any("vllm" in name for name in found)
    environ["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] = "0"
    assert not any(
        n.startswith("env-") for n in outcomes(cards((12, 0)), "sglang", "", environ=environ)
    )


# the whole


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", (*SHIPPED, UNKNOWN))
def test_every_shipped_machine_is_audited(name: str, engine: str) -> None:
    flag = "--tp 8" if engine == "sglang" else "-tp 8"
    document = report.doctor(machine=name, stock=StockRequest(engine, f"--model {V32} {flag}"))
    json.dumps(document)
    audited: Any = document["audit"]
    found: Any = document["findings"]
    for finding in found:
        if finding["id"].startswith("stock."):
            assert finding["evidence"] and finding["what"]
    for row in audited["rows"]:
        assert row["origin"] and row["evidence"] and row["ours"]
    assert report.exit_status(document) == int(any(f["severity"] == "blocker" for f in found))
    if name == UNKNOWN:  # nothing is known of the card, so nothing is claimed
        assert {row["outcome"] for row in audited["rows"]} - {"note"} == {"unknown"}


def test_blockers_of_the_stock_engine_are_graded() -> None:
    made = audit(cards((12, 0)), StockRequest("sglang", f"--model-path {V32} --tp 8"))
    grades = {f.id: f.severity for f in made["findings"]}
    assert grades["stock.sglang.attention-decode"] is Severity.BLOCKER
    assert grades["stock.sglang.custom-all-reduce"] is Severity.SLOWS
    assert grades["stock.sglang.indexer-old"] is Severity.INFORMATION
    planned = next(f for f in made["findings"] if f.id == "stock.sglang.custom-all-reduce")
    assert "(designed, not built yet)" in planned.remedy


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from metainfer.cli import main

    base = ["doctor", "--machine", "8x-rtx-pro-6000d"]
    line = ["--engine", "sglang", "--engine-args", f"--model-path {V32} --tp 8 --wonder"]
    assert main.run([*base, *line]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "it chooses trtllm, which has no kernel here" in shown and "--wonder" in shown
    assert main.run([*base, *line, "--json"]) == 1
    assert main.run([*base, "--engine", "vllm", "--engine-args", f"--model {GLM} -tp 8"]) == 0
    assert main.run([*base, "--engine-args", "--tp 8"]) == 2
    assert main.run([*base, "--engine", "trt"]) == 2
    assert main.run([*base, "--engine", "sglang", "--engine-args", "--tp x"]) == 2
