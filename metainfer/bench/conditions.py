"""What a number must carry to be comparable: machine, software, commit, plan, command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from metainfer import __version__
from metainfer.core.plan import Plan
from metainfer.platform import software


def conditions(plan: Plan) -> dict[str, object]:
    """The conditions of a run of `plan`, taken now. What cannot be read is None."""
    return {
        **surroundings(),
        "machine": plan.machine,
        "device": plan.device,
        "threads": plan.threads,
        "plan": plan.fingerprint,
        "ops": {site: op.impl for site, op in plan.ops.items()},
        "text_class": "random token ids",
        "cached_tokens": 0,
    }


def surroundings() -> dict[str, object]:
    """What does not depend on a plan: time, command, versions, how busy the machine is."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["metainfer", *sys.argv[1:]]),
        "version": __version__,
        "commit": commit(),
        "software": software.versions(),
        "load_average": os.getloadavg()[0],
    }


def commit() -> str | None:
    """The commit of the source tree, with ``+dirty`` when it differs; None outside one."""
    root = Path(__file__).resolve().parents[2]
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
