"""The tier table as a file: TOML, one per fingerprint, for people to read, edit and pin.

::

    schema = 1
    fingerprint = "3f9c..."
    machine = "8x NVIDIA L20, PCIe 4.0 x16, no peer access"   # what the fingerprint covers

    [[tier]]
    op = "all_reduce"
    world = 4
    dtype = "bfloat16"
    bytes_from = 32_768
    bytes_to = 65_536
    method = "host:two_shot"
    origin = "record"                 # or "seed", "file"
    why = "fastest over 4 sizes from 32768 B"
    us = 12.4
    second = "host:one_shot 12.9 us"
    pinned = true                     # survives tuning; its origin is then "file"

    [refused]
    "ipc:one_shot" = "wrong result on ranks 2 and 5, bytes 0 to 63"

`read` never raises on content: a damaged file, a foreign fingerprint or a bad entry costs that part
and leaves a warning with file and line; what is missing is then the seed table's. Only rank 0 reads
and writes; the others take its table over the wire (law 5).
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metainfer.comm.plan_tiers import Tier
from metainfer.comm.request import ELEMENT_BYTES, MAX_WORLD, Op
from metainfer.core.errors import UserError
from metainfer.core.ledger import Origin
from metainfer.platform.toml_lines import Lines

SCHEMA = 1
_ORIGINS = (Origin.RECORD, Origin.SEED, Origin.FILE)
_FIELDS: dict[str, type] = {
    "op": str,
    "world": int,
    "dtype": str,
    "bytes_from": int,
    "bytes_to": int,
} | {
    "method": str,
    "origin": str,
    "why": str,
}
_OPTIONAL: dict[str, type | tuple[type, ...]] = {
    "us": (int, float),
    "second": str,
    "pinned": bool,
}
_ALL = {**_FIELDS, **_OPTIONAL}

#: Which messages a list of tiers is for: op, ranks, element type.
Key = tuple[str, int, str]
Tiers = Mapping[Key, Sequence[Tier]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """Tiers by key, in ascending size, and what was refused, with its reason."""

    fingerprint: str
    machine: str = ""
    tiers: Mapping[Key, tuple[Tier, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


def render(plan: PlanFile) -> str:
    """The file's text; `parse` gives `plan` back."""
    head = [
        f"schema = {SCHEMA}",
        f"fingerprint = {json.dumps(plan.fingerprint)}",
        f"machine = {json.dumps(plan.machine, ensure_ascii=False)}",
    ]
    blocks = ["\n".join(head)]
    for (op, world, dtype), tiers in plan.tiers.items():
        for tier in tiers:
            lines = ["[[tier]]", f"op = {json.dumps(op)}", f"world = {world}"]
            lines.append(f"dtype = {json.dumps(dtype)}")
            for item in dataclasses.fields(tier):
                value = getattr(tier, item.name)
                if value is not None and value is not False and value != "":
                    lines.append(f"{item.name} = {_text(value)}")
            blocks.append("\n".join(lines))
    if plan.refused:
        rows = [f"{json.dumps(k)} = {json.dumps(v)}" for k, v in plan.refused.items()]
        blocks.append("\n".join(["[refused]", *rows]))
    return "\n\n".join(blocks) + "\n"


def parse(text: str, source: str, fingerprint: str) -> tuple[PlanFile, tuple[str, ...]]:
    """What of `text` can be used on the machine of `fingerprint`, and a warning per part that
    cannot, as ``source:line: what``. Never raises."""
    empty = PlanFile(fingerprint=fingerprint)
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return empty, (f"{source}: not TOML: {error}; the seed table is used",)
    lines = Lines(text)
    if body.get("schema") != SCHEMA:
        what = f"schema {body.get('schema')!r} is not {SCHEMA}"
        return empty, (f"{source}:{lines.of(('schema',))}: {what}; the seed table is used",)
    if body.get("fingerprint") != fingerprint:
        what = f"fingerprint {body.get('fingerprint')!r} is not this machine's {fingerprint!r}"
        return empty, (f"{source}:{lines.of(('fingerprint',))}: {what}; the seed table is used",)
    found: dict[Key, list[Tier]] = {}
    warnings: list[str] = []
    rows = body.get("tier", [])
    for index, row in enumerate(rows if isinstance(rows, list) else []):
        wrong = _problems(row)
        if wrong:
            place = f"{source}:{lines.of(('tier', index))}"
            warnings.append(f"{place}: {', '.join(wrong)}; the entry is left out")
            continue
        found.setdefault((row["op"], row["world"], row["dtype"]), []).append(_tier(row))
    refused = body.get("refused", {})
    kept = {k: v for k, v in refused.items() if isinstance(v, str)}
    tiers = {key: tuple(sorted(each, key=lambda t: t.bytes_from)) for key, each in found.items()}
    machine = str(body.get("machine", ""))
    plan = PlanFile(fingerprint=fingerprint, machine=machine, tiers=tiers, refused=kept)
    return plan, tuple(warnings)


def read(path: Path, fingerprint: str) -> tuple[PlanFile | None, tuple[str, ...]]:
    """`parse` of a file; None and no warning where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, ()
    except (OSError, UnicodeDecodeError) as error:
        return None, (f"{path}: cannot be read: {error}; the seed table is used",)
    return parse(text, str(path), fingerprint)


def write(path: Path, plan: PlanFile) -> None:
    """Put the file in place, whole or not at all.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".plan-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(render(plan))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}.",
            "Choose a folder that can be written.",
            code="not_writable",
        ) from error


def retune(old: PlanFile, new: PlanFile) -> PlanFile:
    """The newly measured plan, in which the pinned tiers of `old` keep their sizes."""
    tiers = dict(new.tiers)
    for key, rows in old.tiers.items():
        pins = [tier for tier in rows if tier.pinned]
        if pins:
            tiers[key] = _overlay(tiers.get(key, ()), pins)
    return dataclasses.replace(new, tiers=tiers)


def _overlay(rows: Sequence[Tier], pins: Sequence[Tier]) -> tuple[Tier, ...]:
    """`rows` with each pin's range cut out and the pin put in its place."""
    kept = list(rows)
    for pin in pins:
        cut: list[Tier] = []
        for row in kept:
            if row.bytes_to <= pin.bytes_from or row.bytes_from >= pin.bytes_to:
                cut.append(row)
                continue
            if row.bytes_from < pin.bytes_from:
                cut.append(dataclasses.replace(row, bytes_to=pin.bytes_from))
            if row.bytes_to > pin.bytes_to:
                cut.append(dataclasses.replace(row, bytes_from=pin.bytes_to, us=None))
        kept = [*cut, pin]
    return tuple(sorted(kept, key=lambda t: t.bytes_from))


def _tier(row: Mapping[str, Any]) -> Tier:
    pinned = bool(row.get("pinned", False))
    us = row.get("us")
    return Tier(
        bytes_from=row["bytes_from"],
        bytes_to=row["bytes_to"],
        method=row["method"],
        origin=Origin.FILE if pinned else Origin(row["origin"]),
        why=row["why"],
        us=None if us is None else float(us),
        second=row.get("second", ""),
        pinned=pinned,
    )


def _problems(row: object) -> list[str]:
    """Everything wrong with an entry."""
    if not isinstance(row, dict):
        return ["not a table"]
    found = [f"{name} is missing" for name in _FIELDS if name not in row]
    found += [f"{name} is not known" for name in row if name not in _ALL]
    for name, kind in _ALL.items():
        if name in row and (
            not isinstance(row[name], kind) or (isinstance(row[name], bool) and kind is not bool)
        ):
            found.append(f"{name} = {row[name]!r} has the wrong type")
    if found:
        return found
    if row["op"] not in {op.value for op in Op}:
        found.append(f"op {row['op']!r} is not known")
    if row["dtype"] not in ELEMENT_BYTES:
        found.append(f"dtype {row['dtype']!r} is not known")
    if not 1 <= row["world"] <= MAX_WORLD:
        found.append(f"world {row['world']} is not between 1 and {MAX_WORLD}")
    if not 0 <= row["bytes_from"] < row["bytes_to"]:
        found.append(f"bytes from {row['bytes_from']} to {row['bytes_to']}")
    if row["method"].count(":") != 1:
        found.append(f"method {row['method']!r} is not backend:algorithm")
    if row["origin"] not in _ORIGINS:
        found.append(f"origin {row['origin']!r} is not one of {', '.join(_ORIGINS)}")
    return found


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true"
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
