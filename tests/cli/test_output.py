"""With --json, nothing but the document reaches standard output."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, subprocess, sys
from metainfer.cli.output import Output, Result
out = Output("--json" in sys.argv)
with out.guard():
    print("a print")
    os.write(1, b"a library\\n")
    subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
    code = out.finish(Result({"answer": "é"}, "text for people", 1))
    if out.as_json:
        out.document({"second": True})
sys.exit(code)
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True)


def test_everything_else_goes_to_standard_error() -> None:
    done = run("--json")
    assert done.returncode == 1
    assert done.stdout == '{"answer": "é"}\n'
    assert sorted(done.stderr.splitlines()) == ["a child", "a library", "a print"]


def test_without_json_the_text_is_printed() -> None:
    done = run()
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "text for people" and done.stderr == ""
