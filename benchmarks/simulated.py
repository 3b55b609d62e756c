"""Simulated beside measured on this machine: calibrate, serve three loads, compare; 15 minutes.

    python benchmarks/simulated.py [--model smollm2-135m] [--repeats 3] [--out FILE]

For an idle machine: the load average stands in the document, before and after. The prediction that
it judges is in docs/log.md: throughput and first tokens (p50, p95) within 15 % or twice the
measured half range. Exit code 1 where a figure is off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOADS = (
    "closed:concurrency=4,requests=24,prompt=60-140,output=40",
    "poisson:rate=1,requests=24,prompt=60-140,output=30",
    "shared:concurrency=2,requests=20,prefix=256,groups=2,prompt=32,output=32",
)
JUDGED = ("output_tok_s", "ttft_s.p50", "ttft_s.p95")
CONTEXT = "2048"


def metainfer(*words: str, ok: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """What ``metainfer WORDS --json`` prints.

    Raises:
        SystemExit: it ended otherwise.
    """
    command = [sys.executable, "-m", "metainfer", *words, "--json"]
    print("metainfer", *words, file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in ok:
        raise SystemExit(f"metainfer {' '.join(words)} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(model: str, repeats: int) -> dict[str, Any]:
    """Calibrate once, then each load: measured, simulated, and the error of each figure."""
    before = os.getloadavg()[0]
    calibrated = metainfer("bench", "calibrate", model, "--context", CONTEXT)
    rows = []
    for load in LOADS:
        words = ("--context", CONTEXT, "--workload", load, "--repeats", str(repeats))
        measured = metainfer("bench", "serve", model, *words)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "measured.json"
            path.write_text(json.dumps(measured))
            simulated = metainfer(
                "simulate", "--model", model, "--context", CONTEXT, "--compare", str(path),
                ok=(0, 1),
            )  # fmt: skip
        rows.append({"load": load, "comparison": simulated["comparison"], "measured": measured})
    return {
        "model": model,
        "load_average": [before, os.getloadavg()[0]],
        "calibration": calibrated,
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None and (given.out.is_dir() or not given.out.parent.is_dir()):
        parser.error(f"{given.out} is no file that can be written")
    document = measure(given.model, given.repeats)
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1))
    off = 0
    for row in document["rows"]:
        print(row["load"])
        for key, each in row["comparison"].items():
            judged = key in JUDGED
            off += judged and not each["ok"]
            mark = "" if each["ok"] else "  OFF" if judged else "  (not judged)"
            print(
                f"  {key:<14} simulated {each['simulated']:>9.4g}  measured "
                f"{each['measured']:>9.4g}  {each['error']:+.0%} (allowed "
                f"{each['allowed']:.0%}){mark}"
            )
    found = document["calibration"]["calibration"]
    print(f"a request {found['request_s'] * 1e3:.2f} ms, a token {found['token_s'] * 1e3:.3f} ms")
    print(f"load average {document['load_average'][0]:.1f} to {document['load_average'][1]:.1f}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
