"""B-30: after ready nothing is loaded, compiled or used for the first time.

In a child process each, since earlier tests would have used everything already.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHILD = """
import ctypes, json, random, subprocess, sys
sys.path.insert(0, sys.argv[1])
from harness import ask, start
from metainfer.core.request import SamplingParams
from metainfer.executor.local import LocalExecutor

if sys.argv[2] == "cold":
    LocalExecutor.warm = lambda self, note=None: None
engine = start("random:tiny-mistral", context=256, chunk_tokens=64, concurrency=6)

used = []
def spy(module, name):
    real = getattr(module, name)
    def call(*args, **kwargs):
        used.append(f"{name} {args[:1]}")
        return real(*args, **kwargs)
    setattr(module, name, call)
spy(ctypes, "CDLL")
spy(subprocess, "Popen")
ours = lambda: {n for n in sys.modules if n.startswith(("metainfer.", "triton"))}
before = ours()

rng = random.Random(7)
prompts = [[rng.randrange(3, 300) for _ in range(n)] for n in (1, 3, 64, 65, 130, 200, 250)]
params = [
    SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=2, logprobs=2),
    SamplingParams(temperature=0.8, seed=1, top_k=5, top_p=0.9, min_p=0.01, max_tokens=20),
    SamplingParams(temperature=0.8, seed=2, presence_penalty=0.5, max_tokens=20),
    SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2, max_tokens=20),
    SamplingParams(temperature=0.8, seed=4, logit_bias={5: 3.0}, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=20, min_tokens=10),
    SamplingParams(temperature=0.0, max_tokens=6),
]
answers = ask(engine, prompts, params, eos=(0,))
assert all(answer.finish is not None and not answer.error for answer in answers)
print(json.dumps(used + sorted(ours() - before)))
"""


def first_uses(start: str) -> list[str]:
    """What a random workload within the limits uses for the first time after ready."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), start]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    listed: list[str] = json.loads(found.stdout.splitlines()[-1])
    return listed


def test_b30_no_first_use_after_ready() -> None:
    start_once = first_uses("warm")  # kernels that never ran here prove themselves at this start
    assert start_once == []


def test_b30_the_check_sees_first_uses() -> None:
    """Without the warm-up the same workload does use things for the first time."""
    assert first_uses("cold")
