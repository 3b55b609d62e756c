"""``run.py [TOOL ...] [--venv FOLDER]``: other people's tools against a real server on SmolLM2.

Exits 1 when a check failed. README.md says how a tool is described.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizer_folder

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
RESULTS = HERE.parent / "results"
MODEL = "smollm2-135m"
READY_S = 300.0


def tools() -> dict[str, Path]:
    """The tools that have a file here, by name."""
    return {path.stem.removeprefix("use_"): path for path in sorted(HERE.glob("use_*.py"))}


def literals(file: Path) -> dict[str, Any]:
    """The constants of a tool's file, read without importing it: what it imports is not here."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("REQUIRES", "BARE", "REPORTS", "SERVER", "PIP"):
                found[name] = ast.literal_eval(node.value)
    return found


def environment(folder: Path, told: dict[str, Any]) -> Path:
    """The Python of the tool's own environment in `folder`, made there if it is not."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {' '.join(told['REQUIRES'])}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*install, *told.get("PIP", ()), *told["REQUIRES"]], check=True)
        if "BARE" in told:
            subprocess.run([*install, "--no-deps", *told["BARE"]], check=True)
    return python


def versions(python: Path, packages: list[str]) -> dict[str, str]:
    """Installed versions of `packages`."""
    code = (
        "import json, sys; from importlib.metadata import version;"
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(python), "-c", code, *packages], check=True, capture_output=True, text=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@contextmanager
def server(folder: Path, flags: list[str]) -> Iterator[str]:
    """A server on SmolLM2, ready; its URL. Stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "metainfer.cli.main", "serve", MODEL, "--port", str(port)]
    command += ["--chat-template", str(HERE / "tools.jinja"), *flags]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
    try:
        if not _ready(url, process):
            sys.exit(f"the server did not become ready:\n{log.read_text()[-3000:]}")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    return False


def run(tool: str, venv: Path | None) -> bool:
    """Run the checks of `tool` and write the result; whether all passed."""
    file = tools()[tool]
    told = literals(file)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = environment(venv or folder / "venv", told)
        out = folder / "checks.json"
        tokenizer = tokenizer_folder.write(MODEL, folder / "tokenizer")
        commit = _commit()  # before the server: the tree may move on while it runs
        with server(folder, told.get("SERVER", [])) as url:
            given = {"CHECK_URL": url, "CHECK_MODEL": MODEL, "CHECK_OUT": str(out)}
            given |= {"CHECK_TOKENIZER": str(tokenizer), "CHECK_PYTHON": sys.executable}
            subprocess.run([str(python), str(file)], cwd=folder, env=os.environ | given)
        found = json.loads(out.read_text()) if out.exists() else []
        result = {
            "tool": tool,
            "versions": versions(python, told["REPORTS"]),
            "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "commit": commit,
            "model": MODEL,
            "server": told.get("SERVER", []),
            "passed": sum(check["passed"] for check in found),
            "failed": sum(not check["passed"] for check in found),
            "checks": found,
        }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / f"{tool}.json").write_text(text)
    print(f"{tool}: {result['passed']} passed, {result['failed']} failed", flush=True)
    return bool(found) and not result["failed"]


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = ", ".join(tools())
    parser.add_argument("tool", nargs="*", help=f"{known}; without one: all, in turn")
    parser.add_argument("--venv", type=Path, help="an environment to use, made if it is missing")
    options = parser.parse_args()
    wanted = options.tool or list(tools())
    if unknown := [tool for tool in wanted if tool not in tools()]:
        parser.error(f"there is no tool {unknown[0]!r}, there are {known}")
    if options.venv is not None and len(wanted) != 1:
        parser.error("--venv goes with one TOOL: tools do not share an environment")
    if shutil.which("git") is None:
        parser.error("git is needed: the result names the commit")
    passed = [run(tool, options.venv) for tool in wanted]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
