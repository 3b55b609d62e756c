"""What the planner expects of DeepSeek-V4's shapes over two cards without peer access.

    python benchmarks/ranks_predicted.py [--layers 12] [--machine 2x-h200-nop2p]

Needs no GPU. What a rank computes is priced by recorded steps at the amounts of a rank's part: of
one H200, and of two of them under every other layout or by other collectives (no row prices itself;
halves in turns price nothing else). What ranks send, by `comm.model` over the named machine's
links, one after the other: nothing overlaps, but halves gain what pairs of such chunks did
(`planner/gains.json`). A chunk that no graph holds takes at least as long as its launches. NCCL by
its own formula without peer access, a gather at half of an all-reduce.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from metainfer.comm.model import nccl_through_host
from metainfer.comm.request import Op
from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.planner.amounts import Amounts
from metainfer.planner.calibration import Calibration, Sample, calibrate
from metainfer.planner.exchange import AROUND_US, Exchange, Sent
from metainfer.planner.launches import LAUNCH_S
from metainfer.planner.layouts import prompt_domains
from metainfer.planner.opening import open_model
from metainfer.planner.steps import StepCost

MODEL, RECORDED_LAYERS = "random:deepseek-v4-flash", 12
RECORDS = Path(__file__).parent / "records"
ONE_CARD, LONG = "2026-11-30-h200-v4-engine-zipf.json", "2026-11-30-h200-v4-long.json"
PAIRS = (
    "2026-11-30-2xh200-ranks-fifth.json",
    "2026-11-30-2xh200-ranks-tp2.json",
    "2026-11-30-h200-rank-of-2.json",
    "2026-11-30-2xh200-ranks-fourth.json",
    "2026-11-30-2xh200-ranks-third.json",
    "2026-11-30-2xh200-ranks-second.json",
)
"""Records of two cards and of one rank alone, the newest first: a case is taken from the first that
timed it."""
CHUNK, CONTEXT = 8192, 1024
BATCHES, PROMPTS, TOGETHER = (1, 8, 64), (2048, 8192), ((8, 2048), (4, 8192))
MACHINE = "2x-h200-nop2p"


@dataclass(frozen=True)
class Case:
    """Two ranks. `cards`: that are needed; on one, both are on it, or `emulated`: one of them is
    there alone. `halves`: chunks of at least so many tokens in turns by halves."""

    layout: str
    collectives: str
    cards: int
    environ: dict[str, str] = field(default_factory=dict)
    seconds: float = 180.0
    halves: int | None = None
    emulated: bool = False

    @property
    def apart(self) -> bool:
        """Whether the cards meet in host memory alone."""
        return self.collectives == "host" or bool(self.environ)


NO_PEER = {"NCCL_P2P_DISABLE": "1"}
TIMED = {
    "two cards, cp2/tp2, host": Case("cp2/tp2", "host", 2),
    "two cards, tp2, nccl without peers": Case("tp2", "nccl", 2, NO_PEER),
    "two cards, ep2, host, halves": Case("ep2", "host", 2, halves=1024),
    "two cards, tp2, host": Case("tp2", "host", 2),
    "two cards, tp2, host, halves": Case("tp2", "host", 2, halves=1024),
    "two cards, cp2/dp2ep2, host": Case("cp2/dp2ep2", "host", 2),
    "one card, rank 0 of tp2": Case("tp2", "host", 1, emulated=True),
    "two cards, ep2, host": Case("ep2", "host", 2),
    "two cards, ep2, nccl without peers": Case("ep2", "nccl", 2, NO_PEER),
    "two cards, tp2, ipc": Case("tp2", "ipc", 2),
    "two cards, tp2, nccl": Case("tp2", "nccl", 2),
}
"""Cases in which a rank has a card for itself. Peers are off on the machine named: with them
nothing is predicted. Side (a) is NCCL with its defaults and one layout for both phases."""


class ByNccl(Exchange):
    """The same exchanges carried by NCCL through host memory."""

    def _reduced(self, sent: Sent, ranks: int, size: float) -> float:
        return AROUND_US + nccl_through_host(self._group(ranks), int(size))

    def _direct(self, sent: Sent, ranks: int, size: float, op: Op = Op.ALL_GATHER) -> float:
        return AROUND_US + nccl_through_host(self._group(ranks), int(size / 2))

    def _broadcast(self, ranks: int, size: float) -> float:
        return AROUND_US + nccl_through_host(self._group(ranks), int(size / 2))


class NcclCost(StepCost):
    """Steps of a layout whose ranks meet by NCCL."""

    def __init__(self, like: StepCost) -> None:
        prompts = like.prompts and NcclCost(like.prompts)
        super().__init__(
            like.work, like.tree, prompts, like._graphs, like._prefill_from, like._halves
        )
        self._by = None if like.tree is None else ByNccl(like.work, like.tree)

    def _sent(self, sent: Sent) -> float:
        return 0.0 if self._by is None else self._by.seconds(sent)


def decode_row(batch: int) -> str:
    return f"decode, batch {batch}, context {CONTEXT}"


def prompt_row(tokens: int, times: int = 1) -> str:
    return f"prefill, {tokens} tokens" if times == 1 else f"prefill, {times} x {tokens} tokens"


ROWS = (
    *(decode_row(batch) for batch in BATCHES),
    *(prompt_row(tokens) for tokens in PROMPTS),
    *(prompt_row(tokens, times) for times, tokens in TOGETHER),
)


@cache
def costs(machine: str, layers: int, layout: str, halves: int = 0) -> StepCost:
    """Steps under `layout` of all cards of `machine`; `halves`: as `Case` has them, 0 for none."""
    model = f"{MODEL}?layers={layers}" if layers else MODEL
    intent = Intent(
        model=model, parallel=layout, context=16384, concurrency=64, chunk_tokens=CHUNK,
        halves=halves,
    )  # fmt: skip
    cost = describe(machine).resolve(open_model(model), intent).chosen.cost
    assert cost is not None
    return cost


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / name).read_text())
    return found


@cache
def pairs() -> dict[str, tuple[str, dict[str, Any]]]:
    """Case -> the newest record that timed it, and what it says there."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in reversed(PAIRS):
        for case, said in record(name).items():
            if case in TIMED and said.get("rows"):
                found[case] = (name, said)
    return found


def judged() -> list[str]:
    """Recorded cases of two cards that do without peers, as the machine named does."""
    return [case for case in pairs() if TIMED[case].cards == 2 and TIMED[case].apart]


def cost_of(layout: str, collectives: str, machine: str, layers: int, halves: int = 0) -> StepCost:
    cost = costs("1x-h200" if layout == "single" else machine, layers, layout, halves)
    return NcclCost(cost) if collectives == "nccl" else cost


def work(cost: StepCost, row: str) -> tuple[Phase, Amounts, float]:
    """A row's phase, the amounts of its mean step, and how many steps it takes."""
    words = row.replace(",", "").split()
    if words[0] == "decode":
        return Phase.DECODE, cost.decode(int(words[2]), int(words[4])), 1.0
    times, tokens = (int(words[1]), int(words[3])) if "x" in words else (1, int(words[1]))
    if times * tokens <= CHUNK:
        return Phase.CHUNK, cost.prefill(times * tokens, tokens), 1.0
    domains = prompt_domains((cost.prompts or cost).work.layout)
    return Phase.CHUNK, cost.prefill(CHUNK, tokens), times * tokens / CHUNK / min(domains, times)


def one_card() -> Iterator[Sample]:
    """Rows of one H200, and single chunks of its long prompts (the last ran under the profiler)."""
    cost = costs("1x-h200", RECORDED_LAYERS, "single")
    for row in record(ONE_CARD)["rows"]:
        phase, amounts, steps = work(cost, row["row"])
        yield Sample(phase, amounts, row["median_s"] / steps)
    for prompt in record(LONG)["contexts"]:
        for number in (n for n in (7, 31, 63, 127) if n < len(prompt["chunks_s"]) - 1):
            amounts = cost.runs([(number * CHUNK, CHUNK)], scored=0)
            yield Sample(Phase.CHUNK, amounts, prompt["chunks_s"][number])


def two_cards(case: str) -> Iterator[tuple[str, Sample]]:
    """Recorded rows of a case, each as its mean step."""
    about = TIMED[case]
    cost = cost_of(about.layout, about.collectives, MACHINE, RECORDED_LAYERS, about.halves or 0)
    for row in pairs()[case][1]["rows"]:
        phase, amounts, steps = work(cost, row["row"])
        yield row["row"], Sample(phase, amounts, row["median_s"] / steps)


@cache
def price(layout: str, collectives: str) -> Calibration:
    """Of recorded steps, but for those of that layout by these collectives."""
    found = [] if layout == "single" else list(one_card())
    for case in judged():
        about = TIMED[case]
        if about.halves is None and (about.layout, about.collectives) != (layout, collectives):
            found += [sample for _, sample in two_cards(case)]
    return calibrate(found, launch_s=LAUNCH_S)


def predicted(
    layout: str, collectives: str, *, machine: str, layers: int, halves: int = 0
) -> dict[str, float]:
    """Seconds by row: of a decode step, of a prompt alone, of prompts that come together."""
    cost = cost_of(layout, collectives, machine, layers, halves)
    by_others = price(layout, collectives)
    found = {}
    for row in ROWS:
        phase, amounts, steps = work(cost, row)
        found[row] = steps * by_others(phase, amounts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=RECORDED_LAYERS)
    parser.add_argument("--machine", default=MACHINE)
    given = parser.parse_args()
    apart = [case for case in TIMED.values() if case.apart]
    sides = {(case.layout, case.collectives, case.halves or 0): None for case in apart}
    print("| layout, by | " + " | ".join(ROWS) + " |")
    print("|---|" + "---|" * len(ROWS))
    for layout, by, halves in (*sides, ("single", "", 0)):
        found = predicted(layout, by, machine=given.machine, layers=given.layers, halves=halves)
        values = " | ".join(f"{1e3 * found[row]:.2f}" for row in ROWS)
        told = ", ".join(word for word in (layout, by, "halves" if halves else "") if word)
        print(f"| {told} | {values} |")


if __name__ == "__main__":
    main()
