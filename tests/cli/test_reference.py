"""Every flag has help, a group and an example; the reference page is what the code says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_line import cli, document

from metainfer.cli import help_text, reference, vllm_names
from metainfer.cli.config import EXAMPLES, example
from metainfer.cli.declared import Verb, Verbs
from metainfer.cli.main import build
from metainfer.core.errors import UsageError

APP = build()
VERBS = Verbs(APP)
PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
ALL = [(verb, flag) for verb in VERBS.values() for flag in verb.flags]


def test_the_page_is_current() -> None:
    """`python -m metainfer.cli.reference > docs/cli.md`"""
    assert PAGE.read_text() == reference.text()


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_every_flag_has_help_a_group_and_an_example_that_is_taken(verb: Verb) -> None:
    words = [*verb.chain, *(next(iter(each.choices), "x") for each in verb.arguments)]
    for flag in verb.flags:
        assert flag.help, flag.name
        assert flag.group, flag.name
        shown = example(flag)
        assert shown is not None, f"give {flag.name} a row in cli/config.py EXAMPLES"
        if flag.name != "--model" or not verb.arguments:
            words += shlex.split(shown)
    APP.parse_args(words, exit_on_error=False, print_error=False)


def test_no_example_is_left_over() -> None:
    assert set(EXAMPLES) <= {flag.name for _, flag in ALL}


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_every_verb_has_a_text_and_an_example_that_parses(verb: Verb) -> None:
    assert verb.text
    assert verb.example.startswith(f"metainfer {verb.name}")
    words = shlex.split(verb.example.split(" > ")[0])[1:]
    APP.parse_args(words, exit_on_error=False, print_error=False)


def test_help_is_searched() -> None:
    found = cli("--help", "prefix").stdout
    assert "--no-prefix-cache" in found and "--enable-prefix-caching of vLLM" in found
    assert "--port" not in found
    assert cli("serve", "--help=port").stdout.startswith("--port INT")
    everything = cli("--help", "all").stdout
    for verb, flag in ALL:
        assert flag.name in everything and f"metainfer {verb.name}: " in everything
    assert len(re.findall(r"^  Example: ", everything, re.MULTILINE)) == len(VERBS)
    missed = cli("--help", "contxt")
    assert missed.returncode == 2 and "Did you mean --context?" in missed.stderr
    assert "--max-model-len" in help_text.answer((), "max-model-len", VERBS)
    with pytest.raises(UsageError):
        help_text.answer(("serve",), "no such thing", VERBS)


def test_explain_says_what_it_is_and_who_set_it(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("\n\ncontext = 99\n")
    words = ["serve", "m", "--config", str(path)]
    found = document(cli("config", "explain", "context", *words, "--json"))
    assert (found["effective"], found["origin"]) == ("99", "file")
    assert found["set_by"] == f"--config {path} line 3"
    assert (found["vllm"], found["decision"]) == (["--max-model-len"], "limits.max_context")
    text = cli("config", "explain", "--port").stdout
    assert "default      8000" in text
    alias = cli("config", "explain", "-tp").stdout
    assert alias.startswith("--tensor-parallel-size, -tp is vLLM's spelling of --parallel.")
    assert "refused" in cli("--help", "quantization").stdout
    missing = cli("config", "explain", "contxt")
    assert missing.returncode == 2 and "Did you mean --context?" in missing.stderr


def test_show_hides_keys() -> None:
    done = cli(
        "config", "show", "serve", "m", "--api-key", "hunter2", METAINFER_ADMIN_KEY="hunter3"
    )
    assert "hunter" not in done.stdout + done.stderr
    assert done.stdout.count("(secret)") == 2
    assert "the environment's METAINFER_ADMIN_KEY" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    done = cli("completion", shell)
    assert done.returncode == 0 and "metainfer" in done.stdout
    assert "priority-order" in done.stdout


def test_the_package_runs_as_a_module() -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "metainfer", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == cli("--version").stdout


def test_equals_is_the_inverse_of_the_table() -> None:
    for alias in vllm_names.ALIASES:
        if alias.ours:
            assert set(alias.names) <= set(vllm_names.equals(alias.ours))
