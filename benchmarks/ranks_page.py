"""Two cards without peer access, from records to a page: tables and a picture.

    python benchmarks/ranks_page.py [--out docs/two-cards.md]

Reads what `ranks_gpu.py` and `comm_gpu.py` wrote (`ranks_predicted.PAIRS`, `SUMS`: a row is taken
from the newest record that has it), what was predicted before each run, and what recorded rows of
other cases expect of it now (`ranks_predicted.py`). Rows that no record has are shown as not run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ranks_picture import Rung, picture
from ranks_predicted import (
    MACHINE,
    PAIRS,
    RECORDED_LAYERS,
    ROWS,
    TIMED,
    Case,
    pairs,
    predicted,
    prompt_row,
    record,
)

from metainfer.comm import model as links
from metainfer.comm.topology import Topology, from_facts
from metainfer.platform.machine_catalog import find_machine

ROOT = Path(__file__).parents[1]
NCCL, ALONE = "two cards, tp2, nccl without peers", "one card, rank 0 of tp2"
"""Side (a): NCCL as it comes, one layout for both phases, the same kernels; and one rank of two
whose peer is emulated."""
PAIR = "two cards, tp2, host"
AT_ONCE, LONE = prompt_row(8192, 4), prompt_row(8192)
TOKENS = {AT_ONCE: 4 * 8192, LONE: 8192}
SUMS = (
    ("2026-11-30-2xh200-streams-fourth.json", "streams"),
    ("2026-11-30-2xh200-streams-third.json", "streams"),
    ("2026-11-30-2xh200-streams-second.json", "streams"),
    ("2026-11-30-2xh200-streams.json", "streams"),
    ("2026-11-29-2xh200-comm.json", "pair_without_peer"),
)
"""Records of sums and their section, the newest first."""
SIZES = (8192, 65_536, 262_144, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
FIRST, LAST = 0, -1
RUNGS = (
    ("tp2 by NCCL, one layout", NCCL, LAST),
    ("sums through host memory by ours", "two cards, tp2, host", FIRST),
    ("halves of a chunk in turns", "two cards, tp2, host, halves", FIRST),
    ("whole experts on ranks: ep2, halves", "two cards, ep2, host, halves", FIRST),
    ("long calls by copies, rows in FP8, later code", "two cards, ep2, host, halves", LAST),
)
"""From side (a) on, each beside what stands above it; of each case the first or the last record."""

HEAD = """# Two cards without peer access

Written by `python benchmarks/ranks_page.py`; do not edit. Two H200 of one host whose peer paths are
switched off stand in for cards that meet on PCIe alone: every message goes through host memory.
DeepSeek-V4-Flash's shapes, {layers} of 43 layers, random weights; in one record both sides
run the same kernels, between records code and machines differ. Records, the newest first:

{records}

![Input tokens per second of four prompts of 8,192 at once, over NCCL's](images/two-cards.svg)
"""


def sides() -> dict[str, Case]:
    """The cases without peers."""
    return {n: c for n, c in TIMED.items() if c.apart}


def rows_of(said: dict[str, Any], key: str = "median_s") -> dict[str, float]:
    """Seconds by row."""
    return {row["row"]: row[key] for row in said.get("rows", []) if key in row}


def measured(case: str) -> dict[str, float]:
    return rows_of(pairs()[case][1]) if case in pairs() else {}


def steps() -> Iterator[str]:
    """Every case, row by row: measured, over what was predicted, over what others expect."""
    yield "Milliseconds, measured (over the prediction before the run; over what recorded rows of"
    yield "one card and of other layouts or collectives expect now: no case prices itself, a chunk"
    yield "that no graph holds takes as long as its launches at least, nothing overlaps, and halves"
    yield "gain what pairs of chunks did). – where nobody measured: what is expected in brackets."
    yield ""
    yield "| case | record | " + " | ".join(ROWS) + " |"
    yield "|---|---|" + "---|" * len(ROWS)
    for name, case in sides().items():
        found = measured(name)
        before = rows_of(pairs()[name][1], "predicted_s") if found else {}
        known = predicted(
            case.layout, case.collectives, machine=MACHINE, layers=RECORDED_LAYERS,
            halves=case.halves or 0,
        )  # fmt: skip
        cells = [number(pairs()[name][0]) if found else "–"]
        for row in ROWS:
            if row not in found:
                cells.append(f"– [{1e3 * known[row]:.3g}]")
                continue
            over = f"{found[row] / before[row]:.2f}" if row in before else "–"
            cells.append(f"{1e3 * found[row]:.3g} ({over}; {found[row] / known[row]:.2f})")
        yield f"| {name} | " + " | ".join(cells) + " |"
    for name in (n for n in pairs() if not TIMED[n].apart):
        found = measured(name)
        cells = [f"{1e3 * found[row]:.3g}" if row in found else "–" for row in ROWS]
        yield f"| with peers: {name} | {number(pairs()[name][0])} | " + " | ".join(cells) + " |"


def number(name: str) -> str:
    return f"[{PAIRS.index(name) + 1}]"


def gains() -> Iterator[str]:
    """Input tokens a second beside side (a)."""
    yield f"Input tokens per second, and over `{NCCL}` (bar: 1.5) of the same record, or of the"
    yield "newest one where that has none:"
    yield ""
    yield "| case | record | 4 x 8,192 at once | over | 8,192 alone | over |"
    yield "|---|---|---|---|---|---|"
    for name in PAIRS:
        base = rows_of(record(name).get(NCCL, {})) or measured(NCCL)
        for case in sides():
            found = rows_of(record(name).get(case, {}))
            if not found or case == ALONE:
                continue
            cells = []
            for row, tokens in TOKENS.items():
                cells.append(f"{tokens / found[row]:,.0f}" if row in found else "–")
                both = row in found and row in base
                cells.append(f"{base[row] / found[row]:.2f}" if both else "–")
            yield f"| {case} | {number(name)} | " + " | ".join(cells) + " |"


def rungs() -> Iterator[Rung]:
    """Cases of `RUNGS` that were measured, over side (a) of the same record."""
    for label, case, which in RUNGS:
        found = []
        for name in reversed(PAIRS):
            base, rows = (rows_of(record(name).get(each, {})) for each in (NCCL, case))
            if AT_ONCE in base and AT_ONCE in rows:
                rate = TOKENS[AT_ONCE] / rows[AT_ONCE]
                found.append(Rung(f"{label} {number(name)}", base[AT_ONCE] / rows[AT_ONCE], rate))
        if found:
            yield found[which]


def ladder() -> Iterator[str]:
    yield "Four prompts of 8,192 at once, each line beside the one above it:"
    yield ""
    yield "| | over NCCL's `tp2` | over the line above | tokens/s |"
    yield "|---|---|---|---|"
    above = 1.0
    for rung in rungs():
        yield f"| {rung.label} | {rung.over:.2f} | {rung.over / above:.2f} | {rung.rate:,.0f} |"
        above = rung.over


def alone() -> Iterator[str]:
    """One rank whose peer is emulated beside the pair."""
    found, pair = measured(ALONE), measured(PAIR)
    if not found or not pair:
        yield "Not run yet: one rank of `tp2` alone on a card, its peer emulated."
        return
    yield "One rank of `tp2` alone on a card beside the pair without halves: its kernels run, its"
    yield "bytes cross the card's own link, and each collective ends when the cost model of this"
    yield "pair says so (ADR 0047). From 8,192 tokens on the pair sums in pieces, which a rank"
    yield "alone cannot. They gain 1.053 at 8,192 (record 2026-11-30-2xh200-overlap-tp2), so"
    yield "without them the pair would take about 143 ms, and the rank alone be about 8 % under it;"
    yield "in longer rows likewise."
    yield ""
    yield "| row | alone, ms | pair, ms | error |"
    yield "|---|---|---|---|"
    for row in (row for row in ROWS if row in found and row in pair):
        off = found[row] / pair[row] - 1
        yield f"| {row} | {1e3 * found[row]:.3g} | {1e3 * pair[row]:.3g} | {off:+.0%} |"
    yield ""
    yield f"Records {number(pairs()[ALONE][0])} and {number(pairs()[PAIR][0])}, each by its code."


def collectives(tree: Topology) -> Iterator[str]:
    """Sums over both cards by size: ours, NCCL's, and what the model says of each."""
    yield "One sum over both cards, µs, from the newest record that has the size. Limit: bytes of"
    yield "both directions over 93 GB/s, the link's rate with both in use. Predicted: by the model"
    yield "as it is now; for copies its rate and start (92 GB/s, 80 µs) are fitted to the record"
    yield "beside it. Kernels have one rate, 56 GB/s, within 20 % of sums by those of ADR 0049 and"
    yield "of longer sums, gathers and scattered sums by older ones, which nobody ran again."
    yield ""
    yield (
        "| bytes | host: predicted (copy: fitted) | measured | by "
        "| NCCL: predicted | measured | limit |"
    )
    yield "|---|---|---|---|---|---|---|"
    for size in SIZES:
        ours, theirs = fastest(size, ("host", "copy")), fastest(size, ("nccl",))
        name, known = links.best(links.HOST, tree, size)
        limit = links.host_limit_us("one_shot", tree.world, size)
        yield (
            f"| {size:,} | {known:,.1f} ({name}) | {ours[1]:,.1f} | {ours[0]} "
            f"| {links.nccl_through_host(tree, size):,.1f} | {theirs[1]:,.1f} | {limit:,.1f} |"
        )
    yield ""
    yield "Records: " + ", ".join(f"`{name}`" for name, _ in SUMS) + "."


def fastest(size: int, backends: tuple[str, ...]) -> tuple[str, float]:
    """What carried `size` bytes in the least time, and its microseconds."""
    for name, section in SUMS:
        found = {}
        for row, said in record(name)[section]["rows"].items():
            words = row.split()
            if words[0] in backends and words[2] == str(size):
                found[f"{words[0]} {words[1]}, {' '.join(words[3:])}"] = float(said["us"])
        if found:
            by = min(found, key=lambda each: found[each])
            return by, found[by]
    raise ValueError(f"no record has sums of {size} bytes")


def listed() -> Iterator[str]:
    for place, name in enumerate(PAIRS, 1):
        said = record(name)
        link = f"[{name}](../benchmarks/records/{name})"
        yield f"{place}. {link}, commit {said.get('commit', 'not said')}: `{said['command']}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "two-cards.md")
    given = parser.parse_args()
    parts = (
        [HEAD.format(layers=RECORDED_LAYERS, records="\n".join(listed())).rstrip()],
        ["## Prompts", "", *gains()],
        ["## What gains it", "", *ladder()],
        ["## Steps", "", *steps()],
        ["## One rank alone", "", *alone()],
        ["## Sums", "", *collectives(from_facts(find_machine(MACHINE).facts))],
    )
    given.out.write_text("\n\n".join("\n".join(part) for part in parts) + "\n")
    title = "Input tokens per second of four prompts of 8,192 at once, over those of tp2 by NCCL"
    image = given.out.parent / "images" / "two-cards.svg"
    image.write_text(picture(title, list(rungs())))


if __name__ == "__main__":
    main()
