"""Sections of a benchmark in processes of their own, each with a time limit: what one has written
is kept when the rest of it does not come.

The section's process calls `keep` as it goes; its parent calls `child`, which takes the last of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def keep(out: Path, number: int, report: Report) -> None:
    """What section `number` has so far, whole or as it was: its process may be ended any time."""
    beside = out / f".{number}.part"
    beside.write_text(json.dumps(report, indent=1, default=str))
    os.replace(beside, out / f".{number}.json")


def child(
    section: str, out: Path, number: int, limit: float, environ: Mapping[str, str] | None = None
) -> Report:
    """This script's command with ``--section`` behind it, ended after `limit` seconds; what it says
    is in ``out/<number>.log`` as it goes: who ends us wants to know."""
    command = [sys.executable, *sys.argv, "--section", section]
    begin, failed = time.monotonic(), ""
    heard, part = out / f"{number}.log", out / f".{number}.json"
    part.unlink(missing_ok=True)  # of a run before
    with (
        heard.open("w") as said,
        subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **(environ or {})}
        ) as running,
    ):
        try:
            running.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            failed = f"no end after {limit:.0f} s"
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(timeout=10)
            except subprocess.TimeoutExpired:
                running.kill()
    found: Report = json.loads(part.read_text()) if part.exists() else {}
    part.unlink(missing_ok=True)
    if running.returncode and not failed:
        failed = f"status {running.returncode}"
    if failed:
        found |= {"failed": failed, "said": heard.read_text(errors="replace")[-3000:]}
    return found | {"section_s": round(time.monotonic() - begin, 1)}


def wrong_in(found: Any) -> list[str]:
    """Every ``wrong`` and ``failed`` below `found`."""
    if isinstance(found, list):
        return [text for each in found for text in wrong_in(each)]
    if not isinstance(found, dict):
        return []
    wrong = [found["failed"]] if "failed" in found else []
    wrong += found.get("wrong", [])
    return wrong + [
        text for key, each in found.items() if key != "wrong" for text in wrong_in(each)
    ]
