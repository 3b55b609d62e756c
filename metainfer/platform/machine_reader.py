"""Reads and checks a machine file; `machine_file` has the format. Collects every complaint first.

What is refused: unknown keys, wrong types, negative sizes, values without an origin, counts that do
not agree, element types or features that the capability does not have, a power cap above the card's
maximum, a link faster than its generation and width allow.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from metainfer.core.errors import UsageError
from metainfer.platform.capability import FLOAT32, TF32, Instructions, instructions
from metainfer.platform.facts import CUDA, DeviceFacts, Facts, HostFacts, LinkFacts
from metainfer.platform.machine_checks import device_complaints, link_complaints
from metainfer.platform.origins import DERIVED, KINDS, PROBED, SEED, UNKNOWN, origin
from metainfer.platform.toml_lines import Lines, Path

HOST_TO_EACH = "host-to-each"
EACH_PAIR = "each-pair"
_TOP = ("schema", "name", "about", "platform", "devices", "origins", "host", "device", "link",
        "software")  # fmt: skip
INSTRUCTION_FIELDS = ("dot_types", "storage_types", "features")
_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple[int, int]": "two whole numbers, as in [9, 0]",
    "frozenset[str]": "a list of texts",
}
_NOT_ZERO = frozenset({"memory_bytes", "units", "warp", "shared_bytes_per_block"})
_KINDS_HERE = KINDS - {SEED}


def read_machine(text: str, source: str, schema: int) -> tuple[str, str, Facts]:
    """Name, description and facts of a machine file.

    Raises:
        UsageError: all complaints, each as ``source:line: what``.
    """
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column \d+\)", str(error))
        what = str(error).partition(" (at ")[0]
        line = place[1] if place else len(text.splitlines()) or 1
        raise _refused([f"{source}:{line}: no TOML: {what}"]) from error
    reader = _Reader(source, Lines(text))
    facts = reader.facts(body, schema)
    if reader.complaints:
        raise _refused([f"{source}:{line}: {what}" for line, what in sorted(reader.complaints)])
    assert facts is not None
    return str(body["name"]), str(body.get("about", "")), facts


def _refused(lines: list[str]) -> UsageError:
    return UsageError("; ".join(lines) + ".", "Correct the machine file.", code="bad_machine_file")


class _Reader:
    """One reading. A value that is refused is None from there on, so that all others are seen."""

    def __init__(self, source: str, lines: Lines) -> None:
        self.source = source
        self.lines = lines
        self.complaints: set[tuple[int, str]] = set()
        self.origins: dict[str, str] = {}

    def complain(self, path: Path, what: str) -> None:
        self.complaints.add((self.lines.of(path), what))

    def facts(self, body: dict[str, Any], schema: int) -> Facts | None:
        self.keys(body, _TOP, ())
        if body.get("schema") != schema:
            self.complain(("schema",), f"schema is {body.get('schema')!r}, this reads {schema}")
        for key in ("name", "platform"):
            if not (isinstance(body.get(key), str) and body[key]):
                self.complain((key,), f"{key} must be a text")
        if not isinstance(body.get("about", ""), str):
            self.complain(("about",), "about must be a text")
        self.prefixes(self.table(body, "origins"))
        host = self.item(HostFacts, self.table(body, "host"), ("host",), ["host"])
        devices = self.devices(self.tables(body, "device"), body)
        links = self.links(self.tables(body, "link"), len(devices))
        software = self.software(self.table(body, "software"))
        if self.complaints:
            return None
        return Facts(
            platform=body["platform"],
            devices=tuple(devices),
            host=HostFacts(**host),
            links=tuple(links),
            software=software,
            origins=dict(sorted(self.origins.items())),
        )

    def table(self, body: dict[str, Any], key: str) -> dict[str, Any]:
        found = body.get(key, {})
        if isinstance(found, dict):
            return found
        self.complain((key,), f"{key} must be a table, [{key}]")
        return {}

    def tables(self, body: dict[str, Any], key: str) -> list[dict[str, Any]]:
        found = body.get(key, [])
        if isinstance(found, list) and all(isinstance(item, dict) for item in found):
            return found
        self.complain((key,), f"{key} must be a list of tables, [[{key}]]")
        return []

    def keys(self, found: Mapping[str, Any], known: Iterable[str], path: Path) -> None:
        listed = tuple(known)
        for key in found:
            if key not in listed:
                near = difflib.get_close_matches(key, listed, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(listed)}"
                self.complain((*path, key), f"{key} is not a key here ({hint})")

    def prefixes(self, found: dict[str, Any]) -> None:
        """``[origins]``: for parts of paths, and for what was asked in vain."""
        for key, said in found.items():
            if self.said(said, ("origins", key)):
                self.origins[key] = said

    def said(self, said: object, path: Path) -> bool:
        """Whether `said` is an origin; complains otherwise."""
        kind, _, detail = said.partition(": ") if isinstance(said, str) else ("", "", "")
        if kind in _KINDS_HERE and (detail or kind == UNKNOWN):
            return True
        listed = ", ".join(sorted(_KINDS_HERE))
        self.complain(path, f"origin {said!r} is not of the form 'KIND: detail' with {listed}")
        return False

    def covered(self, key: str) -> bool:
        parts = key.split(".")
        return any(".".join(parts[:n]) in self.origins for n in range(1, len(parts) + 1))

    def item(
        self, cls: type[Any], found: dict[str, Any], path: Path, prefixes: list[str]
    ) -> dict[str, Any]:
        """The fields of one table; `prefixes`: the origin paths of all that it describes."""
        values: dict[str, Any] = {}
        types = {f.name: str(f.type) for f in dataclasses.fields(cls)}
        for name, raw in found.items():
            kind = types.get(name)
            if kind is None or name in ("source", "target"):
                continue
            place = (*path, name)
            if kind.startswith("Mapping"):
                values[name] = self.rates(raw, place, [f"{p}.{name}" for p in prefixes])
                continue
            base = kind.removesuffix(" | None")
            value = self.value(raw, base, place, [f"{p}.{name}" for p in prefixes])
            if value is not None:
                values[name] = value
        return values

    def rates(self, raw: object, place: Path, keys: list[str]) -> dict[str, float]:
        if not isinstance(raw, dict):
            self.complain(place, f"{place[-1]} must be rates by element type")
            return {}
        known = {TF32, FLOAT32, "float64"}.union(*(r.dot_types for r in _rules()))
        self.keys(raw, sorted(known), place)
        found = {}
        for element, each in raw.items():
            paths = [f"{key}.{element}" for key in keys]
            rate = self.value(each, "float", (*place, element), paths)
            if isinstance(rate, float):
                found[element] = rate
        return found

    def value(self, raw: object, base: str, place: Path, keys: list[str]) -> object:
        """One value, its origin noted under every path of `keys`; None when unknown or refused."""
        name = place[-1]
        if not isinstance(raw, dict):
            if place[0::2] != ("device", "kind") and not all(self.covered(key) for key in keys):
                self.complain(
                    place, f'{name} has no origin: write {{ value = ..., origin = "vendor: ..." }}'
                )
            return self.typed(raw, base, place)
        self.keys(raw, ("value", "origin"), place)
        said = raw.get("origin")
        if not self.said(said, place):
            return None
        kind = str(said).partition(":")[0]
        self.origins.update((key, str(said)) for key in keys)
        if "value" not in raw:
            if kind not in (UNKNOWN, PROBED, DERIVED):
                self.complain(place, f"{name} has an origin ({kind}) and no value")
            return None
        if kind == UNKNOWN:
            self.complain(place, f"{name} has a value and says it is unknown")
        return self.typed(raw["value"], base, place)

    def typed(self, raw: object, base: str, place: Path) -> object:
        name, made = str(place[-1]), _convert(raw, base)
        if made is None:
            self.complain(place, f"{name} must be {_WORDS[base]}, it is {raw!r}")
        elif isinstance(made, (int, float)) and (made < 0 or (made == 0 and name in _NOT_ZERO)):
            self.complain(
                place, f"{name} is {raw}, it must be {'above' if made == 0 else 'at least'} 0"
            )
            return None
        return made

    def devices(self, tables: list[dict[str, Any]], body: dict[str, Any]) -> list[DeviceFacts]:
        devices: list[DeviceFacts] = []
        names = [f.name for f in dataclasses.fields(DeviceFacts)]
        for index, found in enumerate(tables):
            path: Path = ("device", index)
            self.keys(found, ("count", *names), path)
            count = found.get("count", 1)
            if type(count) is not int or not 1 <= count <= 1024:
                self.complain((*path, "count"), f"count is {count!r}, it must be 1 to 1024")
                count = 1
            numbers = range(len(devices), len(devices) + count)
            prefixes = [f"devices.{number}" for number in numbers]
            values = self.item(DeviceFacts, found, path, prefixes)
            for key in ("kind", "name"):
                if key not in values:
                    values[key] = ""
                    self.complain((*path, key), f"a device needs a {key}")
            self.derive(found, values, prefixes)
            device = DeviceFacts(**values)
            for key, what in device_complaints(device, body.get("platform"), self.nodes(body)):
                self.complain((*path, key), what)
            devices += [device] * count
        self.count(body, len(devices))
        return devices

    def nodes(self, body: dict[str, Any]) -> int | None:
        found = self.table(body, "host").get("numa_nodes")
        found = found.get("value") if isinstance(found, dict) else found
        return found if type(found) is int else None

    def derive(self, found: dict[str, Any], values: dict[str, Any], prefixes: list[str]) -> None:
        """What the file leaves out and the capability's instruction set says."""
        rules = _rules_of(values)
        for name in INSTRUCTION_FIELDS if rules is not None else ():
            if name not in found:
                values[name] = getattr(rules, name)
                said = origin(DERIVED, "instruction set of the compute capability")
                self.origins.update((f"{prefix}.{name}", said) for prefix in prefixes)

    def count(self, body: dict[str, Any], listed: int) -> None:
        declared, name = body.get("devices"), str(body.get("name", ""))
        if type(declared) is not int or declared < 1:
            self.complain(("devices",), f"devices must be how many there are, it is {declared!r}")
        elif declared != listed:
            self.complain(("devices",), f"devices is {declared}, the tables describe {listed}")
        counted = re.match(r"(\d+)x-", name)
        if counted and int(counted[1]) != listed:
            self.complain(
                ("name",), f"{name} says {counted[1]} devices, the tables describe {listed}"
            )

    def links(self, tables: list[dict[str, Any]], devices: int) -> list[LinkFacts]:
        links: list[LinkFacts] = []
        seen: set[tuple[int, int]] = set()
        names = [
            f.name for f in dataclasses.fields(LinkFacts) if f.name not in ("source", "target")
        ]
        for index, found in enumerate(tables):
            path: Path = ("link", index)
            self.keys(found, ("ends", *names), path)
            ends = self.ends(found.get("ends"), path, devices)
            prefixes = [f"links.{len(links) + n}" for n in range(len(ends))]
            values = self.item(LinkFacts, found, path, prefixes)
            for pair in ends:
                if pair in seen:
                    self.complain(
                        (*path, "ends"), f"the link {list(pair)} stands here a second time"
                    )
                seen.add(pair)
            made = [LinkFacts(source=i, target=j, **values) for i, j in ends]
            for key, what in link_complaints(made[0]) if made else ():
                self.complain((*path, key), what)
            links += made
        return links

    def ends(self, raw: object, path: Path, devices: int) -> list[tuple[int, int]]:
        if raw == HOST_TO_EACH:
            return [(-1, index) for index in range(devices)]
        if raw == EACH_PAIR:
            return [(i, j) for i in range(devices) for j in range(devices) if i != j]
        place = (*path, "ends")
        pairs = [_convert(pair, "tuple[int, int]") for pair in raw] if isinstance(raw, list) else []
        if not pairs or None in pairs:
            words = f'"{HOST_TO_EACH}", "{EACH_PAIR}" or pairs of device numbers (-1: host memory)'
            self.complain(place, f"ends must be {words}, it is {raw!r}")
            return []
        found: list[tuple[int, int]] = [pair for pair in pairs if pair is not None]
        for i, j in found:
            if i == j or not (-1 <= i < devices and -1 <= j < devices):
                self.complain(place, f"there is no link [{i}, {j}] among {devices} devices")
        return found

    def software(self, found: dict[str, Any]) -> dict[str, str | None]:
        versions: dict[str, str | None] = {}
        for name, raw in found.items():
            keys, place = [f"software.{name}"], ("software", name)
            bare = raw.get("value") if isinstance(raw, dict) else raw
            absent = bare is False
            value = self.value(raw, "bool" if absent else "str", place, keys)
            if absent or isinstance(value, str):
                versions[name] = None if absent else str(value)
        return versions


def _convert(raw: object, base: str) -> Any:
    """`raw` as the field's type, None when it is of another."""
    if base == "str" and isinstance(raw, str):
        return raw
    if base == "bool" and isinstance(raw, bool):
        return raw
    if base == "int" and type(raw) is int:
        return raw
    if base == "float" and type(raw) in (int, float) and math.isfinite(raw):  # type: ignore[arg-type]
        return float(raw)  # type: ignore[arg-type]
    if isinstance(raw, list):
        if base == "tuple[int, int]" and len(raw) == 2 and all(type(n) is int for n in raw):
            return (raw[0], raw[1])
        if base == "frozenset[str]" and all(isinstance(word, str) for word in raw):
            return frozenset(raw)
    return None


def _rules_of(values: Mapping[str, Any]) -> Instructions | None:
    capability = values.get("capability")
    if values.get("kind") != CUDA or capability is None:
        return None
    return instructions(capability)


def _rules() -> Iterable[Instructions]:
    pairs = [(major, minor) for major in range(7, 13) for minor in range(10)]
    return [rules for pair in pairs if (rules := instructions(pair)) is not None]
