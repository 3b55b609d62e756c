"""vLLM's spellings: mapped and told, already so and told, or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from command_line import cli, document
from hypothesis import given
from hypothesis import strategies as st

from metainfer.cli import settings, vllm_names
from metainfer.cli.declared import Verbs
from metainfer.cli.main import build
from metainfer.core.errors import UsageError
from metainfer.planner.layouts import enumerate_layouts

APP = build()
VERBS = Verbs(APP)


def gather(*words: str) -> settings.Settings:
    return settings.gather(words, VERBS)


def engine(words: Sequence[str]) -> Any:
    """The engine's flags as the parser leaves them."""
    _, bound, _ = APP.parse_args(words, exit_on_error=False, print_error=False)
    return bound.arguments["engine"]


MAPPED = [
    (["--max-model-len", "99"], "context", 99),
    (["--max-model-len=32k"], "context", 32000),
    (["--max_model_len", "2K"], "context", 2048),
    (["--max-num-seqs", "3"], "concurrency", 3),
    (["--max-num-batched-tokens", "64"], "chunk_tokens", 64),
    (["--block-size", "8"], "page_tokens", 8),
    (["--gpu-memory-utilization", "0.9"], "memory_share", 0.9),
    (["--no-enable-prefix-caching"], "no_prefix_cache", True),
    (["--tensor-parallel-size", "8"], "parallel", "tp8"),
    (["-tp", "2", "-dp", "4"], "parallel", "4xtp2"),
    (["-tp", "2", "-dp", "4", "-ep"], "parallel", "tp2ep8"),
    (["-tp=8", "--enable-expert-parallel"], "parallel", "tp8ep8"),
    (["-dp", "8"], "parallel", "8x"),
    (["-tp", "1"], "parallel", "single"),
    (["--dtype", "half"], "dtype", "float16"),
    (['--speculative-config={"method":"mtp","num_speculative_tokens":1}'], "draft", "mtp:1"),
    (["--speculative-config", '{"method": "ngram"}'], "draft", "ngram"),
    (["--guided-decoding-backend", "guidance"], "grammar_backend", "llguidance"),
]


@pytest.mark.parametrize(("words", "field", "value"), MAPPED)
def test_mapped_with_its_value_and_told(words: list[str], field: str, value: object) -> None:
    made = gather("generate", "m", "--prompt", "x", *words)
    assert getattr(engine(made.words), field) == value
    assert words[0].startswith("--dtype") or len(made.notes) == 1, made.notes
    flags = [f for f, item in made.given.items() if f != "--prompt"]
    assert len(flags) == 1
    note = made.notes[0] if made.notes else f"{flags[0]} here"
    assert flags[0] in note and note.endswith("here")


def test_adapters_are_named_as_vllm_names_them() -> None:
    """Repeated, beside our own flag, and as JSON."""
    told = '{"name": "law", "path": "/l", "base_model_name": "m"}'
    words = ["--lora-modules", "sql=/s", "--lora-modules", told, "--adapter", "tax=/t"]
    made = gather("serve", "m", *words, "--enable-lora", "--max-lora-rank", "64")
    _, bound, _ = APP.parse_args(made.words, exit_on_error=False, print_error=False)
    assert bound.arguments["adapter"] == ("sql=/s", "law=/l", "tax=/t")
    assert [note for note in made.notes if "--adapter" in note]


def test_several_at_once_keep_their_notes() -> None:
    made = gather("serve", "m", "-tp", "4", "--max-model-len", "64", "-dp", "2", "--port", "1")
    assert made.notes == [
        "--max-model-len is --context here",
        "-tp 4 -dp 2 are --parallel 2xtp4 here",
    ]
    assert made.words == [
        "serve", "m", "--context", "64", "--port", "1", "--parallel", "2xtp4",
    ]  # fmt: skip


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_parallel_names_are_names_of_layouts(tensor: int, data: int, expert: bool) -> None:
    parts = {"tensor": str(tensor), "data": str(data)} | ({"expert": ""} if expert else {})
    name = vllm_names.parallel(parts)
    (layout,) = [row for row in enumerate_layouts(tensor * data, 8) if row.name == name]
    assert (layout.tensor, layout.data) == (tensor, data)
    assert layout.expert == (tensor * data if expert and tensor * data > 1 else 1)


ALREADY = [
    ["--enable-auto-tool-choice"],
    ["--tool-call-parser", "hermes"],
    ["--reasoning-parser", "qwen3"],
    ["--enable-prefix-caching"],
    ["--kv-cache-dtype", "auto"],
    ["--pipeline-parallel-size", "1"],
    ["--max-model-len", "auto"],
    ["--trust-remote-code"],
    ["--enable-lora"],
    ["--max-loras", "4"],
    ["--max-lora-rank", "64"],
]


@pytest.mark.parametrize("words", ALREADY)
def test_what_is_so_already_says_so(words: list[str]) -> None:
    made = gather("serve", "m", *words)
    assert made.words == ["serve", "m"] and made.given == {}
    assert len(made.notes) == 1 and "nothing to set here" in made.notes[0]


def test_a_parser_names_the_forms_of_answers_that_are_expected() -> None:
    made = gather("serve", "m", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    assert made.answers == ("qwen3",)
    assert gather("serve", "m").answers == ()


REFUSED = [
    (["--quantization", "awq"], "headers"),
    (["-q", "fp8"], "headers"),
    (["--kv-cache-dtype", "fp8"], "latent-fp8@1"),
    (["--tool-call-parser", "mistral"], "hermes"),
    (["--pipeline-parallel-size", "2"], "only 1"),
    (["-tp", "x"], "no count"),
    (["-tp", "0"], "no count"),
    (["--speculative-config", '{"method":"eagle","num_speculative_tokens":3}'], "'eagle'"),
    (["--speculative-config", '{"method":"ngram","prompt_lookup_max":3}'], "prompt_lookup_max"),
    (["--speculative-config", "{"], "cannot be honoured"),
    (["--speculative-config", "[1]"], "no JSON object"),
    (["--speculative-config", '{"method":["a"]}'], "method"),
    (["--guided-decoding-backend", "outlines"], "xgrammar"),
    (["--cpu-offload-gb", "4"], "outside the device"),
    (["--max-model-len", "64", "--context", "32"], "both are given"),
    (["--parallel", "tp2", "-tp", "2"], "both are given"),
    (["--max-model-len"], "needs a value"),
    (["--lora-modules", '{"name": "sql"}'], "name and path"),
    (["--lora-modules", '{"name": "sql", "path": "/s", "rank": 4}'], "rank"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_refused_with_the_reason(words: list[str], reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        gather("serve", "m", *words)
    assert reason in str(caught.value) and caught.value.remedy


def test_values_are_not_taken_for_flags() -> None:
    made = gather("generate", "m", "--prompt", "--max-model-len", "--stop", "-tp")
    assert made.notes == []
    assert gather("serve", "m", "--", "--max-model-len").notes == []
    assert gather("kernels", "list", "-tp", "8").words == ["kernels", "list", "-tp", "8"]


def test_every_row_is_exactly_one_of_mapped_already_refused() -> None:
    names = [name for alias in vllm_names.ALIASES for name in alias.names]
    assert len(names) == len(set(names))
    flags = {name for verb in VERBS.values() for name in verb.by_name} | {vllm_names.MODEL}
    for alias in vllm_names.ALIASES:
        assert bool(alias.ours) + bool(alias.already) + bool(alias.refused) == 1, alias.name
        assert not alias.ours or alias.ours in flags, f"{alias.name} -> {alias.ours}"
        own = set(alias.names) & flags - {
            "--model"
        }  # a flag of some verbs, the first word of others
        assert not own, "a flag of ours needs no row"


def test_the_listed_spellings_are_all_understood() -> None:
    """serving.md 4.2."""
    listed = {
        "--tensor-parallel-size", "-tp", "--max-model-len", "--gpu-memory-utilization",
        "--served-model-name", "--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-dtype",
        "--enable-prefix-caching", "--api-key", "--chat-template", "--tool-call-parser",
        "--reasoning-parser", "--speculative-config", "--enable-auto-tool-choice", "--port",
    }  # fmt: skip
    ours = set(VERBS[("serve",)].by_name)
    assert listed <= ours | set(vllm_names.BY_NAME)


def test_from_the_outside() -> None:
    done = cli("config", "show", "serve", "m", "-tp", "8", "--json")
    rows = {row["flag"]: row for row in document(done)["values"]}
    assert rows["--parallel"]["value"] == "tp8" and rows["--parallel"]["origin"] == "flag"
    assert "(-tp 8)" in rows["--parallel"]["set_by"]
    plan = cli("plan", "--model", "random:tiny-llama", "--max-model-len", "64", "--json")
    decisions = {row["key"]: row for row in document(plan)["decisions"]}
    found = decisions["limits.max_context"]
    assert (found["value"], found["origin"]) == (64, "flag")
    assert "--max-model-len 64" in found["why"]
    assert "--max-model-len is --context here" in plan.stderr.splitlines()
    refused = cli("serve", "m", "--quantization", "awq", "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["code"] == "unsupported_flag"
    assert len(refused.stderr.splitlines()) == 1
    typo = cli("serve", "m", "--tensor-paralel-size", "8").stderr
    assert "Did you mean --tensor-parallel-size?" in typo
