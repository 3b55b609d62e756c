"""The report for people: machine, findings with evidence and remedy, operations, summary."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from metainfer.doctor.finding import HARMLESS, Severity
from metainfer.platform.facts import CPU


def text(report: dict[str, Any], width: int = 100) -> str:
    """The report for people, without colour codes."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False)
    for part in _parts(report):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _parts(report: dict[str, Any]) -> Iterable[Any]:
    """What `text` prints, as rich renderables: machine, findings, operations, summary."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    machine = report["machine"]
    shown = Table.grid(padding=(0, 2))
    lines = [_device_line(device) for device in machine["devices"]]
    for line in dict.fromkeys(lines):
        places = [str(index) for index, other in enumerate(lines) if other == line]
        shown.add_row(f"device {', '.join(places)}", line)
    shown.add_row("host", _host_line(machine["host"]))
    present = [f"{name} {number}" for name, number in report["software"].items() if number]
    shown.add_row("software", Text(", ".join(present)))
    yield shown
    for level in Severity:
        for finding in report["findings"]:
            if finding["severity"] == level.value:
                yield Text(f"{level.value}: {finding['where']}: {finding['what']}")
                for line in _below(finding):
                    yield Padding(Text(line), (0, 0, 0, 4))
    if report["ops"]:
        yield from _operations(report["ops"])
    if "audit" in report:
        yield Text(report["audit"]["summary"])
    yield Text(report["summary"])


def _below(finding: dict[str, Any]) -> Iterable[str]:
    """The lines below a finding: how we know, what to do, what that risks."""
    if finding["evidence"]:
        yield f"seen: {finding['evidence']}"
    if finding["remedy"]:
        yield f"-> {finding['remedy']}"
    if finding["risk"] and finding["risk"] != HARMLESS:
        yield f"risk: {finding['risk']}"


def _operations(rows: Sequence[dict[str, Any]]) -> Iterable[Any]:
    """Equal rows of several phases are joined; refused implementations stand below each."""
    from rich.padding import Padding
    from rich.text import Text

    merged: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        chosen, slowdown = row["chosen"], row["slowdown"]
        refused = [
            f"{loser['impl']}: {'; '.join(reason['message'] for reason in loser['reasons'])}"
            for loser in row["rejected"]
        ]
        price = "-" if slowdown is None else f"×{slowdown:.2f}"
        key = (row["op"], chosen["impl"], chosen["quality"], chosen["evidence"], price, *refused)
        merged.setdefault(key, []).append(row["phase"])
    lines: list[tuple[str, ...]] = [("op", "phase", "chosen", "quality", "evidence", "slowdown")]
    lines += [(key[0], ", ".join(phases), *key[1:5]) for key, phases in merged.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    shown = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    yield Text(shown[0])
    for line, key in zip(shown[1:], merged, strict=True):
        yield Text(line.rstrip())
        for refused_line in key[5:]:
            yield Padding(Text(f"not {refused_line}"), (0, 0, 0, 4))


def _device_line(device: dict[str, Any]) -> str:
    parts = [device["name"]]
    if device["capability"]:
        parts.append(f"capability {'.'.join(map(str, device['capability']))}")
    unit = "cores" if device["kind"] == CPU else "multiprocessors"
    parts.append(f"{device['units'] or 'unknown number of'} {unit}")
    memory = device["memory_bytes"]
    parts.append("memory unknown" if memory is None else f"{memory / 2**30:.1f} GiB")
    return ", ".join(parts)


def _host_line(found: dict[str, Any]) -> str:
    memory = found["memory_bytes"]
    return ", ".join(
        (
            str(found["processor"] or "processor unknown"),
            f"{found['usable_cores'] or 'unknown'} usable cores",
            "memory unknown" if memory is None else f"{memory / 2**30:.1f} GiB",
            f"compiler {found['compiler'] or 'none'}",
            f"IOMMU {found['iommu'] or 'unknown'}",
        )
    )
