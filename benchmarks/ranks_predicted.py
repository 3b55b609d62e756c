"""What the planner expects of DeepSeek-V4's shapes over two cards without peer access.

    python benchmarks/ranks_predicted.py [--layers 12] [--machine 2x-h200-nop2p]

Needs no GPU. What a rank computes is priced by steps measured on one H200
(`records/2026-11-30-h200-v4-engine.json`) at the amounts of a rank's part; what ranks send, by
`comm.model` over the named machine's links, one after the other: nothing overlaps. NCCL by its own
formula without peer access, a gather at half of an all-reduce.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from metainfer.comm.model import nccl_through_host
from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.planner.amounts import Amounts
from metainfer.planner.calibration import Calibration, Sample, calibrate
from metainfer.planner.exchange import Exchange, Sent
from metainfer.planner.layouts import prompt_domains
from metainfer.planner.opening import open_model
from metainfer.planner.steps import StepCost

MODEL, RECORDED_LAYERS = "random:deepseek-v4-flash", 12
RECORD = Path(__file__).parent / "records" / "2026-11-30-h200-v4-engine.json"
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

    def _reduced(self, ranks: int, size: float) -> float:
        return nccl_through_host(self._group(ranks), int(size))

    def _direct(self, ranks: int, size: float) -> float:
        return nccl_through_host(self._group(ranks), int(size / 2))

    def _broadcast(self, ranks: int, size: float) -> float:
        return nccl_through_host(self._group(ranks), int(size / 2))


class NcclCost(StepCost):
    """Steps of a layout whose ranks meet by NCCL."""

    def __init__(self, like: StepCost) -> None:
        prompts = like.prompts and NcclCost(like.prompts)
        super().__init__(like.work, like.tree, prompts)
        self._by = None if like.tree is None else ByNccl(like.work, like.tree)

    def _sent(self, sent: Sent) -> float:
        return 0.0 if self._by is None else self._by.seconds(sent)


def decode_row(batch: int) -> str:
    return f"decode, batch {batch}, context {CONTEXT}"


def prompt_row(tokens: int, times: int = 1) -> str:
    return f"prefill, {tokens} tokens" if times == 1 else f"prefill, {times} x {tokens} tokens"


@cache
def costs(machine: str, layers: int, layout: str) -> StepCost:
    """Steps under `layout` of all cards of `machine`."""
    model = f"{MODEL}?layers={layers}" if layers else MODEL
    intent = Intent(model=model, parallel=layout, context=16384, concurrency=64, chunk_tokens=CHUNK)
    cost = describe(machine).resolve(open_model(model), intent).chosen.cost
    assert cost is not None
    return cost


@cache
def measured() -> Calibration:
    """Steps of one card, as recorded."""
    cost = costs("1x-h200", RECORDED_LAYERS, "single")
    samples = []
    for row in json.loads(RECORD.read_text())["rows"]:
        words = row["row"].replace(",", "").split()
        if words[0] == "decode":
            amounts = cost.decode(int(words[2]), int(words[4]))
            samples.append(Sample(Phase.DECODE, amounts, row["median_s"]))
        elif int(words[1]) <= CHUNK:
            samples.append(Sample(Phase.CHUNK, chunk(cost, int(words[1])), row["median_s"]))
    return calibrate(samples)


def chunk(cost: StepCost, tokens: int) -> Amounts:
    return cost.prefill(min(tokens, CHUNK), tokens)


def predicted(layout: str, collectives: str, *, machine: str, layers: int) -> dict[str, float]:
    """Seconds by row: of a decode step, of a prompt alone, of prompts that come together."""
    cost = costs("1x-h200" if layout == "single" else machine, layers, layout)
    if collectives == "nccl":
        cost = NcclCost(cost)
    price, found = measured(), {}
    for batch in BATCHES:
        found[decode_row(batch)] = price(Phase.DECODE, cost.decode(batch, CONTEXT))
    for tokens in PROMPTS:
        found[prompt_row(tokens)] = price(Phase.CHUNK, chunk(cost, tokens))
    for times, tokens in TOGETHER:
        layout_of = (cost.prompts or cost).work.layout
        steps = times * tokens / (prompt_domains(layout_of) * CHUNK)
        found[prompt_row(tokens, times)] = steps * price(Phase.CHUNK, cost.prefill(CHUNK, tokens))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=RECORDED_LAYERS)
    parser.add_argument("--machine", default=MACHINE)
    given = parser.parse_args()
    sides = {
        (case.layout, case.collectives): None
        for case in TIMED.values()
        if case.collectives == "host" or case.environ
    }
    tables = {
        side: predicted(*side, machine=given.machine, layers=given.layers)
        for side in (*sides, ("single", ""))
    }
    rows = next(iter(tables.values()))
    print("| layout, by | " + " | ".join(rows) + " |")
    print("|---|" + "---|" * len(rows))
    for (layout, by), found in tables.items():
        values = " | ".join(f"{1e3 * found[row]:.2f}" for row in rows)
        print(f"| {layout}{', ' if by else ''}{by} | {values} |")


if __name__ == "__main__":
    main()
