"""Measurements kept on disk, keyed by the fingerprint of the machine they were taken on.

A record never applies to another machine: a look-up with a different fingerprint is a miss,
and the miss names what changed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from metainfer.core.digest import canonical_json, digest, to_plain
from metainfer.core.errors import UserError

SCHEMA = 1
LOCK_WAIT_S = 5.0
"""For whoever else writes to a file of records: they hold it for milliseconds."""
_AGAIN_S = 0.005
_told: set[Path] = set()  # files whose lock could not be had the last time
_log = logging.getLogger("metainfer.records")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a measurement depends on: ordered devices, driver, library versions, link state."""

    facts: Mapping[str, object]

    @property
    def id(self) -> str:
        return digest(self.facts)

    def differences(self, other: Fingerprint) -> list[str]:
        """One line per fact that differs, for "re-measured because ..."."""
        lines = []
        for key in sorted(set(self.facts) | set(other.facts)):
            here, there = self.facts.get(key), other.facts.get(key)
            if here != there:
                lines.append(f"{key}: {there!r} -> {here!r}")
        return lines


@dataclass(frozen=True, slots=True)
class Record:
    """One stored result. `conditions` says how it was taken: command, commit, spread."""

    kind: str
    key: str
    payload: object
    conditions: Mapping[str, object]


class RecordStore:
    """JSON files under ``root/<kind>/<fingerprint id>.json``, written atomically."""

    def __init__(self, root: Path, fingerprint: Fingerprint) -> None:
        self._root = root
        self._fingerprint = fingerprint

    def path(self, kind: str) -> Path:
        if not _NAME.fullmatch(kind):
            raise ValueError(f"bad record kind {kind!r}")
        return self._root / kind / f"{self._fingerprint.id}.json"

    def get(self, kind: str, key: str) -> Record | None:
        """The record of this machine, or None. A damaged file is an error, not a miss.

        Raises:
            UserError: the file cannot be read as a record file of this schema.
        """
        entry = self._load(kind).get(key)
        if entry is None:
            return None
        return Record(kind, key, entry["payload"], entry["conditions"])

    def of(self, other: Fingerprint) -> RecordStore:
        """The records of another machine, or class of machines, beside these."""
        return RecordStore(self._root, other)

    def all(self, kind: str) -> list[Record]:
        """Every record of a kind, by key. Raises as `get`."""
        found = sorted(self._load(kind).items())
        return [Record(kind, key, e["payload"], e["conditions"]) for key, e in found]

    def put(self, record: Record) -> None:
        """Add or replace one record; none that another process puts meanwhile is lost, or a
        warning says that it may be. Where none can be written, one says so: the next start
        measures again."""
        path = self.path(record.kind)
        try:
            with _alone(path):
                entries = self._load(record.kind)
                entries[record.key] = {
                    "payload": to_plain(record.payload),
                    "conditions": to_plain(record.conditions),
                }
                body = {
                    "schema": SCHEMA,
                    "fingerprint": to_plain(self._fingerprint.facts),
                    "entries": entries,
                }
                _write(path, json.dumps(body, indent=1, sort_keys=True))
        except OSError as error:
            _log.warning(
                "record %s of %s is not kept: %s cannot be written (%s)",
                *(record.key, record.kind, path.parent, error.strerror),
            )

    def other_machines(self, kind: str) -> list[Fingerprint]:
        """Fingerprints that hold records of this kind and are not this machine's."""
        found = []
        for path in sorted((self._root / kind).glob("*.json")):
            if path != self.path(kind):
                found.append(Fingerprint(json.loads(path.read_text())["fingerprint"]))
        return found

    def _load(self, kind: str) -> dict[str, dict]:  # type: ignore[type-arg]
        path = self.path(kind)
        try:
            body = json.loads(path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(
                f"record file {path} cannot be read: {error}.",
                "Delete it; it will be measured again.",
                code="bad_record",
            ) from error
        same = canonical_json(body.get("fingerprint")) == canonical_json(self._fingerprint.facts)
        if body.get("schema") != SCHEMA or not same:
            raise UserError(
                f"record file {path} has schema {body.get('schema')} or a foreign fingerprint.",
                "Delete it; it will be measured again.",
                code="bad_record",
            )
        entries = body["entries"]
        assert isinstance(entries, dict)
        return entries


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else reads `path` to write it back, where host and file system have locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.stem}.lock").open("w") as lock:
        _lock(lock, path)
        yield


def _lock(lock: TextIO, path: Path) -> None:
    """Until `lock` is closed. Where it cannot be had a warning says so, once for each file: a
    holder that stands still costs `LOCK_WAIT_S`, not the start."""
    try:
        import fcntl
    except ImportError:
        _unlocked(path, "this host has no locks")
        return
    deadline = time.monotonic() + (0 if path in _told else LOCK_WAIT_S)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                _unlocked(path, f"another process has held its lock for {LOCK_WAIT_S:g} s")
                return
            time.sleep(_AGAIN_S)
        except OSError as error:
            _unlocked(path, f"its file system gives no locks ({error.strerror})")
            return
        else:
            _told.discard(path)
            return


def _unlocked(path: Path, why: str) -> None:
    if path not in _told:
        _told.add(path)
        _log.warning("%s is written without a lock: %s; records of others may be lost", path, why)


def _write(path: Path, text: str) -> None:
    """Put `text` in place of `path`, whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".record-")
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
