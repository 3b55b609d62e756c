"""The ladder of two cards as an SVG picture: each bar begins where the one above it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from metainfer.bench.ladder_picture import STYLE

WIDTH, LABEL, FIGURES, LINE = 860, 270, 170, 28


@dataclass(frozen=True, slots=True)
class Rung:
    """`over`: rate over the first rung's; `rate`: tokens a second."""

    label: str
    over: float
    rate: float


def picture(title: str, rungs: Sequence[Rung]) -> str:
    """An ``<svg>`` document; lengths on a linear scale from zero, every number beside its bar."""
    longest = max((rung.over for rung in rungs), default=1.0)
    scale, height = (WIDTH - LABEL - FIGURES) / longest, LINE * (len(rungs) + 1)
    parts, above = [], 0.0
    for place, rung in enumerate(rungs):
        y = LINE * place + 6
        left, right = sorted((above, rung.over))
        parts.append(
            f'<text class="t" x="8" y="{y + 13}">{escape(rung.label)}</text>'
            f'<rect class="{"b" if rung.over >= above else "a"}" x="{LABEL + scale * left:.1f}" '
            f'y="{y}" height="16" width="{max(scale * (right - left), 1):.1f}"/>'
            f'<text class="t" x="{WIDTH - FIGURES + 8}" y="{y + 13}">'
            f"{rung.over:.2f}x, {rung.rate:,.0f} tokens/s</text>"
        )
        above = rung.over
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="pair">'
        f'<title id="pair">{escape(title)}</title><style>{STYLE}</style>'
        f'<rect class="p" width="{WIDTH}" height="{height}"/>{"".join(parts)}'
        f'<text class="t" x="8" y="{height - 8}">{escape(title)}</text></svg>\n'
    )
