"""Reads the text of ``nvidia-smi -q`` and of its topology and peer matrices. Pure.

Values are found by the path of their headings (``GPU Power Readings/Current Power Limit``), with
the raw line beside them. ``N/A`` and ``[Unknown Error]`` are no values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from metainfer.platform.cuda_driver import normal_bus_id

_GPU = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)\s*$")
_PAIR = re.compile(r"^( *)(\S.*?)\s+: (.*)$")
_NOTHING = ("N/A", "[N/A]", "Unknown", "Unknown Error", "[Unknown Error]", "None", "")
_UNDERLINE = re.compile(r"\x1b\[[0-9;]*m")  # the tool may underline its heads, whoever reads
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU as the driver shows it (none of other containers)."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(slots=True)
class SmiGpu:
    """One GPU of the report: value and raw line by path."""

    bus_id: str | None
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)

    def text(self, *paths: str) -> str | None:
        """The first of `paths` that has a value."""
        for path in paths:
            value = self.values.get(path)
            if value is not None and value[0] not in _NOTHING:
                return value[0]
        return None

    def line(self, *paths: str) -> str:
        """The raw line of the first of `paths` that is there."""
        return next((self.values[path][1] for path in paths if path in self.values), "")

    def number(self, *paths: str) -> float | None:
        found = _NUMBER.match(self.text(*paths) or "")
        return None if found is None else float(found[0])

    def size(self, *paths: str) -> int | None:
        words = (self.text(*paths) or "").split()
        if len(words) != 2 or words[1] not in _UNITS or not words[0].isdigit():
            return None
        return int(words[0]) * _UNITS[words[1]]


@dataclass(frozen=True, slots=True)
class SmiReport:
    """Head of the report and its GPUs in the tool's order."""

    driver: str | None
    cuda: str | None
    gpus: tuple[SmiGpu, ...]


def parse_query(text: str) -> SmiReport:
    """``nvidia-smi -q``."""
    head: dict[str, str] = {}
    gpus: list[SmiGpu] = []
    stack: list[tuple[int, str]] = []
    process: dict[str, str] = {}
    for line in text.splitlines():
        opened = _GPU.match(line)
        if opened is not None:
            _close_process(gpus, process)
            gpus.append(SmiGpu(normal_bus_id(opened[1])))
            stack = []
            continue
        pair = _PAIR.match(line)
        indent = len(line) - len(line.lstrip(" "))
        if not line.strip() or line.startswith("="):
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        if pair is None:
            stack.append((indent, line.strip()))
            continue
        key, value = pair[2].strip(), pair[3].strip()
        if not gpus:
            head[key] = value
            continue
        if stack and stack[0][1] == "Processes":
            if key == "Process ID":
                _close_process(gpus, process)
            process[key] = value
            stack.append((indent, key))
            continue
        path = "/".join([name for _, name in stack] + [key])
        gpus[-1].values[path] = (value, " ".join(line.split()))
        stack.append((indent, key))  # "HW Slowdown : ..." has entries of its own below it
    _close_process(gpus, process)
    return SmiReport(head.get("Driver Version"), head.get("CUDA Version"), tuple(gpus))


def parse_matrix(text: str) -> dict[tuple[int, int], str]:
    """The GPU part of ``topo -m`` or ``topo -p2p``: (row, column) -> word such as PIX or OK."""
    columns: list[int] = []
    found: dict[tuple[int, int], str] = {}
    for line in _UNDERLINE.sub("", text).splitlines():
        words = line.split()
        numbers = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        if not columns and numbers and re.fullmatch(r"GPU\d+", words[0]):
            columns = numbers
            continue
        if columns and words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, word in zip(columns, words[1:], strict=False):
                if column != row:
                    found[row, column] = word
    return found


def parse_capabilities(text: str) -> Mapping[str, tuple[int, int]]:
    """``bus id, major.minor`` lines -> capability by bus id."""
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines():
        bus, _, pair = line.partition(",")
        bus_id, numbers = normal_bus_id(bus.strip()), re.fullmatch(r"\s*(\d+)\.(\d+)\s*", pair)
        if bus_id is not None and numbers is not None:
            found[bus_id] = (int(numbers[1]), int(numbers[2]))
    return found


def _close_process(gpus: list[SmiGpu], process: dict[str, str]) -> None:
    number = process.get("Process ID", "")
    if gpus and number.isdigit():
        words = process.get("Used GPU Memory", "").split()
        known = len(words) == 2 and words[0].isdigit() and words[1] in _UNITS
        used = int(words[0]) * _UNITS[words[1]] if known else None
        gpus[-1].processes.append(Process(int(number), process.get("Name", "?"), used))
    process.clear()
