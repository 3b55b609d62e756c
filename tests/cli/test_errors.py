"""User errors: one line with cause and remedy, the right exit code, JSON on request."""

from __future__ import annotations

import socket

import pytest
from command_line import cli, document, fake

CASES: list[tuple[list[str], int, str]] = [
    (["serv"], 2, "serve"),
    (["serve", "m", "--prot", "1"], 2, "--port"),
    (["generate"], 2, "See metainfer generate --help"),
    (["generate", "m"], 2, "--prompt"),
    (["serve", "m", "--port", "x"], 2, "--port"),
    (["serve", "m", "--port", "70000"], 2, "70000"),
    (["serve", "m", "--max-pending", "0"], 2, "--max-pending"),
    (["generate", "m", "--prompt", "x", "--context", "0"], 2, "--context"),
    (["generate", "m", "--prompt", "x", "--kv-memory", "lots"], 2, "24GiB"),
    (["generate", "m", "--prompt", "x", "--op", "linear"], 2, "KEY=VALUE"),
    (["generate", "m", "--prompt", "x", "--op", "a=b", "--op", "a=c"], 2, "twice"),
    (["generate", "m", "--prompt", "x", "--dtype", "fp7"], 2, "float32"),
    (["generate", "m", "--prompt", "x", "--max-tokens", "0"], 2, "--max-tokens"),
    (["generate", "m", "--prompt", "x", "--temperature", "-1"], 2, "--temperature"),
    (["generate", "m", "--prompt", "x", "--top-p", "2"], 2, "--top-p"),
    (["generate", "m", "--prompt", "x", "--context", "0"], 2, "--context: it must be"),
    (["plan"], 2, "--model"),
    (["kernels", "lst"], 2, "list"),
    (["plan", "--model", "no-such-model-xyz"], 1, "Catalogue"),
    (["plan", "--model", "/no/such/folder"], 1, "/no/such/folder"),
    (["version", "surplus"], 2, "surplus"),
    (["bench", "ladder", "m", "--prefill-tokens", "-5"], 2, "--prefill-tokens is -5. Pass 0"),
]


@pytest.mark.parametrize(("words", "code", "hint"), CASES)
def test_one_line_with_remedy(words: list[str], code: int, hint: str) -> None:
    done = cli(*words)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert hint in lines[0], lines[0]


@pytest.mark.parametrize("words", [CASES[0][0], CASES[1][0], CASES[8][0], CASES[18][0]])
def test_errors_are_documents_with_json(words: list[str]) -> None:
    done = cli(*words, "--json")
    error = document(done)["error"]
    assert error["code"] and error["cause"] and error["remedy"]
    assert done.returncode in (1, 2)


def test_unknown_environment_names_are_refused() -> None:
    done = cli("version", METAINFER_PLATFROM="cpu")
    assert done.returncode == 2
    assert "METAINFER_PLATFORM" in done.stderr and done.stderr.count("\n") == 1
    assert cli("version", METAINFER_LOG="loud").returncode == 2
    assert cli("version", METAINFER_LOG="debug").returncode == 0


def test_engine_errors_pass_through() -> None:
    done = fake("generate", "m", "--prompt", "x", engine=("--refuse",))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: Nothing fits. Lower --context."
    dead = fake("generate", "m", "--prompt", "x", "--json", engine=("--die-at", "3"))
    assert dead.returncode == 1
    assert document(dead)["error"]["code"] == "engine_dead"
    long = fake("generate", "m", "--prompt", "x" * 2048)
    assert long.returncode == 1 and "2048" in long.stderr
    assert "Traceback" not in done.stderr + dead.stderr + long.stderr


def test_port_in_use_is_told_before_loading() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = fake("serve", "m", "--port", port, "--json", engine=("--hang-at-start",))
    assert done.returncode == 1
    assert document(done)["error"]["code"] == "port_in_use"
