"""The ladder as an SVG picture: per load one bar a rung, each beginning where the last one ended.

Lengths are rates over the baseline's, on a linear scale; the thin line at a bar's end is the 95 %
interval of its gain. Colours follow the reader's light or dark setting, and every number is written
beside its bar.
"""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, LABEL, FIGURES, LINE, HEAD = 860, 190, 150, 24, 34
STYLE = (
    ".t{font:13px system-ui,sans-serif;fill:#1c2024}.h{font-weight:600}.b{fill:#3b6fb6}"
    ".e{stroke:#1c2024;stroke-width:1.5}.a{fill:#8a9199}.p{fill:#fff}"
    "@media(prefers-color-scheme:dark){.t{fill:#e6e8ea}.b{fill:#7aa7e6}.e{stroke:#e6e8ea}"
    ".a{fill:#737b84}.p{fill:#15181b}}"
)


def picture(document: dict[str, Any]) -> str:
    """An ``<svg>`` document of what `bench.ladder.run` returned."""
    blocks = [_steps(document, place) for place in range(len(document["total"]))]
    longest = max(max(end for _, _, end, _, _ in block) for block in blocks)
    room = WIDTH - LABEL - FIGURES
    height = sum(HEAD + LINE * len(block) for block in blocks) + LINE
    parts, y = [], 0
    for whole, block in zip(document["total"], blocks, strict=True):
        y += HEAD
        title = f"{whole['load']}: {whole['before']:.0f} to {whole['after']:.0f} {whole['unit']}"
        parts.append(f'<text class="t h" x="8" y="{y - 10}">{escape(title)}</text>')
        for name, begin, end, interval, kind in block:
            left, right = (LABEL + room * value / longest for value in sorted((begin, end)))
            low, high = (LABEL + room * value / longest for value in interval)
            parts.append(
                f'<text class="t" x="8" y="{y + 14}">{escape(name)}</text>'
                f'<rect class="{kind}" x="{left:.1f}" y="{y + 3}" height="14" '
                f'width="{max(right - left, 1):.1f}"/>'
                f'<path class="e" d="M{low:.1f} {y + 10}H{high:.1f}"/>'
                f'<text class="t" x="{WIDTH - FIGURES + 8}" y="{y + 14}">'
                f"{end / begin if kind == 'b' else end:.2f}x, at {end:.2f}x</text>"
            )
            y += LINE
    told = f"{document['model']} from the {document['profile']} profile, rates over the baseline's"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="ladder">'
        f'<title id="ladder">{escape(told)}</title><style>{STYLE}</style>'
        f'<rect class="p" width="{WIDTH}" height="{height}"/>{"".join(parts)}'
        f'<text class="t" x="8" y="{height - 6}">{escape(told)}</text></svg>\n'
    )


Step = tuple[str, float, float, tuple[float, float], str]
"""(rung, where it begins, where it ends, ends of its interval, class of the bar)"""


def _steps(document: dict[str, Any], place: int) -> list[Step]:
    at, found = 1.0, list[Step]()
    for row in document["rungs"]:
        gain = row["cumulative"][place]
        low, high = gain["interval"]
        found.append((row["rung"], at, at * gain["gain"], (at * low, at * high), "b"))
        at *= gain["gain"]
    whole = document["total"][place]
    low, high = whole["interval"]
    return [*found, ("both ends, measured", 0.0, whole["gain"], (low, high), "a")]
