"""Finding processes by a mark in their command line, and a parent program that is made to die."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

#: Spawns a child with four kinds of descendants; every one carries the mark in its arguments.
FAMILY = """
import subprocess, sys, time
from metainfer.workers.process import spawn
role, mark = sys.argv[1:3]
here = [sys.executable, "-c", sys.argv[3]]
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", mark]
if role == "parent":
    spawn([*here, "child", mark, sys.argv[3]])
else:
    if role == "child":
        spawn([*here, "nested", mark, sys.argv[3]])
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    two = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
    subprocess.Popen([sys.executable, "-I", "-S", "-c", two, *sleep])
print(role, flush=True)
time.sleep(600)
"""


def children() -> set[int]:
    """Ids of this process's own children, those that have ended and wait to be collected too."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(word) for each in lists for word in each.read_text().split()}


def marked(mark: str) -> list[int]:
    """Ids of running processes (zombies aside) with `mark` among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in words and state != "Z":
            found.append(int(folder.name))
    return found


def eventually(test: Callable[[], bool], timeout_s: float = 120.0) -> bool:
    """Poll `test` until it holds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if test():
            return True
        time.sleep(0.01)
    return test()
