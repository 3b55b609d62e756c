"""Recorded decode steps of DeepSeek-V4-Flash beside the price of steps that nobody measured.

    python benchmarks/steps_priced.py

Needs no GPU. Twelve layers on one H200 and on two without peer access, and one rank of eight at all
43 layers with the links of `8x-rtx-pro-6000d` (`bench offline --rank-of`), by `planner.bound`. What
ranks wait for is modelled for the pairs; of the rank alone it is what it waited, for that was a
model's word already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import ranks_predicted
from ranks_predicted import MACHINE, ONE_CARD, RECORDED_LAYERS, TIMED, cost_of, costs, record, work

from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.engine.elsewhere import describe
from metainfer.planner.amounts import Amounts
from metainfer.planner.bound import bound
from metainfer.planner.emulation import emulation_of
from metainfer.planner.exchange import AROUND_US
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved, resolve

FULL = "random:deepseek-v4-flash"
RANK_OF_EIGHT = "2026-11-30-h200-rank-of-8-layouts.json"


@dataclass(frozen=True)
class Step:
    """A recorded decode step and its amounts."""

    name: str
    amounts: Amounts
    seconds: float

    @property
    def off(self) -> float:
        """Predicted over measured, less one."""
        price = bound(describe("1x-h200").facts, "bfloat16")
        assert price is not None
        return price(Phase.DECODE, self.amounts) / self.seconds - 1


def one_card() -> Iterator[Step]:
    cost = costs("1x-h200", RECORDED_LAYERS, "single")
    for row in record(ONE_CARD)["rows"]:
        phase, amounts, _ = work(cost, row["row"])
        if phase is Phase.DECODE:
            yield Step(f"one card, {row['row']}", amounts, row["median_s"])


def two_cards() -> Iterator[Step]:
    for case in ranks_predicted.judged():
        about = TIMED[case]
        cost = cost_of(about.layout, about.collectives, MACHINE, RECORDED_LAYERS)
        for row in ranks_predicted.pairs()[case][1]["rows"]:
            phase, amounts, _ = work(cost, row["row"])
            if phase is Phase.DECODE:
                yield Step(f"{case}, {row['row']}", amounts, row["median_s"])


@cache
def emulated() -> Resolved:
    """Rank 0 of eight at full depth on an H200, planned as `benchmarks/emulated_gpu.py` asks."""
    there, model = describe("1x-h200"), open_model(FULL)
    intent = Intent(
        model=FULL, context=16384, concurrency=64, chunk_tokens=8192,
        rank_of=8, of_machine="8x-rtx-pro-6000d",
    )  # fmt: skip
    policy, alone = there.policy(intent), emulation_of(intent)
    return resolve(intent, model.facts, there.facts, there.registry, policy, emulation=alone)


def one_of_eight() -> Iterator[Step]:
    said = record(RANK_OF_EIGHT)
    found = {each.layout.name: each.cost for each in emulated().layouts}
    for row in said["rows"]:
        words = row["row"].replace(",", "").split()
        if words[0] != "decode":
            continue
        side = row["engine"].removesuffix(", emulated")
        layout, (first, last) = said["sides"][side]["layout"], words[4].split("-")
        cost = found[layout]
        assert cost is not None
        sent = row["exposed_wait_us"]["median"] + row["collectives"] * AROUND_US
        amounts = cost.decode(int(words[2]), (int(first) + int(last)) // 2)
        name = f"one of eight, {side}: {layout}, decode, batch {words[2]}"
        yield Step(name, replace(amounts, sent=sent / 1e6), row["step_us"]["median"] / 1e6)


def main() -> None:
    print("| step | measured, ms | predicted | off |\n|---|---|---|---|")
    for step in (*one_card(), *two_cards(), *one_of_eight()):
        ms = 1e3 * step.seconds
        print(f"| {step.name} | {ms:.2f} | {ms * (1 + step.off):.2f} | {step.off:+.0%} |")
    print("\n| layout of eight | decode of 64, tok/s | prompts, tok/s |\n|---|---|---|")
    for each in emulated().layouts:
        if (told := each.prediction) is not None:
            print(f"| {each.layout.name} | {told.decode_tok_s:,.0f} | {told.prefill_tok_s:,.0f} |")


if __name__ == "__main__":
    main()
