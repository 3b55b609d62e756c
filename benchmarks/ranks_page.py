"""Two cards without peer access, from records to a page: tables and a picture.

    python benchmarks/ranks_page.py [--ranks RECORD] [--comm RECORD] [--out docs/two-cards.md]

Reads what `ranks_gpu.py` and `comm_gpu.py` wrote, and what the planner expects today
(`ranks_predicted.py`). Rows that no record has are shown as not run.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

from ranks_predicted import MACHINE, RECORDED_LAYERS, TIMED, Case, predicted, prompt_row

from metainfer.bench.ladder_picture import STYLE
from metainfer.comm import model as links
from metainfer.comm.topology import Topology, from_facts
from metainfer.platform.machine_catalog import find_machine

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "records"
NCCL = "two cards, tp2, nccl without peers"
"""Side (a): NCCL as it comes, one layout for both phases, the same kernels."""
AT_ONCE, LONE = prompt_row(8192, 4), prompt_row(8192)
TOKENS = {AT_ONCE: 4 * 8192, LONE: 8192}
SIZES = (8192, 65_536, 262_144, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
WIDTH, LABEL, FIGURES, LINE = 860, 250, 190, 34

HEAD = """# Two cards without peer access

Written by `python benchmarks/ranks_page.py`; do not edit. Two H200 of one host whose peer paths are
switched off stand in for cards that meet on PCIe alone: every message goes through host memory.
DeepSeek-V4-Flash's shapes, {layers} of 43 layers, random weights; kernels are equal on all sides.
Predicted: what a rank computes by the steps recorded on one H200, what it sends by `comm.model`,
nothing overlapped (`python benchmarks/ranks_predicted.py`). Measured, record
[{record}](../benchmarks/records/{record}), commit {commit}:

    {command}

![Input tokens per second of four prompts of 8,192 at once](images/two-cards.svg)
"""


def sides() -> dict[str, Case]:
    """The cases without peers, and one card alone."""
    found = {n: c for n, c in TIMED.items() if c.collectives == "host" or c.environ}
    return {**found, "single": Case("single", "", 1)}


def expected(case: Case) -> dict[str, float]:
    return predicted(case.layout, case.collectives, machine=MACHINE, layers=RECORDED_LAYERS)


def measured(record: dict[str, Any], name: str) -> dict[str, float]:
    """Median seconds by row."""
    return {row["row"]: row["median_s"] for row in record.get(name, {}).get("rows", [])}


def steps(record: dict[str, Any]) -> list[str]:
    """Every case, row by row: predicted / measured (ratio)."""
    rows = list(expected(sides()[NCCL]))
    lines = [
        "Milliseconds, predicted / measured (measured over predicted); – where nobody measured:",
        "",
        "| layout | " + " | ".join(rows) + " |",
        "|---|" + "---|" * len(rows),
    ]
    for name, case in sides().items():
        known, found = expected(case), measured(record, name)
        cells = []
        for row in rows:
            text = f"{1e3 * known[row]:.3g} / –"
            if row in found:
                ratio = found[row] / known[row]
                text = f"{1e3 * known[row]:.3g} / {1e3 * found[row]:.3g} ({ratio:.2f})"
            cells.append(text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def gains(record: dict[str, Any]) -> list[str]:
    """Input tokens a second beside side (a)."""
    lines = [
        f"Input tokens per second beside `{NCCL}`, predicted and measured:",
        "",
        "| layout | 4 x 8,192 at once | over (a) | 8,192 alone | over (a) |",
        "|---|---|---|---|---|",
    ]
    for name, case in sides().items():
        cells = []
        for row, tokens in TOKENS.items():
            pairs = [(expected(case), expected(sides()[NCCL]))]
            pairs.append((measured(record, name), measured(record, NCCL)))
            rates = [f"{tokens / of[row]:,.0f}" if row in of else "–" for of, _ in pairs]
            over = [
                f"{base[row] / of[row]:.2f}" if row in of and row in base else "–"
                for of, base in pairs
            ]
            cells += [" / ".join(rates), " / ".join(over)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def collectives(record: dict[str, Any], tree: Topology) -> list[str]:
    """Sums over both cards by size: ours, NCCL's, and what the model says of each."""
    rows = record["pair_without_peer"]["rows"]
    lines = [
        "One sum over both cards, µs. Limit: bytes of both directions over the link's rate with",
        "both in use.",
        "",
        "| bytes | host: predicted | measured | by | NCCL: predicted | measured | limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        ours, theirs = fastest(rows, size, ("host", "copy")), fastest(rows, size, ("nccl",))
        name, known = links.best(links.HOST, tree, size)
        limit = 2 * size / tree.duplex_bytes_s * 1e6
        lines.append(
            f"| {size:,} | {known:,.1f} ({name}) | {ours[1]:,.1f} | {ours[0]} "
            f"| {links.nccl_through_host(tree, size):,.1f} | {theirs[1]:,.1f} | {limit:,.1f} |"
        )
    return lines


def fastest(rows: dict[str, Any], size: int, backends: tuple[str, ...]) -> tuple[str, float]:
    """What carried `size` bytes in the least time, and its microseconds."""
    found = {}
    for name, row in rows.items():
        words = name.split()
        if words[0] in backends and words[2] == str(size):
            found[f"{words[1]}, {words[3]}"] = float(row["us"])
    by = min(found, key=lambda each: found[each])
    return by, found[by]


def picture(record: dict[str, Any]) -> str:
    """Bars of input tokens per second: above as predicted, below as measured."""
    bars = []
    for name, case in sides().items():
        taken = measured(record, name).get(AT_ONCE)
        known = expected(case)[AT_ONCE]
        bars.append((name, TOKENS[AT_ONCE] / known, TOKENS[AT_ONCE] / taken if taken else 0.0))
    longest = max(max(pair) for _, *pair in bars)
    room, height = WIDTH - LABEL - FIGURES, LINE * (len(bars) + 1)
    parts = []
    for place, (name, known, found) in enumerate(bars):
        y = LINE * place + 6
        told = f"{known:,.0f} predicted, " + (f"{found:,.0f}" if found else "not run")
        parts.append(
            f'<text class="t" x="8" y="{y + 15}">{escape(name)}</text>'
            f'<rect class="a" x="{LABEL}" y="{y}" height="10" '
            f'width="{room * known / longest:.1f}"/>'
            f'<rect class="b" x="{LABEL}" y="{y + 11}" height="10" '
            f'width="{room * found / longest:.1f}"/>'
            f'<text class="t" x="{WIDTH - FIGURES + 8}" y="{y + 15}">{told}</text>'
        )
    title = "Input tokens per second, four prompts of 8,192 at once: predicted (grey), measured"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="pair">'
        f'<title id="pair">{title}</title><style>{STYLE}</style>'
        f'<rect class="p" width="{WIDTH}" height="{height}"/>{"".join(parts)}'
        f'<text class="t" x="8" y="{height - 10}">{title}</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=Path, default=RECORDS / "2026-11-30-2xh200-ranks.json")
    parser.add_argument("--comm", type=Path, default=RECORDS / "2026-11-29-2xh200-comm.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "two-cards.md")
    given = parser.parse_args()
    ranks, comm = (json.loads(path.read_text()) for path in (given.ranks, given.comm))
    head = HEAD.format(
        layers=RECORDED_LAYERS,
        command="python " + ranks["command"].removeprefix("python "),
        record=given.ranks.name,
        commit=ranks.get("commit", "not said"),
    )
    tree = from_facts(find_machine(MACHINE).facts)
    parts = (
        [head.rstrip()],
        ["## Steps", "", *steps(ranks)],
        ["## Prompts", "", *gains(ranks)],
        ["## Sums", "", f"Record {given.comm.name}.", "", *collectives(comm, tree)],
    )
    given.out.write_text("\n\n".join("\n".join(part) for part in parts) + "\n")
    image = given.out.parent / "images" / "two-cards.svg"
    image.write_text(picture(ranks))


if __name__ == "__main__":
    main()
