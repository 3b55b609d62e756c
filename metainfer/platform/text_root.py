"""Files that exist as text only, with the part of `pathlib.Path` that probes use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import translate
from pathlib import Path, PurePosixPath


class TextRoot:
    """A place in a tree of texts. Keys are absolute paths; one that ends in ``/`` lists a folder,
    one entry a line. What was not read does not exist."""

    def __init__(self, texts: Mapping[str, str], path: str = "/") -> None:
        self._texts = texts
        self._path = PurePosixPath(path)

    def __truediv__(self, key: str | Path) -> TextRoot:
        return TextRoot(self._texts, str(self._path / key))

    @property
    def name(self) -> str:
        return self._path.name

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        text = self._texts.get(str(self._path))
        if text is None:
            raise FileNotFoundError(2, "not in this text", str(self._path))
        return text

    def exists(self) -> bool:
        inside = f"{self._path}/"
        return any(key == str(self._path) or key.startswith(inside) for key in self._texts)

    def iterdir(self) -> Iterator[TextRoot]:
        listed = self._texts.get(f"{self._path}/")
        if listed is None:
            raise FileNotFoundError(2, "not in this text", str(self._path))
        return iter([self / name for name in listed.split()])

    def glob(self, pattern: str) -> Iterator[TextRoot]:
        """Files, and folders of them, that match; ``*`` stays within a name."""
        parts = [re.compile(translate(part)) for part in pattern.split("/")]
        depth = len(self._path.parts)
        found: dict[str, None] = {}
        for key in sorted(self._texts):
            names = PurePosixPath(key).parts
            if not key.startswith("/") or names[:depth] != self._path.parts:
                continue
            below = names[depth : depth + len(parts)]
            if len(below) == len(parts) and all(
                part.fullmatch(name) for part, name in zip(parts, below, strict=True)
            ):
                found["/".join(below)] = None
        return iter([self / path for path in found])


#: What probes take: a place in the file system, or in a text.
Folder = Path | TextRoot
