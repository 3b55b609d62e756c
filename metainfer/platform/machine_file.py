"""A machine as a TOML file: every value with its origin, unknown stays unknown.

::

    schema = 1
    name = "2x-example"
    platform = "cuda"
    devices = 2                       # must equal the sum of the counts below

    [host]
    numa_nodes = { value = 1, origin = "field: the owner's report" }

    [[device]]                        # `count` equal devices, numbered on from the last table
    count = 2
    kind = "cuda"
    memory_bytes = { value = 24_000_000_000, origin = "vendor: data sheet" }
    power_cap_w = { origin = "unknown: follows the product variant" }

    [[link]]
    ends = "host-to-each"             # or "each-pair", or pairs as in [[-1, 0], [0, 1]]
    max_width = { value = 16, origin = "vendor: data sheet" }

    [software]                        # version, or false for what is not installed
    torch = { value = "2.12.0", origin = "probed: package metadata" }

A value without an origin of its own needs one for a part of its path in ``[origins]``, as in
``links = "probed: NVML"``. What a file leaves out is unknown; nothing is filled in from another
card. One thing follows by rule: matrix types and features from a CUDA capability, as `derived`.
Guesses (`seed`) have no place in a file. `render` and `parse` are inverse, origins included.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metainfer.platform.facts import CPU, DeviceFacts, Facts, HostFacts, LinkFacts
from metainfer.platform.machine_reader import HOST_TO_EACH, INSTRUCTION_FIELDS, read_machine
from metainfer.platform.origins import DERIVED, PROBED, UNKNOWN, origin

SCHEMA = 1
_BARE = re.compile(r"[A-Za-z0-9_-]+")
#: An origin of these kinds may stand beside no value: it says what was asked in vain.
_ASKED = (UNKNOWN, PROBED, DERIVED)
#: What tells one machine from its equal; no description of a kind of machine has it.
_IDENTITY = frozenset({"uuid", "bus_id"})
#: What no machine says of itself, and no answer depends on.
_OF_OWNER = frozenset({"price_hour"})
#: What a processor does not have.
_OF_CARDS = frozenset(
    {"capability", "shared_bytes_per_block", "warp", "bar_bytes", "switch"}
    | {"power_cap_w", "power_default_w", "power_max_w", "ecc"}
)
#: What there is to know of a link to host memory, and of a path between two devices.
_OF_HOST = ("kind", "generation", "width", "max_generation", "max_width", "bytes_s")
_OF_PAIRS = ("kind", "bytes_s", "peer_read", "peer_write", "peer_atomics")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFile:
    """A described machine. `source`: file or shipped name that it was read from."""

    name: str
    facts: Facts
    about: str = ""
    source: str = ""


def parse(text: str, source: str) -> MachineFile:
    """The machine that `text` describes.

    Raises:
        UsageError: with every contradiction, unknown key and wrong type as ``source:line: what``.
    """
    name, about, facts = read_machine(text, source, SCHEMA)
    return MachineFile(name=name, about=about, facts=facts, source=source)


def complete_origins(facts: Facts) -> Facts:
    """The facts with an origin for every value: what a probe did not explain is its platform's."""
    missing = {
        path.partition(".")[0]
        for path, value in _values(facts)
        if value is not None and not _covered(path, facts.origins)
    }
    # Left out, these would be derived from the capability.
    unsaid = {
        f"devices.{index}.{name}"
        for index, device in enumerate(facts.devices)
        for name in INSTRUCTION_FIELDS
        if device.capability is not None and getattr(device, name) is None
    } - facts.origins.keys()
    if not missing and not unsaid:
        return facts
    said = origin(PROBED, f"platform {facts.platform}")
    asked = origin(UNKNOWN, f"platform {facts.platform} does not say")
    origins = {**dict.fromkeys(missing, said), **dict.fromkeys(unsaid, asked), **facts.origins}
    return dataclasses.replace(facts, origins=dict(sorted(origins.items())))


def render(machine: MachineFile) -> str:
    """The file's text. Equal devices and links in a row share a table."""
    facts = complete_origins(machine.facts)
    used: set[str] = set()
    tables: list[str] = []
    host = _table(facts.host, "host", facts, used)
    if host:
        tables.append("\n".join(("[host]", *host)))
    tables += _devices(facts, used)
    tables += _links(facts, used)
    if facts.software:
        lines = [_software(name, version, facts, used) for name, version in facts.software.items()]
        tables.append("\n".join(("[software]", *lines)))
    head = [
        f"schema = {SCHEMA}",
        f"name = {_text(machine.name)}",
        *([f"about = {_text(machine.about)}"] if machine.about else []),
        f"platform = {_text(facts.platform)}",
        f"devices = {len(facts.devices)}",
    ]
    rest = [f"{_text(k)} = {_text(v)}" for k, v in facts.origins.items() if k not in used]
    if rest:
        tables.insert(0, "\n".join(("[origins]", *rest)))
    return "\n\n".join(("\n".join(head), *tables)) + "\n"


def unknown_values(facts: Facts) -> tuple[str, ...]:
    """What is not known of a machine, each name once for all devices, host links or pairs.

    A serial number or a bus address does not count. ``links.host`` or ``links.pairs`` alone stands
    for links of which nothing is said.
    """
    found: dict[str, None] = {}
    for device in facts.devices:
        beside = _IDENTITY | _OF_CARDS if device.kind == CPU else _IDENTITY
        for name, value in _fields(device):
            if value is None and name not in beside:
                found[f"device.{name}"] = None
        if not device.dot_flops:
            found["device.dot_flops"] = None
    for name, value in _fields(facts.host):
        if value is None and name not in _OF_OWNER:
            found[f"host.{name}"] = None
    if facts.devices and facts.device.kind != CPU:
        groups = {"links.host": [x for x in facts.links if x.source < 0]}
        if len(facts.devices) > 1:
            groups["links.pairs"] = [x for x in facts.links if x.source >= 0]
        for group, links in groups.items():
            if not links:
                found[group] = None
            asked = _OF_HOST if group == "links.host" else _OF_PAIRS
            for link in links:
                found.update(
                    (f"{group}.{name}", None) for name in asked if getattr(link, name) is None
                )
    return tuple(found)


def _fields(item: DeviceFacts | HostFacts | LinkFacts) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(item):
        yield field.name, getattr(item, field.name)


def _values(facts: Facts) -> Iterator[tuple[str, object]]:
    """Every value that needs an origin, by dotted path."""
    parts: list[tuple[str, DeviceFacts | HostFacts | LinkFacts]] = [("host", facts.host)]
    parts += [(f"devices.{index}", device) for index, device in enumerate(facts.devices)]
    parts += [(f"links.{index}", link) for index, link in enumerate(facts.links)]
    for prefix, item in parts:
        for name, value in _fields(item):
            if name in ("source", "target") or value == "":
                continue
            if name == "kind" and not prefix.startswith("links"):
                continue  # what is described, not a claim about it
            if isinstance(value, Mapping):
                yield from ((f"{prefix}.{name}.{key}", each) for key, each in value.items())
            else:
                yield f"{prefix}.{name}", value
    for name in facts.software:
        yield f"software.{name}", name


def _covered(path: str, origins: Mapping[str, str]) -> bool:
    while path:
        if path in origins:
            return True
        path = path.rpartition(".")[0]
    return False


def _table(
    item: DeviceFacts | HostFacts | LinkFacts, prefix: str, facts: Facts, used: set[str]
) -> list[str]:
    """The lines of one item; origins that stand in a line are put into `used`."""
    lines = []
    for name, value in _fields(item):
        path = f"{prefix}.{name}"
        if name in ("source", "target"):
            continue
        if isinstance(value, Mapping):
            for key, each in value.items():
                line = _line(f"{name}.{_key(key)}", each, f"{path}.{key}", facts, used)
                lines.append(line)
            continue
        asked = facts.origins.get(path, "").partition(":")[0] in _ASKED
        if (value is None and not asked) or (value == "" and path not in facts.origins):
            continue
        lines.append(_line(name, value, path, facts, used))
    return lines


def _line(key: str, value: object, path: str, facts: Facts, used: set[str]) -> str:
    said = facts.origins.get(path)
    if said is None:
        return f"{key} = {_text(value)}"
    used.add(path)
    if value is None:
        return f"{key} = {{ origin = {_text(said)} }}"
    return f"{key} = {{ value = {_text(value)}, origin = {_text(said)} }}"


def _devices(facts: Facts, used: set[str]) -> list[str]:
    blocks = [
        _table(device, f"devices.{index}", facts, used)
        for index, device in enumerate(facts.devices)
    ]
    tables = []
    for lines, numbers in _runs(blocks):
        count = [f"count = {len(numbers)}"] if len(numbers) > 1 else []
        tables.append("\n".join(("[[device]]", *count, *lines)))
    return tables


def _links(facts: Facts, used: set[str]) -> list[str]:
    blocks = [_table(x, f"links.{index}", facts, used) for index, x in enumerate(facts.links)]
    tables = []
    for lines, numbers in _runs(blocks):
        ends = [[facts.links[n].source, facts.links[n].target] for n in numbers]
        each = [[-1, index] for index in range(len(facts.devices))]
        shown = json.dumps(HOST_TO_EACH if ends == each else ends)
        tables.append("\n".join(("[[link]]", f"ends = {shown}", *lines)))
    return tables


def _runs(blocks: Sequence[list[str]]) -> list[tuple[list[str], list[int]]]:
    """Equal neighbours with their numbers."""
    runs: list[tuple[list[str], list[int]]] = []
    for number, lines in enumerate(blocks):
        if runs and runs[-1][0] == lines:
            runs[-1][1].append(number)
        else:
            runs.append((lines, [number]))
    return runs


def _software(name: str, version: str | None, facts: Facts, used: set[str]) -> str:
    value = False if version is None else version
    return _line(_key(name), value, f"software.{name}", facts, used)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: object) -> str:
    """A TOML value."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return repr(value)
    assert isinstance(value, Iterable)
    items = sorted(value) if isinstance(value, frozenset) else value
    return f"[{', '.join(_text(item) for item in items)}]"
