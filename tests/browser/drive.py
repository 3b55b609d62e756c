"""The live page in a real browser, over a real model under load: ``make browser``.

Needs Debian's `chromium`, node and the npm registry; not part of `make test`. Writes `result.json`
here, and with ``--pictures`` the pictures in `docs/images`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEY = "sésame"
PACKAGES = ("playwright-core@1", "axe-core@4")
ASKS = (
    "Write a short story about a lighthouse keeper.",
    "List the planets and one fact about each.",
    "Explain how a switch works.",
    "Count from one to forty in words.",
)


@contextmanager
def served(command: list[str]) -> Iterator[str]:
    """The URL of a server that is ready; it is stopped at the end."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            if told.get("engine") != -1:
                yield str(told["url"])
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(30)


def load(url: str, seed: int, until: threading.Event) -> None:
    """One client that asks again and again."""
    rng = random.Random(seed)
    system = "You are the careful guide of a museum of machines. " * 6
    while not until.is_set():
        turns = [
            {"role": "system", "content": system},
            {"role": "user", "content": rng.choice(ASKS)},
        ]
        body = {"model": "smollm2-135m", "messages": turns, "max_tokens": rng.randint(30, 120)}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=300).read()
        until.wait(rng.uniform(0, 6))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--warm", type=float, default=60.0, help="seconds of load before looking")
    options = parser.parse_args()
    digest = page_digest()
    metainfer = [sys.executable, "-m", "metainfer", "serve", "smollm2-135m", "--json"]
    fake = [sys.executable, str(ROOT / "tests" / "server" / "serve_fake.py"), "0", "--key", KEY]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", *PACKAGES]
        subprocess.run(npm, cwd=folder, check=True)
        shutil.copy(HERE / "live_page.mjs", folder)
        stop = threading.Event()
        with (
            served([*metainfer, "--port", "0", "--context", "2048", "--draft", "ngram:3"]) as url,
            served(fake) as locked,
        ):
            clients = [threading.Thread(target=load, args=(url, n, stop)) for n in range(6)]
            for client in clients:
                client.start()
            time.sleep(options.warm)
            node = ["node", "live_page.mjs", url, locked, KEY, str(folder)]
            done = subprocess.run(node, cwd=folder, capture_output=True, text=True)
            stop.set()
            for client in clients:
                client.join()
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        about = {"commit": commit, "date": time.strftime("%Y-%m-%d"), "page": digest}
        result = about | json.loads(done.stdout)
        if options.pictures:
            keep(folder, ROOT / "docs" / "images")
    (HERE / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    failed = [row for row in result["checks"] if not row["passed"]]
    for row in failed:
        print(f"FAILED {row['check']}: {row['seen']}")
    print(f"{len(result['checks']) - len(failed)} of {len(result['checks'])} checks passed")
    return 1 if failed else 0


def page_digest() -> str:
    """Of the page's files, so that a result tells which page it is of."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "metainfer" / "server" / "page").iterdir()):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def keep(folder: Path, images: Path) -> None:
    """Take the pictures over."""
    images.mkdir(exist_ok=True)
    for picture in folder.glob("page-*.png"):
        shutil.copy(picture, images / f"live-{picture.name}")
        os.chmod(images / f"live-{picture.name}", 0o644)


if __name__ == "__main__":
    sys.exit(main())
