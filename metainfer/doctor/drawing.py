"""The topology as inline SVG: sockets above, GPUs below, the link above each, faults marked.

Colours are the page's classes, so that it follows light and dark. A faulty link is thick, dashed
and labelled: never told by colour alone. The same facts stand in a table beside the drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

COLUMN, BOX_WIDTH, BOX_HEIGHT, MARGIN = 148, 134, 62, 14
BEND, LINE = 18, 15  # from a box down to where lines part; height of a text line
LINE_CHARS = 18
SMALLEST = 900  # narrower than this, labels could not be read: the drawing scrolls instead

Rows = Sequence[dict[str, Any]]


def drawing(rows: Rows) -> str:
    """An ``<svg>`` element, "" for no rows. Its size follows from the number of GPUs."""
    if not rows:
        return ""
    children: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        children.setdefault(row["parent"], []).append(row)
    depth = _depths(rows)
    tops = _tops(rows, depth)
    places: dict[str, float] = {}
    leaves = 0
    for first in children.get("", []):
        leaves = _place(first, children, places, leaves)
    width = 2 * MARGIN + leaves * COLUMN
    height = tops[-1] + BOX_HEIGHT + MARGIN
    edges, boxes = [], []
    for row in rows:
        x, y = places[row["id"]], tops[depth[row["id"]]]
        if row["parent"]:
            above = tops[depth[row["parent"]]] + BOX_HEIGHT
            edges.append(_edge(row, places[row["parent"]], above, x, y))
        boxes.append(_box(row, x, y))
    faults = [row for row in rows if row["fault"]]
    gpus = sum(row["kind"] == "gpu" for row in rows)
    told = f"{gpus} GPUs; " + (
        "; ".join(f"{row['name']}: {row['fault']}" for row in faults) or "no faulty link was seen"
    )
    return (
        f'<svg class="topology" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="min-width:{min(width, SMALLEST)}px" role="img" '
        f'aria-labelledby="topology-title topology-desc">'
        f'<title id="topology-title">What hangs on what</title>'
        f'<desc id="topology-desc">{escape(told)}. The table below says the same.</desc>'
        f"{''.join(edges)}{''.join(boxes)}</svg>"
    )


def _depths(rows: Rows) -> dict[str, int]:
    """Rows come after their parents. GPUs stand on the lowest level that any of them has."""
    depth: dict[str, int] = {}
    for row in rows:
        depth[row["id"]] = depth[row["parent"]] + 1 if row["parent"] else 0
    lowest = max((depth[row["id"]] for row in rows if row["kind"] == "gpu"), default=0)
    return depth | {row["id"]: lowest for row in rows if row["kind"] == "gpu"}


def _tops(rows: Rows, depth: dict[str, int]) -> list[int]:
    """Upper edge of each level: below the one above by as much as its labels need."""
    tops = [MARGIN]
    for level in range(1, max(depth.values()) + 1):
        labels = [len(_labels(row)) for row in rows if depth[row["id"]] == level]
        tops.append(tops[-1] + BOX_HEIGHT + BEND + LINE * max(labels, default=0) + 22)
    return tops


def _place(
    row: dict[str, Any],
    children: dict[str, list[dict[str, Any]]],
    places: dict[str, float],
    leaves: int,
) -> int:
    """Centre of each box: a leaf takes the next column, a parent the middle of its children."""
    below = children.get(row["id"], [])
    if not below:
        places[row["id"]] = MARGIN + leaves * COLUMN + COLUMN / 2
        return leaves + 1
    for child in below:
        leaves = _place(child, children, places, leaves)
    centres = [places[child["id"]] for child in below]
    places[row["id"]] = (min(centres) + max(centres)) / 2
    return leaves


def _labels(row: dict[str, Any]) -> list[tuple[str, bool]]:
    """The lines beside the link above a box, and whether each tells of a fault."""
    half = LINE_CHARS * COLUMN // (2 * BOX_WIDTH) + 2
    lines = [(text, False) for text in _wrapped(row["link"], half)]
    for part in filter(None, row["fault"].split("; ")):
        lines += [(text, True) for text in _wrapped(f"⚠ {part}", half)]
    return lines


def _edge(row: dict[str, Any], from_x: float, from_y: float, to_x: float, to_y: float) -> str:
    bend = from_y + BEND
    path = f"M{from_x:g} {from_y:g} V{bend:g} H{to_x:g} V{to_y:g}"
    parts = [f'<path class="link{" bad" if row["fault"] else ""}" d="{path}"/>']
    for number, (text, bad) in enumerate(_labels(row)):
        style, y = ("label bad" if bad else "label"), bend + LINE * (number + 1)
        parts.append(f'<text class="{style}" x="{to_x + 6:g}" y="{y:g}">{escape(text)}</text>')
    return "".join(parts)


def _box(row: dict[str, Any], x: float, y: float) -> str:
    head, _, tail = row["name"].partition(": ")
    if not tail:
        words = row["name"].split()
        head, tail = (" ".join(words[:-1]), words[-1]) if len(words) > 1 else (row["name"], "")
    lines = [head, *_wrapped(tail.removeprefix("NVIDIA "), LINE_CHARS)[:2]]
    left = x - BOX_WIDTH / 2
    shown = "".join(
        f'<text class="{"head" if number == 0 else "label"}" x="{x:g}" '
        f'y="{y + 20 + 17 * number:g}" text-anchor="middle">{escape(line)}</text>'
        for number, line in enumerate(lines)
    )
    return (
        f'<g class="box {escape(row["kind"])}"><title>{escape(row["name"])}</title>'
        f'<rect x="{left:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
        f"{shown}</g>"
    )


def _wrapped(text: str, width: int) -> list[str]:
    """Words in lines of at most `width` characters; a longer word has a line of its own, cut at
    a box's width with an ellipsis."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word if len(word) <= LINE_CHARS else f"{word[: LINE_CHARS - 1]}…")
    return lines
