"""What sending a token only to the ranks that hold its experts would gain, by the planner's prices.

    python benchmarks/dispatch_priced.py [--machine 8x-rtx-pro-6000d] [--layout ep8 2xep4]

Needs no GPU. Today every rank of a group gets all rows, and sums come back (ADR 0024, 0044). A
token that is routed to k of the experts evenly goes to 1 - (1 - 1/N)^k of N ranks. Prices favour
it: no message more than today (counts would ride on flags), no byte for padding, the link's full
rate for scattered rows, and partial sums that come back from those ranks only. In decode a capped
buffer has to hold all rows of a rank, because nothing may be dropped: its bytes fall only if
kernels read the counts on the device. Milliseconds of a step, all layers; ``e4m3``: rows are sent
rounded.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from metainfer.comm import model as links
from metainfer.comm.topology import Topology
from metainfer.core.intent import Intent
from metainfer.engine.elsewhere import describe
from metainfer.planner.opening import open_model

MODEL = "random:deepseek-v4-flash"
E4M3 = (1 + 4 / 128) / 2
"""Bytes of a rounded row over those of bfloat16: an element, and a float32 scale for 128."""
ROWS = (("decode", 8), ("decode", 64), ("prefill", 2048), ("prefill", 8192))
"""Rows of a rank."""


@dataclass(frozen=True)
class Wire:
    """A group of ranks that share experts, and what one row of bfloat16 takes in bytes."""

    tree: Topology
    row: int

    def microseconds(self, tokens: int, gathered: float, scattered: float, copies: bool) -> float:
        """A layer's two messages, whose bytes are these shares of all rows in bfloat16."""
        size = self.tree.world * tokens * self.row
        if self.tree.peer:
            fixed = links.direct(self.tree, 0)
            return 2 * fixed + (gathered + scattered) * (links.direct(self.tree, size) - fixed)
        total = 0.0
        for share, copied in (
            (gathered, links.copied_gather),
            (scattered, links.copied_scatter),
        ):
            parted = copied is links.copied_scatter
            by_kernels = links.direct(
                self.tree, int(share * size), through_host=True, parted=parted
            )
            by_copies = copied(self.tree, int(share * size), links.SEEDS)
            total += min(by_kernels, by_copies) if copies else by_kernels
        return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--machine", default="8x-rtx-pro-6000d")
    parser.add_argument("--layout", nargs="*", default=["ep8", "2xep4"])
    args = parser.parse_args()
    model, machine = open_model(MODEL), describe(args.machine)
    k = model.arch.experts_per_token
    print("| layout | links | rows of a rank | all | all, e4m3 | chosen | chosen, e4m3 |")
    print("|---|---|---|---|---|---|---|")
    steps: list[str] = []
    for name in args.layout:
        wish = Intent(model=MODEL, parallel=name, context=16384, concurrency=64)
        chosen = machine.resolve(model, wish).chosen
        cost, whole = chosen.cost, chosen.prediction
        assert cost is not None and cost.tree is not None
        if whole is not None and whole.decode_tok_s:
            steps.append(f"{name}: {1e3 * whole.batch / whole.decode_tok_s:.1f} ms")
        work, ranks = cost.work, cost.work.layout.expert
        sent = 1 - (1 - 1 / ranks) ** k  # of a token's ranks, its own among them
        own = cost.tree.group(ranks, work.layout.ranks)
        for said, tree in (("no peers", own), ("peers", replace(own, peer=True))):
            wire = Wire(tree, work.costs.hidden * work.width)
            for phase, tokens in ROWS:
                long = phase == "prefill"
                # What a rank publishes once it publishes anyway; others read what is for them.
                part = sent if tree.peer else (1 + (ranks - 1) * sent) / ranks
                forms = [
                    wire.microseconds(tokens, 1, 1, long),
                    wire.microseconds(tokens, E4M3, 1, long),
                    wire.microseconds(tokens, part, sent, False),
                    wire.microseconds(tokens, part * E4M3, sent, False),
                ]
                millis = [work.layers * each / 1e3 for each in forms]
                cells = " | ".join(f"{each:.1f}" for each in millis)
                print(f"| {name} | {said} | {phase}, {tokens} | {cells} |")
    print(f"A whole decode step of 64 requests at 8,192 tokens, without peers: {', '.join(steps)}.")


if __name__ == "__main__":
    main()
