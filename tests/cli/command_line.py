"""Run the command line in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def environ(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("METAINFER_")}
    return kept | extra


def cli(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "metainfer.cli.main", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environ(**extra), input=""
    )


def fake(
    *words: str, engine: tuple[str, ...] = (), stdin: str = "", **extra: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "run_fake.py"), *engine, "--", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environ(**extra), input=stdin
    )


def document(done: subprocess.CompletedProcess[str]) -> Any:
    """The one JSON document on standard output."""
    assert done.stdout.count("\n") == 1, done.stdout
    return json.loads(done.stdout)
