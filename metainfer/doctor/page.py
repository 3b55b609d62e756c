"""The report as one self-contained page: no script, no font, no picture from elsewhere.

Made from the JSON document alone, so that a saved document gives the same page. Everything that
came from a machine is escaped. Light and dark follow the reader's system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import metainfer
from metainfer.doctor.drawing import drawing
from metainfer.doctor.finding import HARMLESS, Severity

Document = dict[str, Any]
HEADINGS = {
    Severity.BLOCKER: ("Blockers", "Something asked for cannot work until this is changed."),
    Severity.SLOWS: ("Slows", "It works, below what this machine can do."),
    Severity.INFORMATION: (
        "Notes and unknowns",
        "Worth knowing; what could not be read is unknown and never counts as good.",
    ),
}
MOST_REASONS = 8
#: Word in a finding's id -> what a newcomer needs to know.
WORDS = {
    "link.acs": (
        "Access control (ACS)",
        "A setting of PCIe ports. Where it is on, data between two GPUs below one switch takes the "
        "long way up to the processor and back.",
    ),
    "link.iommu": (
        "IOMMU",
        "The unit that translates addresses of devices. Pass-through (iommu=pt) leaves them as "
        "they are, which direct traffic between GPUs needs.",
    ),
    "link.width": (
        "Link width and generation",
        "A PCIe link has lanes (x16 is full) and a generation; each generation doubles a lane's "
        "speed. Half the lanes is half the speed of everything that leaves the card.",
    ),
    "link.window": (
        "Memory window (BAR)",
        "The part of a card's memory that others on the bus can address. 256 MiB is too small for "
        "direct traffic between GPUs.",
    ),
    "link.peer": (
        "Peer access",
        "One GPU reading or writing another's memory directly. Without it every byte goes through "
        "the host's memory.",
    ),
    "numa": (
        "Memory node",
        "A processor with the memory and cards that hang on it. Crossing to another costs time.",
    ),
    "ops": (
        "Native, compatible, reference",
        "How good a chosen kernel is: on the card's own instructions, portable, or only right.",
    ),
}


def page(document: Document) -> str:
    """The page as text, UTF-8 when written."""
    title = f"Meta-Infer doctor: {_machine_name(document)}"
    sections = [
        _verdict(document),
        _topology(document),
        *(_findings(document, grade) for grade in Severity),
        _operations(document),
        _audit(document),
        _machine(document),
        _words(document),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the report</a>\n'
        f"<header><h1>{escape(title)}</h1>{_lead(document)}</header>\n"
        f'<main id="main">\n{"".join(sections)}</main>\n'
        f"<footer>metainfer {metainfer.__version__}, <code>metainfer doctor --html</code>. "
        "Nothing on this page was sent anywhere.</footer>\n</body>\n</html>\n"
    )


@cache
def _style() -> str:
    return (resources.files("metainfer.doctor") / "data" / "page.css").read_text("utf-8")


def _machine_name(document: Document) -> str:
    machine = document["machine"]
    if machine.get("name"):
        return str(machine["name"])
    devices = machine["devices"]
    return f"{len(devices)} x {devices[0]['name']}" if devices else str(machine["platform"])


def _lead(document: Document) -> str:
    machine = document["machine"]
    if machine.get("file"):
        text = (
            f"A described machine, from {machine['file']}: nothing was read off it and nothing "
            "was measured."
        )
    else:
        text = "Read off the machine; speeds and bytes are proven only where a line says so."
    return f'<p class="quiet">{escape(text)}</p>'


def _own(document: Document) -> list[dict[str, Any]]:
    """Findings about this machine; those about a stock engine have a section of their own."""
    return [f for f in document["findings"] if not f["id"].startswith("stock.")]


def _verdict(document: Document) -> str:
    """What a newcomer needs first: is it fine, and if not, why, worst first."""
    own = _own(document)
    bad = [f for f in own if f["severity"] != Severity.INFORMATION.value]
    unread = sum(f["id"].endswith(".unknown") for f in own)
    if bad:
        worst, head = bad[0]["severity"], "Why this machine is slow or stopped, worst first:"
        items = [f"{places}: {f['what']}" for places, f in _joined(bad)]
        more = len(items) - MOST_REASONS
        tail = f'<p class="quiet">and {more} more below.</p>' if more > 0 else ""
        listed = "".join(f"<li>{escape(item)}</li>" for item in items[:MOST_REASONS])
        body = f"<ol>{listed}</ol>{tail}"
    else:
        worst = "unknown" if unread else "good"
        head, body = "Nothing that blocks or slows was found.", ""
    if unread:
        body += f"<p>{unread} things could not be read, and may be wrong: see the notes.</p>"
    if document["ops"]:
        lesser = document["summary"].partition("; estimated")[0].partition("; 0 blockers")[0]
        body += f"<p>Model: {escape(lesser)}.</p>"
    if "audit" in document:
        body += f"<p>Stock engine, {escape(document['audit']['summary'])}.</p>"
    return (
        f'<section aria-labelledby="short"><h2 id="short">In short</h2>'
        f'<div class="verdict {worst}"><strong>{escape(head)}</strong>{body}</div>'
        f'<p class="quiet">{escape(document["summary"])}</p></section>\n'
    )


def _joined(found: Iterable[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Findings that say the same of several places, as one with all places."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for finding in found:
        groups.setdefault((finding["id"], finding["what"]), []).append(finding)
    return [(_places([f["where"] for f in group]), group[0]) for group in groups.values()]


def _places(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else f"{len(places)} places, from {places[0]}"


def _topology(document: Document) -> str:
    rows = document["topology"]
    if not rows:
        return ""
    names = {row["id"]: row["name"] for row in rows}
    cells = [
        (
            row["name"],
            names.get(row["parent"], ""),
            row["link"] or ("" if row["kind"] in ("socket", "root") else "unknown"),
            row["fault"] or "none seen",
        )
        for row in rows
    ]
    return (
        '<section aria-labelledby="topology"><h2 id="topology">Topology</h2>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Drawing of the topology">'
        f"{drawing(rows)}</div>"
        "<details><summary>The same as a table</summary>"
        + _table(
            "Each part, what it hangs on, and the link between them.",
            ("Part", "Hangs on", "Link now", "Fault"),
            ([escape(cell) for cell in row] for row in cells),
        )
        + "</details></section>\n"
    )


def _findings(document: Document, grade: Severity) -> str:
    found = [f for f in _own(document) if f["severity"] == grade.value]
    heading, caption = HEADINGS[grade]
    name = f"grade-{grade.value}"
    if not found:
        body = '<p class="quiet">None.</p>'
    else:
        body = _table(
            caption,
            ("Where", "What", "Seen", "Remedy", "Its risk"),
            (_finding_row(group) for group in _same(found)),
            "findings",
        )
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{heading} ({len(found)})</h2>'
        f"{body}</section>\n"
    )


def _same(found: Iterable[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """Findings with one text and one remedy, together."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for finding in found:
        key = (finding["id"], finding["what"], finding["remedy"])
        groups.setdefault(key, []).append(finding)
    return groups.values()


def _finding_row(group: Sequence[dict[str, Any]]) -> list[str]:
    first = group[0]
    return [
        "<br>".join(escape(finding["where"]) for finding in group),
        escape(first["what"]),
        f"<code>{escape(first['evidence'])}</code>",
        escape(first["remedy"]) or "none",
        escape("" if first["risk"] == HARMLESS else first["risk"]) or "none known",
    ]


def _operations(document: Document) -> str:
    rows = document["ops"]
    if not rows:
        return ""
    cells = []
    for row in rows:
        chosen = row["chosen"]
        losers = "".join(
            f"<li>{escape(loser['impl'])}: "
            f"{escape('; '.join(reason['message'] for reason in loser['reasons']))}</li>"
            for loser in row["rejected"]
        )
        count = len(row["rejected"])
        refused = f"<details><summary>{count} refused</summary><ul>{losers}</ul></details>"
        price = "unknown" if row["slowdown"] is None else f"×{row['slowdown']:.2f}"
        cells.append(
            [
                escape(row["op"]),
                escape(row["phase"]),
                escape(chosen["impl"]) + (refused if count else ""),
                _grade(chosen["quality"]),
                escape(chosen["evidence"]),
                price,
            ]
        )
    return (
        '<section aria-labelledby="ops"><h2 id="ops">Operations of the model</h2>'
        + _table(
            "For each operation and phase: the kernel chosen, how good it is, how we know, and its "
            "time over that of the fastest known.",
            ("Operation", "Phase", "Chosen kernel", "Quality", "Evidence", "Slowdown"),
            cells,
        )
        + "</section>\n"
    )


def _audit(document: Document) -> str:
    made = document.get("audit")
    if not made:
        return ""
    cells = [
        [
            escape(row["path"]),
            _grade(row["outcome"]),
            escape(row["what"]),
            f"<code>{escape(row['evidence'])}</code>",
            escape(row["ours"]) + ("" if row["built"] else " (designed, not built yet)"),
            escape(row["origin"]),
        ]
        for row in made["rows"]
    ]
    unread = "".join(f"<li><code>{escape(word)}</code></li>" for word in made["not_understood"])
    listed = f"<h3>Flags that were not understood</h3><ul>{unread}</ul>" if unread else ""
    command = escape(made["command"]["text"])
    return (
        f'<section aria-labelledby="audit"><h2 id="audit">What {escape(made["engine"])} loses here'
        f"</h2><p><code>{command}</code></p><p>{escape(made['summary'])}. Facts as read in "
        f"{escape(made['read'])}; model: {escape(made['model']['how'])}.</p>"
        + _table(
            "Fast paths of the stock engine that close on this machine and model.",
            ("Path", "Outcome", "What happens", "Because", "What we do instead", "Origin"),
            cells,
            "audit",
        )
        + f"{listed}</section>\n"
    )


def _machine(document: Document) -> str:
    machine = document["machine"]
    cells = []
    for index, device in enumerate(machine["devices"]):
        pair = device["capability"]
        memory = device["memory_bytes"]
        cells.append(
            [
                str(index),
                escape(device["name"]),
                "unknown" if pair is None else escape(".".join(map(str, pair))),
                "unknown" if memory is None else f"{memory / 2**30:.1f} GiB",
                escape(device["bus_id"] or "unknown"),
            ]
        )
    host = [
        [escape(name.replace("_", " ")), escape(_value(name, value))]
        for name, value in machine["host"].items()
    ]
    software = [
        [escape(name), escape(version or "not installed")]
        for name, version in document["software"].items()
    ]
    return (
        '<section aria-labelledby="machine"><h2 id="machine">Machine and software</h2>'
        + _table("Devices.", ("Number", "Name", "Capability", "Memory", "Bus address"), cells)
        + _table("Host.", ("Fact", "Value"), host)
        + _table("Software.", ("Package", "Version"), software)
        + "</section>\n"
    )


def _words(document: Document) -> str:
    """The words that this report uses, for someone who meets them first."""
    used = [
        (term, text)
        for start, (term, text) in WORDS.items()
        if any(f["id"].startswith(start) for f in document["findings"])
        or (start == "ops" and document["ops"])
    ]
    if not used:
        return ""
    listed = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in used)
    return (
        f'<section aria-labelledby="words"><h2 id="words">Words</h2><dl>{listed}</dl></section>\n'
    )


def _grade(word: str) -> str:
    return f'<span class="grade {escape(word)}">{escape(word)}</span>'


def _value(name: str, value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value / 2**30:.1f} GiB" if name == "memory_bytes" else str(value)


def _table(
    caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], style: str = ""
) -> str:
    """A table whose cells are HTML already; the first cell of a row names it."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{style}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
