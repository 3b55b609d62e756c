"""What a long run of layouts showed, as a record: written after each row when `RANK_RECORD` names
a file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from metainfer.bench.conditions import surroundings

_rows: list[dict[str, object]] = []


def keep(**row: object) -> None:
    """Another row of the record, if one is asked for."""
    named = os.environ.get("RANK_RECORD")
    if named is None:
        return
    _rows.append(row)
    asked = [f"{key}={os.environ[key]}" for key in ("RANK_REQUESTS",) if key in os.environ]
    command = " ".join([*asked, "pytest tests/e2e/test_ranks_answers.py -k change_no_token"])
    found = surroundings() | {"command": command, "cpus": os.cpu_count()}
    document = {"conditions": found, "rows": _rows, "ended": time.strftime("%FT%TZ", time.gmtime())}
    Path(named).write_text(json.dumps(document, indent=1) + "\n")
