"""Tokens over two ranks: a dealt cache, adapters, drafts, and the kernels of dealt heads.

    python benchmarks/ranks_tokens.py --out FOLDER [--seconds 240] [--only SECTION ...]
        [--platform cuda] [--one-card]

Writes ``ranks_tokens.json`` after every section; each is a process of its own with a time limit,
and what it has when it is ended is kept. In this order, or as ``--only`` names them:

* ``dealt``: a small dense model of one KV head in float32 under `tp2` and `tp2cs2`, the latter with
  drafts from tokens seen before too; greedy tokens must be those of one card;
* ``adapters``: two adapters and none in one batch of Qwen3-8B's shapes, two layers, in float32:
  answers under `tp2`, `cp2/tp2` and `cp2/dp2` are those of one card, and a prompt's three differ;
* ``drafts``: a tiny DeepSeek-V4 with its draft layer, in float32 with its entries and index keys:
  what one card says without drafts is what it says with them, and what `tp2`, `cp2/tp2`, `ep2` and
  `cp2/dp2ep2` say;
* ``captured``: drafts as in ``drafts``, of a model in the published formats and in bfloat16, whose
  steps are captured. There a sum's last bit decides how an activation is rounded, so tokens that
  part are told and not judged; that some drafts are right is;
* ``ready``, by name alone: the engines of ``speed``, started and closed: their kernels are there;
* ``speed``: decode and prompts of a larger dense model of one KV head in bfloat16 under `tp2` and
  `tp2cs2`;
* ``kernels``: `attn_weigh` and `attn_paged_part` by their cases, then timed beside torch's form.

With ``--together`` sections that time nothing run at once, each with ranks of its own on the same
cards: they start slowly, for most of it is proving and compiling. With ``--one-card`` all ranks are
on the first card, by time slices, which says whether tokens are right and nothing of time.

Ranks meet in the host's memory. Tokens of random weights in float32 lie as a rule far enough apart
for sums in another order; where an answer differs, the report says at which token, and how far the
scores of those before it were apart. With ``--platform cpu`` all of it runs on a host at small
shapes, which tests the script. Exit status 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ranks_models as models
import sections
import torch
from gpu_check import decode_seconds, prefill_seconds, row
from ranks_kernels import kernels
from sections import Report, wrong_in

from metainfer.core.env import cache_dir
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine.engine import Engine

LIMITS = {
    "dealt": 110.0, "adapters": 170.0, "drafts": 170.0, "captured": 170.0, "ready": 110.0,
    "speed": 110.0, "kernels": 60.0,
}  # fmt: skip
USUAL = [name for name in LIMITS if name != "ready"]
ALONE = ("speed", "kernels")
"""Sections that time."""
DEALT = ("tp2", "tp2cs2")
ADAPTED = ("tp2", "cp2/tp2", "cp2/dp2")
DRAFTED = ("tp2", "cp2/tp2", "ep2", "cp2/dp2ep2")
DEPTH = 3
BAR_NATS = 1e-3
"""Float32 sums in another order leave a hundredth of it."""
SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 256,
    "max_position_embeddings": 4096,
}  # fmt: skip
LARGE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 32768,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is asked on a platform. `rows`: (batch, context) of decode; `adapted`: the model that
    adapters stand beside, `rank` and `size`: of their pairs."""

    prompts: tuple[int, ...]
    tokens: int
    rows: tuple[tuple[int, int], ...]
    prefill: int
    chunk: int
    context: int
    kv_bytes: int
    large: dict[str, int]
    adapted: str
    rank: int
    size: float


SIZES = {
    "cuda": Sizes(
        (200, 650, 310, 420, 530, 275), 16, ((1, 4096), (8, 4096), (8, 16384), (32, 4096)), 8192,
        8192, 20480, 5 << 28, LARGE, "random:qwen3-8b?layers=2", 16, 0.05,
    ),
    "cpu": Sizes(
        (40, 130, 62), 8, ((1, 64), (2, 96)), 96, 128, 384, 1 << 24,
        {**SMALL, "num_hidden_layers": 2}, "random:tiny-llama", 4, 0.2,
    ),
}  # fmt: skip


@dataclass
class Answer:
    """Tokens of a request, and the log-probability of each."""

    tokens: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)


@contextmanager
def started(args: argparse.Namespace, model: str | Path, **wish: Any) -> Iterator[Engine]:
    """An engine of `model`; several ranks meet in the host's memory."""
    ranks = wish.get("parallel", "single") != "single"
    if args.platform == "cuda" and ranks:
        wish |= {"collectives": "host", "one_card": args.one_card}
    given = {"platform": args.platform, "parallel": "single", "prefix_cache": False, **wish}
    engine = Engine(Intent(model=str(model), **given))
    if args.platform == "cuda":
        torch.cuda.empty_cache()  # what one card had before
    begin = time.monotonic()
    engine.start()
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in engine._phases)
    print(f"  {wish}: ready after {time.monotonic() - begin:.1f} s: {phases}", flush=True)
    try:
        yield engine
    finally:
        engine.close()


def prompts_of(lengths: Sequence[int], vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(20, vocab, (n,), generator=generator).tolist() for n in lengths]


def ask(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, adapters: Sequence[str] = ()
) -> list[Answer]:
    """Greedy answers of `tokens` tokens to prompts that come at once."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    found: dict[str, Answer] = {}
    for number, prompt in enumerate(prompts):
        name = adapters[number] if adapters else ""
        found[f"a{number}"] = Answer()
        engine.submit(Request(f"a{number}", tuple(prompt), params, adapter=name))
    while engine.has_work:
        for output in engine.step()[0]:
            answer = found[output.request_id]
            answer.tokens += output.tokens
            answer.logs += [each.logprob for each in output.logprobs]
    return list(found.values())


def agreement(found: Sequence[Answer], wanted: Sequence[Answer]) -> Report:
    """How many answers have all tokens of those wanted; where the others part, and how far the
    scores of equal tokens are apart."""
    parted, worst = [], 0.0
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        at = same_tokens(mine.tokens, theirs.tokens)
        gaps = [abs(a - b) for a, b in zip(mine.logs[:at], theirs.logs[:at], strict=True)]
        worst = max([worst, *gaps])
        if at < len(theirs.tokens) or len(mine.tokens) != len(theirs.tokens):
            parted.append(f"answer {number} parts at token {at}")
    wrong = parted + ([f"scores are {worst:.1e} nats apart"] if worst > BAR_NATS else [])
    return {
        "answers": len(wanted), "same": len(wanted) - len(parted), "worst_nats": worst,
        "wrong": wrong,
    }  # fmt: skip


class Wanted:
    """What one card says; where that part raised, others have nothing to be judged by."""

    def __init__(self) -> None:
        self._answers: list[Answer] | None = None

    def judge(self, found: list[Answer], first: bool) -> Report:
        """`agreement` with the first part's answers, which these are where they are `first`."""
        if first:
            self._answers = found
        if self._answers is None:
            return {"unjudged": "no answers of one card to compare with", "wrong": []}
        return agreement(found, self._answers)


def same_tokens(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Leading tokens that are the same."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(mine), len(theirs)))


def about(engine: Engine) -> Report:
    """What a plan chose for attention, what it captured and holds, what ranks have sent."""
    assert engine.resolved is not None
    plan, executor = engine.resolved.plan, engine._executor
    moved: Any = getattr(executor, "moved_bytes", None) or {}
    stats = engine.stats()
    return {
        "attention": {key: op.impl for key, op in plan.ops.items() if key.startswith("attn")},
        "captured": sorted({f"{each.phase} {each.tokens}" for each in plan.graphs}),
        "kv_tokens": plan.kv_tokens,
        "moved_bytes": dict(moved),
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_drafts,
    }


class Parts:
    """A section part by part: what one raises is written down, and the others are tried."""

    def __init__(self, out: Path, section: str) -> None:
        self.report: Report = {}
        self._out, self._number = out, list(LIMITS).index(section)

    def part(self, name: str, step: Callable[[], Report]) -> None:
        begin = time.monotonic()
        try:
            self.report[name] = step()
        except Exception as error:  # noqa: BLE001 - it is the finding
            traceback.print_exc()
            self.report[name] = {"wrong": [f"{name}: {type(error).__name__}: {error}"]}
        self.report[name]["part_s"] = round(time.monotonic() - begin, 1)
        self.save()

    def save(self) -> None:
        sections.keep(self._out, self._number, self.report)


def dealt(args: argparse.Namespace, parts: Parts, folder: Path) -> None:
    sizes = SIZES[args.platform]
    small = models.dense(folder / "small", 3, 0.04, torch.float32, **SMALL)
    prompts, tokens = prompts_of(sizes.prompts, SMALL["vocab_size"]), 4 * sizes.tokens
    shape: dict[str, Any] = {
        "dtype": "float32", "context": 1024, "concurrency": 6, "kv_bytes": 1 << 26,
        "chunk_tokens": 256,
    }  # fmt: skip
    wanted = Wanted()

    def compare(layout: str, draft: str) -> Report:
        with started(args, small, parallel=layout, draft=draft, **shape) as engine:
            found = ask(engine, prompts, tokens)
            return wanted.judge(found, first=layout == "single") | about(engine)

    drafts = f"ngram:{DEPTH}"
    for layout, draft in (
        ("single", "off"),
        *((each, "off") for each in DEALT),
        (DEALT[1], drafts),
    ):
        name = f"{layout}, float32{', drafts' * (draft != 'off')}"
        parts.part(name, partial(compare, layout, draft))


def speed(args: argparse.Namespace, parts: Parts, folder: Path, timed: bool = True) -> None:
    shape = SIZES[args.platform].large
    large = models.dense(folder / "large", 4, 0.02, torch.bfloat16, args.platform, **shape)
    for layout in DEALT:
        parts.part(layout, partial(_timed, args, parts, large, layout, timed))


def ready(args: argparse.Namespace, parts: Parts, folder: Path) -> None:
    speed(args, parts, folder, timed=False)


def _timed(args: argparse.Namespace, parts: Parts, model: Path, layout: str, timed: bool) -> Report:
    sizes, found = SIZES[args.platform], list[Report]()
    parts.report[f"{layout}, rows"] = found
    with started(
        args, model, parallel=layout, dtype="bfloat16", context=sizes.context,
        concurrency=max(batch for batch, _ in sizes.rows), kv_bytes=sizes.kv_bytes,
        chunk_tokens=sizes.chunk, mixed_tokens=sizes.chunk // 4,
    ) as engine:  # fmt: skip
        for batch, context in sizes.rows if timed else ():
            seconds = decode_seconds(engine, batch, context, steps=32)
            found.append(row(f"decode, batch {batch}, context {context}", seconds, 0.0))
            parts.save()
        if timed:
            seconds = prefill_seconds(engine, sizes.prefill, 5)
            found.append(row(f"prefill, {sizes.prefill} tokens", seconds, 0.0))
        return about(engine)


def adapters(args: argparse.Namespace, parts: Parts, folder: Path) -> None:
    sizes = SIZES[args.platform]
    adapted = {
        name: str(models.adapter(folder / name, sizes.adapted, seed, sizes.rank, sizes.size))
        for seed, name in enumerate(("sql", "law"))
    }
    names = [name for _ in sizes.prompts for name in ("", *adapted)]
    each = prompts_of(sizes.prompts, 320)
    prompts = [prompt for prompt in each for _ in range(3)]
    wanted = Wanted()

    def compare(layout: str) -> Report:
        with started(
            args, sizes.adapted, parallel=layout, dtype="float32", adapters=adapted,
            context=1024 if args.platform == "cuda" else 256, concurrency=len(prompts),
            kv_bytes=1 << 29, chunk_tokens=1024 if args.platform == "cuda" else 64,
        ) as engine:  # fmt: skip
            found = ask(engine, prompts, sizes.tokens, names)
            report = wanted.judge(found, first=layout == "single") | about(engine)
        apart = [
            len({tuple(answer.tokens) for answer in found[at : at + 3]}) == 3
            for at in range(0, len(found), 3)
        ]
        report["prompts_whose_answers_differ"] = sum(apart)
        report["wrong"] += [] if all(apart) else ["adapters give one prompt the same answer"]
        return report

    for layout in ("single", *ADAPTED):
        parts.part(layout, partial(compare, layout))


def drafts(args: argparse.Namespace, parts: Parts, folder: Path) -> None:
    model = models.drafting(folder / "drafting", 5, 0.04)
    layouts = {"kv": "latent@1", "index": "index@1"}
    _proposed(args, parts, model, True, dtype="float32", layouts=layouts)


def captured(args: argparse.Namespace, parts: Parts, folder: Path) -> None:
    _proposed(args, parts, models.stored(folder / "stored", 5, 0.02), False, dtype="bfloat16")


def _proposed(
    args: argparse.Namespace, parts: Parts, model: Path, judged: bool, **shape: Any
) -> None:
    """One card without and with drafts, then ranks with them. `judged`: all tokens must be the
    same."""
    sizes = SIZES[args.platform]
    prompts, wanted = prompts_of([n // 2 for n in sizes.prompts], 512), Wanted()

    def compare(layout: str, draft: str) -> Report:
        with started(
            args, model, parallel=layout, draft=draft, context=512, concurrency=6, chunk_tokens=64,
            kv_bytes=1 << 26, **shape,
        ) as engine:  # fmt: skip
            found = ask(engine, prompts, 2 * sizes.tokens)
            first = (layout, draft) == ("single", "off")
            report = wanted.judge(found, first) | about(engine)
        if not judged:
            report["parted"], report["wrong"] = report["wrong"], []
        if draft != "off" and not report["accepted"]:
            report["wrong"].append("no draft was right")
        return report

    parts.part("single, no drafts", partial(compare, "single", "off"))
    for layout in ("single", *DRAFTED):
        parts.part(layout, partial(compare, layout, f"mtp:{DEPTH}"))


def section(args: argparse.Namespace) -> None:
    parts = Parts(args.out, args.section)
    if args.section == "kernels":
        kernels(args.platform, parts.part)
        return
    steps = {
        "dealt": dealt, "adapters": adapters, "drafts": drafts, "captured": captured,
        "ready": ready, "speed": speed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        steps[args.section](args, parts, Path(folder))


def table(report: Report) -> list[str]:
    """A line for each comparison, each timed row and each kernel."""
    lines = []
    for name in LIMITS:
        for part, said in report.get(name, {}).items():
            timed = said if isinstance(said, list) else isinstance(said, dict) and said.get("rows")
            for each in timed or ():
                ms = f"{1e3 * each['median_s']:.4f} ms (mad {1e3 * each['mad_s']:.4f})"
                lines.append(f"{name}, {part}, {each['row']}: {ms}")
            if isinstance(said, dict) and "answers" in said:
                lines.append(
                    f"{name}, {part}: {said['same']} of {said['answers']} the same, "
                    f"{said['worst_nats']:.1e} nats, drafts {said['accepted']} of {said['drafted']}"
                )
            if isinstance(said, dict) and "unjudged" in said:
                lines.append(f"{name}, {part}: not judged: {said['unjudged']}")
            for text in wrong_in(said):
                lines.append(f"{name}, {part}: WRONG: {text}")
    return lines


def together(names: Sequence[str], run: Callable[..., None]) -> None:
    """Sections that time nothing, at once; ``ready`` keeps what it proved and compiled for those
    that do, each other has a cache of its own, so that no record of one is lost to another's."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(names)) as pool:
        environs: list[dict[str, str]] = []
        for name in names:
            own = Path(folder) / name
            environs.append({} if name == "ready" else {"METAINFER_CACHE": str(own)})
            if name != "ready" and cache_dir().exists():
                shutil.copytree(cache_dir(), own)
        list(pool.map(run, names, environs))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--platform", default="cuda", choices=list(SIZES))
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--only", nargs="*", choices=list(LIMITS), default=USUAL)
    parser.add_argument("--together", action="store_true", help="what times nothing, at once")
    parser.add_argument("--one-card", action="store_true", help="all ranks on the first card")
    parser.add_argument("--section", help="run one section in this process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section:
        section(args)
        return 0
    end = time.monotonic() + args.seconds
    cuda = args.platform == "cuda"
    report: Report = {
        "device": torch.cuda.get_device_name() if cuda else "host",
        "devices": torch.cuda.device_count() if cuda else 0,
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
    }

    lock = threading.Lock()

    def run(name: str, environ: Mapping[str, str] | None = None) -> None:
        left = end - time.monotonic()
        if left < 15:
            found: Report = {"failed": "no time left"}
        else:
            number, limit = list(LIMITS).index(name), min(left, LIMITS[name])
            found = sections.child(name, args.out, number, limit, environ)
        with lock:
            report[name] = found
            (args.out / "ranks_tokens.json").write_text(json.dumps(report, indent=1, default=str))

    beside = [name for name in args.only if args.together and name not in ALONE]
    if beside:
        together(beside, run)
    for name in args.only:
        if name not in beside:
            run(name)
    print("\n".join(table(report)))
    bad = {name: wrong for name in LIMITS if (wrong := wrong_in(report.get(name)))}
    print(json.dumps(bad, indent=1) if bad else "nothing wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
