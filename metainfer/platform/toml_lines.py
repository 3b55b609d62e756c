"""On which line of a TOML text each key stands: `tomllib` gives values without places.

Reads what it needs of the syntax: table headers, keys at the start of a line, values over several
lines by their brackets. Keys inside an inline table have the line of the table.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'')


class Lines:
    """Line numbers by path; an element of an array of tables is its number."""

    def __init__(self, text: str) -> None:
        self._found: dict[Path, int] = {}
        counts: dict[Path, int] = {}
        table: Path = ()
        depth = 0
        for number, line in enumerate(text.splitlines(), 1):
            bare = _STRING.sub('""', line).partition("#")[0]
            if depth == 0 and (header := _HEADER.match(line)):
                table = _parts(header[2])
                if header[1] == "[[":
                    counts[table] = counts.get(table, -1) + 1
                    table = (*table, counts[table])
                elif table[:-1] in counts:  # a table inside the array's last element
                    table = (*table[:-1], counts[table[:-1]], table[-1])
                self._found.setdefault(table, number)
                continue
            if depth == 0 and (key := _KEY.match(line)):
                self._found.setdefault((*table, *_parts(key[1])), number)
            depth += sum(bare.count(mark) for mark in "[{") - sum(bare.count(m) for m in "]}")

    def of(self, path: Path) -> int:
        """The line of `path`, else of the nearest table that holds it; 1 when there is none."""
        while path and path not in self._found:
            path = path[:-1]
        return self._found.get(path, 1)


def _parts(text: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(text))
