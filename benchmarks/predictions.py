"""Published figures beside what the cost model says of them, uncalibrated; writes the page.

    python benchmarks/predictions.py [--out docs/predictions.md] [--json]

The numbers were public before the model was: these are explanations, not forecasts. What counts is
that one law with the same seeds (`planner.bound`) meets all of them, and that a row outside of its
band is shown as such.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import published
import stated_models
from published import Row
from seed_figures import seed_sections

from metainfer.comm.model import nccl_bracket
from metainfer.comm.topology import from_facts
from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.planner.amounts import Amounts
from metainfer.planner.bound import HIGH, LOW, RATE_SHARE, READ_SHARE, Bound, bound
from metainfer.planner.opening import open_model
from metainfer.planner.steps import StepCost
from metainfer.planner.work import RankWork
from metainfer.platform.facts import Facts
from metainfer.platform.machine_catalog import find_machine

RATE, RATE_UNITS = 240e12, 188
"""Matrix rate assumed of an RTX PRO 6000: what a published video run sustained on each of eight. A
field report of one GEMM has 76 to 166 by power cap, which that run contradicts. Others by units."""
CHUNK = 8192
FP8, BF16 = 1260e12, 690e12  # of the H200's machine file


@dataclass(frozen=True)
class Predicted:
    """`value` with the ends of its band, in the row's unit."""

    value: float
    low: float
    high: float


def assumed(name: str) -> Facts:
    """A shipped machine with what its file leaves open: matrix rate by units, peers."""
    facts = find_machine(name).facts
    device = facts.device
    if not device.dot_flops:
        rate = RATE * (device.units or RATE_UNITS) / RATE_UNITS
        device = replace(device, dot_flops={"bfloat16": rate})
    links = tuple(
        replace(x, peer_read=True, peer_write=True) if x.source >= 0 else x for x in facts.links
    )
    return replace(facts, devices=(device,) * len(facts.devices), links=links)


@cache
def flash(machine: str, layout: str, layers: str) -> StepCost:
    """DeepSeek-V4-Flash by its own headers, as the planner prices it."""
    model = f"random:deepseek-v4-flash{layers}"
    there = replace(describe(machine), facts=assumed(machine))
    intent = Intent(model=model, context=MOST_CONTEXT, concurrency=64, kv_bytes=4 << 30)
    found = there.resolve(open_model(model), intent)
    costs = {each.layout.name: each.cost for each in found.layouts if each.cost is not None}
    if layout == BEST:
        price = bound(there.facts, "bfloat16")
        assert price is not None
        layout = max(costs, key=lambda name: prompt_rate(costs[name], price, 8192))
    return costs[layout]


MOST_CONTEXT = 8192 + 4096
BEST = "best"  # of the layouts over all cards that hold the model, for prompts


def prompt_rate(cost: StepCost, price: Bound, prompt: int) -> float:
    """Tokens per second of prompts, every domain busy with one of its own."""
    cost, seconds = cost.prompts or cost, 0.0
    data = cost.work.layout.data // cost.work.layout.prefill
    for start in range(0, prompt, CHUNK):
        count = min(CHUNK, prompt - start)
        ends = int(start + count == prompt)
        amounts = cost.runs([(start, count)], scored=ends, everyone=count * data)
        seconds += price(Phase.CHUNK, amounts)
    return data * prompt / seconds


def cost_of(row: Row, *, prompt: bool) -> StepCost:
    name, _, options = row.model.partition("?")
    if name == "v4":
        return flash(row.machine, row.layout, f"?{options}" if options else "")
    tensor, _, shards = row.layout.removeprefix("tp").partition("cs")
    work: RankWork = (
        stated_models.glm(int(tensor), int(shards or 1))
        if name == "glm"
        else stated_models.v41(int(tensor), prompt=prompt)
    )
    return StepCost(work, from_facts(assumed(row.machine)))


def price_of(row: Row) -> Bound:
    found = bound(assumed(row.machine), "bfloat16")
    assert found is not None
    return found


def prefill_seconds(row: Row, prompt: int, together: int = 1) -> float:
    """Of prompts computed one after the other in chunks."""
    rate = prompt_rate(cost_of(row, prompt=True), price_of(row), prompt)
    return together * prompt / rate


def decode_seconds(row: Row, context: int) -> float:
    cost = cost_of(row, prompt=False)
    return price_of(row)(Phase.DECODE, cost.decode(row.n, context))


def _rated(per_second: float) -> Predicted:
    return Predicted(per_second, per_second * LOW, per_second * HIGH)


def _timed(seconds: float) -> Predicted:
    return Predicted(seconds, seconds / HIGH, seconds / LOW)


def _gemm(row: Row) -> Predicted:
    n, k = (int(x) for x in row.model.split("x"))
    moved = n * k + row.n * k + 2 * row.n * n
    price = Bound(4.3e12, FP8)
    return _timed(1e6 * price(Phase.DECODE, Amounts(row.n, 2.0 * row.n * n * k, 0.0, moved)))


def _sparse(row: Row) -> Predicted:
    flops = row.n * 640 * 4.0 * 64 * 512
    price = Bound(4.3e12, BF16)
    return _timed(1e6 * price(Phase.CHUNK, Amounts(row.n, 0.0, flops, row.n * 65_536.0)))


def _nccl(row: Row) -> Predicted:
    low, high = nccl_bracket(2, row.n)
    return Predicted((low + high) / 2, low, high)


def _capacity(row: Row) -> Predicted:
    facts = find_machine(row.machine).facts
    card = facts.device.memory_bytes
    assert card is not None
    tokens = stated_models.glm_tokens(card, len(facts.devices), row.model, row.n)
    if row.phase == "limit":
        tokens = min(tokens, stated_models.MILLION)
    return Predicted(tokens, tokens * 0.8, tokens * 1.25)


def _h3(row: Row) -> Predicted:
    rate = price_of(row).rate
    assert rate is not None
    return _timed(stated_models.H3_FLOPS / (8 * rate) / RATE_SHARE)


PREDICT: dict[str, Callable[[Row], Predicted]] = {
    "prefill": lambda row: _rated(row.n / prefill_seconds(row, row.n)),
    "ttft": lambda row: _h3(row) if row.model == "h3" else _timed(prefill_seconds(row, row.n)),
    "decode": lambda row: _rated(row.n / decode_seconds(row, 8192)),
    "chunks": lambda row: _timed(1e3 * prefill_seconds(row, row.n)),
    "chunks8": lambda row: _timed(1e3 * prefill_seconds(row, row.n, 8)),
    "step": lambda row: _timed(1e3 * decode_seconds(row, 1024)),
    "capacity": _capacity,
    "limit": _capacity,
    "gemm": _gemm,
    "sparse": _sparse,
    "nccl": _nccl,
}


@dataclass(frozen=True)
class Judged:
    """`error`: predicted over the nearer end of what was published, less one; 0 inside of it."""

    row: Row
    predicted: Predicted | None
    error: float | None
    inside: bool | None


def judge(row: Row) -> Judged:
    """Predict one row and compare."""
    if not row.phase:
        return Judged(row, None, None, None)
    found = PREDICT[row.phase](row)
    nearer = min(max(found.value, row.low), row.high)
    inside = found.low <= row.high and found.high >= row.low
    return Judged(row, found, found.value / nearer - 1, inside)


def coverage(judged: Iterable[Judged]) -> str:
    told = [each for each in judged if each.inside is not None]
    hits = sum(bool(each.inside) for each in told)
    return f"{hits} of {len(told)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(judged: Iterable[Judged]) -> list[str]:
    lines = [
        "| where | what | published | predicted | band | error | in band |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in judged:
        row, found = each.row, each.predicted
        shown = _number(row.low)
        if row.high != row.low:
            shown += f" to {_number(row.high)}"
        head = f"| {row.box} | {row.what}{'' if row.kind == 'tuned' else f' ({row.kind})'} "
        if found is None:
            lines.append(f"{head}| {shown} {row.unit} | none: {row.why} | | | |")
            continue
        assert each.error is not None
        lines.append(
            f"{head}| {shown} {row.unit} | {_number(found.value)} | {_number(found.low)} to "
            f"{_number(found.high)} | {each.error:+.0%} | {'yes' if each.inside else '**no**'} |"
        )
    return lines


HEAD = f"""# Predictions

Written by `python benchmarks/predictions.py`; do not edit. Every figure that others published
beside the planner's uncalibrated cost model: bytes at {READ_SHARE:g} of the device's rate, FLOPs at
{RATE_SHARE:g} of it, a little for each kernel, messages by the model of the links, and at least the
host's launches where no graph holds a step; the band goes from {LOW:g} to {HIGH:g} of that speed.
The figures were public before the model: these rows show where one law holds and where it does not.
Error: predicted over the nearer published end, less one.

Assumed where machine files are silent: {RATE / 1e12:.0f} TFLOP/s of bf16 on an RTX PRO 6000 (what a
published video run sustained on each of eight cards; a field report of one GEMM says 76 to 166),
other cards of the generation by multiprocessors; cards may write into each other; chunks of
{CHUNK:,} tokens. V4-Flash is priced from its own headers, on eight cards in the layout that the
planner finds best for prompts; V4.1-Flash, GLM-5.x (NVFP4 experts) and H3 from the parameter counts
of their documents (`benchmarks/stated_models.py`), the first two in TP alone.

Rows outside say what the law leaves out: a day-0 or fallback state has kernels that the bound does
not know; a small matrix costs a launch; NCCL without peer access goes through shared memory, for
which its constants are not; FP8 matrices run faster than the bf16 rate that is assumed.
"""


def page() -> tuple[str, dict[str, object]]:
    """The page, and the same as a document."""
    groups = {
        "PCIe-only boxes, reported by their owners": published.BOXES,
        "One H200 with vLLM, 12 layers of V4-Flash": published.ENGINE,
        "Kernels on one H200": (*published.GEMMS, *published.ATTENTION),
        "NCCL between two H200 without peer access": published.NCCL,
    }
    lines, document = [HEAD], {}
    everything: list[Judged] = []
    for title, rows in groups.items():
        judged = [judge(row) for row in rows]
        everything += judged
        told = coverage(judged)
        lines += ["", f"## {title}", "", f"In the band: {told}.", "", *_table(judged)]
        document[title] = {
            "in_band": told,
            "rows": [
                {
                    "where": each.row.box,
                    "what": each.row.what,
                    "kind": each.row.kind,
                    "unit": each.row.unit,
                    "published": [each.row.low, each.row.high],
                    "predicted": each.predicted and vars(each.predicted),
                    "error": each.error,
                    "in_band": each.inside,
                }
                for each in judged
            ],
        }
    tuned = [each for each in everything if each.row.kind == "tuned"]
    total = (
        f"All rows in the band: {coverage(everything)}; of those that are no day-0 or fallback "
        f"state, {coverage(tuned)}."
    )
    lines[0] = f"{HEAD}\n{total}"
    more, figures = seed_sections(assumed, flash)
    return "\n".join([*lines, *more, ""]), {**document, "all": total, "seed_figures": figures}


def main() -> int:
    """Write the page, or print the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/predictions.md"))
    parser.add_argument("--json", action="store_true", help="print a document, write no page")
    given = parser.parse_args()
    text, document = page()
    if given.json:
        print(json.dumps(document))
    else:
        given.out.write_text(text)
        print(document["all"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
