"""Choices as rows for `doctor`: JSON and a text table. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from metainfer.kernels.choice import Choice, Selection


def rows(choices: Selection | Iterable[Choice]) -> list[dict[str, object]]:
    """One JSON row per (site, phase), in the order of the requests."""
    listed = choices.bundle.choices if isinstance(choices, Selection) else choices
    return [_row(choice) for choice in listed]


def tuned_json(choice: Choice) -> dict[str, object]:
    """How a choice is launched by a record, and what the record was borrowed from; else nothing."""
    tuned = choice.tuned
    if tuned is None:
        return {}
    return {"setting": dict(tuned.values), "tuned": tuned.text}


def text(choices: Selection | Iterable[Choice]) -> str:
    """A table: op, phase, chosen, quality, evidence, slowdown; refused ones below each, indented.

    Equal rows of several phases are joined.
    """
    listed = choices.bundle.choices if isinstance(choices, Selection) else tuple(choices)
    merged: dict[tuple[str, ...], list[str]] = {}
    losers: dict[tuple[str, ...], list[str]] = {}
    for choice in listed:
        refused = [
            f"{loser.impl}: {'; '.join(reason.message for reason in loser.reasons)}"
            for loser in choice.rejected
        ]
        slowdown = "-" if choice.slowdown is None else f"{choice.slowdown:.2f}x"
        key = (
            choice.request.site,
            choice.impl.name,
            choice.quality.value,
            choice.evidence.value,
            slowdown,
            *refused,
        )
        merged.setdefault(key, []).append(choice.request.phase.value)
        losers[key] = refused
    header = ("op", "phase", "chosen", "quality", "evidence", "slowdown")
    body = [(key[0], ",".join(phases), *key[1:5]) for key, phases in merged.items()]
    widths = [max(len(row[i]) for row in [header, *body]) for i in range(len(header))]
    lines = [_line(header, widths)]
    for row, refused in zip(body, losers.values(), strict=True):
        lines.append(_line(row, widths))
        lines += [f"    not {entry}" for entry in refused]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _row(choice: Choice) -> dict[str, object]:
    return {
        "op": choice.request.site,
        "phase": choice.request.phase.value,
        "chosen": {
            "impl": choice.impl.id,
            "quality": choice.quality.value,
            "evidence": choice.evidence.value,
            **tuned_json(choice),
        },
        "why": choice.why,
        "rejected": [
            {"impl": loser.impl, "reasons": [reason.to_json() for reason in loser.reasons]}
            for loser in choice.rejected
        ],
        "slowdown": choice.slowdown,
    }
