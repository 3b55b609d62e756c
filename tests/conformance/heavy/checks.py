"""Runs the checks of one tool and writes what they found. Standard library only: it is imported in
the tool's own environment."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

URL = os.environ.get("CHECK_URL", "")
MODEL = os.environ.get("CHECK_MODEL", "")
TOKENIZER = os.environ.get("CHECK_TOKENIZER", "")
PYTHON = os.environ.get("CHECK_PYTHON", "")


def run(names: Mapping[str, Any]) -> None:
    """Call every function of `names` called ``check_*``; results go to ``CHECK_OUT``."""
    found = []
    for name, check in names.items():
        if name.startswith("check_") and callable(check):
            found.append(_one(name.removeprefix("check_"), check))
            mark = "ok" if found[-1]["passed"] else "FAILED"
            print(f"{mark:6s} {found[-1]['name']} ({found[-1]['seconds']} s)", flush=True)
    Path(os.environ["CHECK_OUT"]).write_text(json.dumps(found))


def _one(name: str, check: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"name": name, "shows": " ".join((check.__doc__ or "").split())}
    began = time.monotonic()
    try:
        said = check()
        result["passed"] = True
        if said is not None:
            result["said"] = said
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is a failed check
        traceback.print_exc()
        result |= {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
    result["seconds"] = round(time.monotonic() - began, 1)
    return result
