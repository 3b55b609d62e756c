"""A model as several rank processes, on one card and on two: agreement, memory, a death, speed.

    python benchmarks/ranks_gpu.py --out FOLDER [--layers 12] [--seconds 420] [--only CASE ...]
        [--model random:deepseek-v4-flash] [--platform cuda] [--real | --skip-agreement]

Writes ``ranks_gpu.json`` after every section, and keeps what it has when one hangs: each is a
process of its own with a time limit, and so are the ranks below it; what fails in one is written
down, and the next runs. Sections, in this order or as ``--only`` names them:

* ``exact``: log-probabilities of one process in float32, with every op's torch version, of a tiny
  model without quantised activations. What ranks compute of it must lie within 1e-3 nats (mean):
  sums in another order are all that differs. With ``--real`` of four layers of the real shapes too:
  there a sum's last bit decides how an activation is rounded to FP8, and what follows from that is
  no error of ranks: one process with chunks of another size shows how far it goes, and ranks may
  lie 1.25 times as far;
* a case each: two ranks under a layout with collectives of a kind, on a card each without or with
  peer access, on one card (correctness: they share it by time slices), or one rank alone whose peer
  is emulated. It compares, checks the bytes held against the ledger, times decode and prefill at
  full depth where each rank has a card, says what a switch of layouts costs requests in flight
  (`ranks_switch.py`) and which paths were taken, and kills rank 1 in mid-step (not under NCCL,
  whose own time-outs it would meet);
* ``single``: the same rows of one process on one card.

Rows stand beside what the planner expects of them (`ranks_predicted.py`); the first case comes
first because its kernels serve most of the others.

With ``--platform cpu --model random:tiny-llama`` it runs on a host, which tests the script itself.
Exit status 1 when something is wrong; slow is reported, not hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import sections
import torch
from gpu_check import decode_seconds, prefill_seconds, prompt_logprobs, row, submit
from gpu_profile import kernel_shares
from ranks_predicted import (
    BATCHES,
    CHUNK,
    CONTEXT,
    MACHINE,
    MODEL,
    PROMPTS,
    TIMED,
    TOGETHER,
    Case,
    decode_row,
    predicted,
    prompt_row,
)
from ranks_switch import switch
from sections import wrong_in
from v4_gpu import torch_pins

from metainfer.core.intent import Intent
from metainfer.engine.engine import Engine
from metainfer.planner.opening import open_model

MEAN_BAR = 1e-3
DEATH_BAR_S = 3.0
EXACT_LAYERS = 4
TINY = "random:tiny-deepseek-v4"
Report = dict[str, Any]
Step = Callable[[], None]


CASES = {
    **TIMED,
    "one card, tp2, ipc": Case("tp2", "ipc", 1),
    "one card, tp2, host": Case("tp2", "host", 1),
    "one card, ep2, host": Case("ep2", "host", 1),
    "one card, cp2/dp2ep2, host": Case("cp2/dp2ep2", "host", 1),
    "one card, cp2/dp2ep2, ipc": Case("cp2/dp2ep2", "ipc", 1),
}
SECTIONS = ("exact", *CASES, "single")
BESIDE = (
    "halves", "sum_pieces", "gathers_beside", "shared_beside", "prefill_from", "rounded_from",
)  # fmt: skip
"""What of a plan says which work goes on beside other work, and in which layout and type."""


def wish(args: argparse.Namespace, layers: int, **more: Any) -> Intent:
    joint = "&" if "?" in args.model else "?"
    model = f"{args.model}{joint}layers={layers}" if layers else args.model
    return Intent(model=model, platform=args.platform, **more)


def exact_wish(args: argparse.Namespace, tiny: bool, **more: Any) -> Intent:
    """Few layers, float32, torch versions: what is left are sums in another order."""
    layers = EXACT_LAYERS if args.layers and not tiny else 0
    told = argparse.Namespace(**{**vars(args), "model": TINY if tiny else args.model})
    given: dict[str, Any] = {"context": min(1024, args.context), "concurrency": 2}
    if args.platform != "cpu":
        pins, layouts = torch_pins(wish(told, layers).model, args.platform)
        given |= {"ops": pins, "layouts": layouts}
    return wish(told, layers, dtype="float32", **given, **more)


def prompt_of(args: argparse.Namespace, tiny: bool) -> list[int]:
    vocab = open_model(TINY if tiny else args.model).arch.vocab_size
    generator = torch.Generator().manual_seed(5)
    return torch.randint(20, vocab, (args.tokens,), generator=generator).tolist()


def over_ranks(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"parallel": case.layout, "halves": case.halves or 0}
    if case.emulated:
        return {**found, "collectives": case.collectives, "rank_of": 2, "of_machine": MACHINE}
    if args.platform == "cpu":
        return found
    return {**found, "collectives": case.collectives, "one_card": case.cards == 1}


def exact(args: argparse.Namespace) -> Report:
    real: list[tuple[str, bool, dict[str, Any]]] = [
        ("real", False, {}),
        ("other chunks", False, {"chunk_tokens": 64}),
    ]
    found: dict[str, torch.Tensor] = {}
    report: Report = {"tokens": args.tokens}
    for name, tiny, more in [("tiny", True, {}), *(real if args.real else [])]:
        wanted = exact_wish(args, tiny, **more)
        found[name] = prompt_logprobs(wanted, prompt_of(args, tiny))
        torch.save(found, args.out / "exact.pt")
    if args.real:
        report["other_chunks"] = off(found["other chunks"], found["real"])
    return report


def off(found: torch.Tensor, reference: torch.Tensor) -> Report:
    apart = (found - reference).abs()
    return {"mean_nats": float(apart.mean()), "worst_nats": float(apart.max())}


def compare(case: Case, args: argparse.Namespace) -> Report:
    """Log-probabilities over ranks against those of one process."""
    reference = torch.load(args.out / "exact.pt")
    report: Report = {"wrong": []}
    bars = [("tiny", True, MEAN_BAR)]
    if args.real:
        chunks = off(reference["other chunks"], reference["real"])["mean_nats"]
        bars.append(("real", False, max(MEAN_BAR, 1.25 * chunks)))
    for name, tiny, bar in bars:
        wanted = exact_wish(args, tiny, **over_ranks(case, args))
        found = off(prompt_logprobs(wanted, prompt_of(args, tiny)), reference[name])
        report[name] = found | {"bar": bar}
        if found["mean_nats"] > bar:
            report["wrong"].append(f"{name}: mean difference {found['mean_nats']:.2e} nats")
    return report


def full(args: argparse.Namespace, **more: Any) -> Engine:
    engine = Engine(
        wish(
            args,
            args.layers,
            context=args.context,
            concurrency=64 if args.platform == "cuda" else 8,
            prefix_cache=False,
            chunk_tokens=CHUNK if args.platform == "cuda" else None,
            **more,
        ),
        lambda p: print(f"  {p.phase} {p.seconds:.1f} s", flush=True) if p.seconds else None,
    )
    engine.start()
    return engine


def rows(engine: Engine, args: argparse.Namespace, found: list[Report], each: Step) -> None:
    """Appended to `found` one by one; `each` is called behind every row."""
    cuda = args.platform == "cuda"
    measures: list[tuple[str, Callable[[], list[float]]]] = [
        (decode_row(batch), partial(decode_seconds, engine, batch, CONTEXT, steps=24))
        for batch in (BATCHES if cuda else ())
    ]
    measures += [
        (prompt_row(tokens), partial(prefill_seconds, engine, tokens, 4))
        for tokens in (PROMPTS if cuda else (64,))
    ]
    measures += [
        (prompt_row(tokens, times), partial(together_seconds, engine, times, tokens, 4))
        for times, tokens in (TOGETHER if cuda else ((2, 64),))
    ]
    for name, measure in measures:
        before = engine.waited
        found.append(row(name, measure(), 0.0))
        after = engine.waited
        if before is not None and after is not None:
            found[-1]["waited"] = asdict(after - before)
        each()


def together_seconds(engine: Engine, times: int, tokens: int, repeats: int) -> list[float]:
    """Wall seconds of `times` prompts that come at once, to the last one's first token."""
    seconds = []
    for _ in range(repeats):
        submit(engine, times, tokens, 1)
        begin = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def resident(engine: Engine) -> Report:
    """Bytes of the first rank beside the plan's ledger, kind by kind."""
    assert engine.resolved is not None
    planned: dict[str, int] = {}
    for item in engine.resolved.plan.ledger:
        planned[item.kind] = planned.get(item.kind, 0) + item.bytes
    held = engine.held_bytes
    wrong = [
        f"{kind}: {held[kind]:,} B held, {planned.get(kind, 0):,} planned"
        for kind in ("weights", "kv")
        if held[kind] > planned.get(kind, 0)
    ]
    return {"held": held, "planned": {k: planned.get(k) for k in held}, "wrong": wrong}


def kill(engine: Engine, args: argparse.Namespace) -> Report:
    """Rank 1 is killed while a step runs; what is raised, how soon, and what is left."""
    group: Any = engine._executor._group  # type: ignore[union-attr]
    pids = list(group.pids)
    struck: list[float] = []

    def strike() -> None:
        time.sleep(0.3)
        struck.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    submit(engine, 2, min(512, args.context // 2), min(1000, args.context // 4))
    thread = threading.Thread(target=strike)
    thread.start()
    error = ""
    limit = time.monotonic() + 60
    try:
        while time.monotonic() < limit:
            engine.step()
            if not engine.has_work:
                submit(engine, 2, 64, 40)
    except Exception as raised:  # noqa: BLE001 - whatever it is, it is the finding
        error = f"{type(raised).__name__}: {raised}"
    took = time.monotonic() - (struck[0] if struck else limit)
    thread.join()
    engine.close()
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    wrong = [f"process {pid} is left" for pid in left]
    if "rank 1" not in error:
        wrong.append("the error does not name rank 1")
    if took > DEATH_BAR_S:
        wrong.append(f"it took {took:.1f} s to be noticed")
    return {"error": error, "s": took, "wrong": wrong}


def case_section(name: str, args: argparse.Namespace) -> Report:
    """Part by part; what one raises is written down, and the others are tried."""
    case = CASES[name]
    report: Report = {"case": dict(vars(case))}

    def save() -> None:
        keep(name, args, report)

    def part(key: str, step: Callable[[], Any]) -> Any:
        try:
            report[key] = step()
        except Exception as error:  # noqa: BLE001 - it is the finding
            report[key] = {"wrong": [f"{key}: {type(error).__name__}: {error}"]}
        save()
        return report[key]

    if not case.emulated and not args.skip_agreement:
        part("agreement", lambda: compare(case, args))
    before = torch.cuda.mem_get_info(0)[0] if args.platform == "cuda" else 0
    engine = full(args, **over_ranks(case, args))
    report["start_phases"] = engine._phases
    assert engine.resolved is not None
    plan = engine.resolved.plan
    report["beside"] = {key: getattr(plan, key) for key in BESIDE}
    part("resident", lambda: resident(engine))
    if case.cards == 2 or case.emulated or args.platform == "cpu":
        found: list[Report] = []
        report["rows"] = found
        part("timed", lambda: rows(engine, args, found, save))
    if case.emulated:
        part("costs", lambda: costs(engine, args))
    else:
        sizes = (8, CONTEXT, 512) if args.platform == "cuda" else (2, 64, 24)
        if case.cards == 2 or args.platform == "cpu":
            part("switch", lambda: switch(engine, *sizes))
        part("paths", lambda: paths(engine))
    if case.emulated or case.collectives == "nccl":  # a library's own time-outs are not ours
        engine.close()
    else:
        part("killed", lambda: kill(engine, args))
    if args.platform == "cuda":
        time.sleep(1.0)
        gone = before - torch.cuda.mem_get_info(0)[0]
        report["not_given_back_bytes"] = gone
        if gone > 1 << 30:
            report["back"] = {"wrong": [f"{gone:,} B of the card are not back"]}
    return report


def costs(engine: Engine, args: argparse.Namespace) -> Report:
    """Kernels of the longest prompt by share, waits of the emulated rank among them."""
    if args.platform != "cuda":
        return {}
    submit(engine, 1, PROMPTS[-1], 1)
    return kernel_shares(engine.step, 1)


def paths(engine: Engine) -> list[dict[str, Any]]:
    """By rank and group: the share of calls that each path took."""
    group: Any = engine._executor._group  # type: ignore[union-attr]
    return [
        {key: found["share"] for key, found in each.items()} for each in group.call("collectives")
    ]


def single(args: argparse.Namespace) -> Report:
    engine, found = full(args), list[Report]()
    report: Report = {"rows": found, "resident": resident(engine)}
    rows(engine, args, found, lambda: keep("single", args, report))
    engine.close()
    return report


def add_expected(report: Report, args: argparse.Namespace) -> None:
    """What the planner expects of each section's rows, and a table of all."""
    lines = ["| case | row | predicted ms | measured ms | ratio |", "|---|---|---|---|---|"]
    for name in SECTIONS:
        case, timed = CASES.get(name), report.get(name, {}).get("rows", [])
        expects = name == "single" or (case is not None and case.collectives != "ipc")
        if case is not None and case.collectives == "nccl" and not case.environ:
            expects = False  # the machine named has no peers
        known: dict[str, float] = {}
        if expects and timed and args.model == MODEL and args.platform == "cuda":
            layout, by = (case.layout, case.collectives) if case else ("single", "")
            halves = (case.halves or 0) if case else 0
            known = predicted(layout, by, machine=MACHINE, layers=args.layers, halves=halves)
        for each in timed:
            measured, expected = each["median_s"], known.get(each["row"])
            said, ratio = "", ""
            if expected is not None:
                each |= {"predicted_s": expected, "ratio": measured / expected}
                said, ratio = f"{1e3 * expected:.2f}", f"{measured / expected:.2f}"
            lines.append(f"| {name} | {each['row']} | {said} | {1e3 * measured:.2f} | {ratio} |")
    report["table"] = lines


def keep(name: str, args: argparse.Namespace, report: Report) -> None:
    sections.keep(args.out, SECTIONS.index(name), report)


def child(name: str, args: argparse.Namespace, limit: float) -> Report:
    environ = CASES[name].environ if name in CASES else {}
    return sections.child(name, args.out, SECTIONS.index(name), limit, environ)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="random:deepseek-v4-flash")
    parser.add_argument("--layers", type=int, default=12, help="0: as the model is")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=300, help="of the compared prompt")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--skip-agreement", action="store_true")
    parser.add_argument("--real", action="store_true", help="compare the real shapes too")
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--section", help="run one section in this process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section:
        steps = {"exact": exact, "single": single}
        run = steps.get(args.section)
        keep(args.section, args, run(args) if run else case_section(args.section, args))
        return 0
    end = time.monotonic() + args.seconds
    cards = torch.cuda.device_count() if args.platform == "cuda" else 2
    report: Report = {
        "device": torch.cuda.get_device_name() if args.platform == "cuda" else "host",
        "devices": cards,
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
    }
    for name in args.only:
        case, left = CASES.get(name), end - time.monotonic()
        if case is not None and case.cards > cards:
            report[name] = {"skipped": f"needs {case.cards} cards"}
        elif left < 20:
            report[name] = {"skipped": "no time left"}
        else:
            report[name] = child(name, args, min(left, case.seconds if case else 120.0))
        print(f"{name}: {json.dumps(report[name], default=str)[:600]}", flush=True)
        add_expected(report, args)
        (args.out / "ranks_gpu.json").write_text(json.dumps(report, indent=1, default=str))
    print("\n".join(report["table"]))
    bad = {n: w for n in SECTIONS if (w := wrong_in(report.get(n, {})))}
    print(json.dumps(bad, indent=1) if bad else "nothing wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - a section's words reach its parent
        traceback.print_exc()
        sys.exit(2)
