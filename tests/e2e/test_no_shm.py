"""Two ranks start and answer where ``/dev/shm`` cannot be written, as in a small container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HOOK = """
import os, pathlib, sys

def deny(event, arguments):
    if event == "open" and str(arguments[0]).startswith("/dev/shm"):
        raise PermissionError(13, "denied by the test", str(arguments[0]))

sys.addaudithook(deny)
pathlib.Path(os.environ["SEEN"], str(os.getpid())).write_text("\\0".join(sys.orig_argv))
"""
READ_ONLY = 'mount -t tmpfs -o ro,size=4k none /dev/shm && exec "$@"'


def prefix() -> list[str]:
    """Where this process may, a mount of its own over the real one: libraries meet that too."""
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh"]
    try:
        done = subprocess.run([*command, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return []
    return command if done.returncode == 0 else []


def test_ranks_meet_where_dev_shm_cannot_be_written(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    words = ["--platform", "cpu", "--parallel", "tp2", "--prompt", "a b", "--max-tokens", "4"]
    command = [sys.executable, "-m", "metainfer", "generate", "random:tiny-llama", *words, "--json"]
    done = subprocess.run(
        [*prefix(), *command],
        env={**os.environ, "PYTHONPATH": path, "SEEN": str(seen)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 4
    ranks = [each for each in seen.iterdir() if "metainfer.workers.rank_main" in each.read_text()]
    assert len(ranks) >= 2  # they were held to it, too
