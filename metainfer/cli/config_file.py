"""``--config FILE.toml|.yaml``: flags by name, each with the line it stands on.

Keys are flag names without dashes in front; ``_`` and ``-`` are the same. A switch takes true or
false, a repeatable flag a list, one of the form KEY=VALUE also a table.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.core.errors import UsageError

MAX_BYTES = 1 << 20
Scalar = str | int | float | bool
Value = Scalar | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a file: its flag's name with dashes, its value, its line (from 1)."""

    key: str
    value: Value
    line: int


def read(path: Path) -> list[Entry]:
    """The entries in the file's order.

    Raises:
        UsageError: it cannot be read, is malformed, or names a key twice.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} cannot be read: {error}.", "Check its name.") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"--config {path} has {len(data):,} bytes.", "It is no file of flags.")
    suffix = path.suffix.lower()
    if suffix == ".toml":
        found = _toml(path, text)
    elif suffix in (".yaml", ".yml"):
        found = _yaml(path, text)
    else:
        raise UsageError(
            f"--config {path} is neither .toml nor .yaml.", "Write the file in one of the two."
        )
    seen: dict[str, int] = {}
    for entry in found:
        if entry.key in seen:
            raise UsageError(
                f"--config {path} sets {entry.key} in lines {seen[entry.key]} and {entry.line}.",
                "Keep one of them.",
            )
        seen[entry.key] = entry.line
    return found


def _name(key: str) -> str:
    return key.replace("_", "-")


def _toml(path: Path, text: str) -> list[Entry]:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}.", "Correct it.") from error
    lines = text.splitlines()
    return [Entry(_name(key), value, _line(lines, key)) for key, value in document.items()]


def _line(lines: list[str], key: str) -> int:
    """Where a top-level key or its table stands; tomllib does not say."""
    named = rf"[\"']?{re.escape(key)}[\"']?"
    start = re.compile(rf"\s*(?:{named}\s*[=.]|\[\s*{named}\s*\])")
    return next((at for at, line in enumerate(lines, 1) if start.match(line)), 1)


def _yaml(path: Path, text: str) -> list[Entry]:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(
            f"--config {path} needs the package pyyaml.",
            "Install it (pip install pyyaml), or write the file as .toml.",
            code="missing_package",
        ) from error
    loader: Any = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"--config {path} is no mapping of flags.", "Write key: value.")
        return [
            Entry(
                _name(str(loader.construct_object(key, deep=True))),
                loader.construct_object(value, deep=True),
                key.start_mark.line + 1,
            )
            for key, value in node.value
        ]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        said = " ".join(str(error).split())
        raise UsageError(f"--config {path} is not YAML: {said}.", "Correct it.") from error
    finally:
        loader.dispose()


def texts(value: Value) -> list[str]:
    """`value` as words for a flag that takes one; a list gives several, a table KEY=VALUE each.

    Raises:
        ValueError: true or false, or something nested deeper.
    """
    if isinstance(value, list):
        return [_text(item) for item in value]
    if isinstance(value, Mapping):
        return [f"{key}={_text(item)}" for key, item in value.items()]
    return [_text(value)]


def _text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is neither a text nor a number")
    return f"{value!r}" if isinstance(value, float) else str(value)
