"""``metainfer report``: one archive with what is known of a machine, a server and its last steps.

Each part is chosen; nothing is taken because it lies about. Every text is searched once more for
keys of this environment, this host's name and the home folder before it is packed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.core.env import cache_dir
from metainfer.core.errors import UserError
from metainfer.engine import overseer

_TIMEOUT_S = 20.0
_KEYS = ("METAINFER_API_KEY", "METAINFER_ADMIN_KEY")
_LEAST = 4
"""Shorter names and keys are not searched for: they would be found in everything."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An archive that was written. `source` of what is told of a server: ``server``, ``dump``, or
    ``machine`` where there was neither; `missing`: part -> why."""

    file: str
    source: str
    parts: tuple[str, ...]
    missing: dict[str, str]


def pack(out: Path, url: str | None, key: str | None) -> Packed:
    """Write the archive `out`. `url`: of a server that runs; `key`: its admin key.

    Raises:
        UserError: the server does not answer or refuses, or the file cannot be written.
    """
    parts: dict[str, str] = {}
    missing: dict[str, str] = {}
    live = None if url is None else fetch(url, key)
    dump = live if live is not None else overseer.latest()
    source = "server" if live is not None else "dump" if dump is not None else "machine"
    _machine(parts, missing)
    if dump is None:
        missing["server"] = "no --url was given, and no engine left a dump"
    else:
        parts["server.json"] = _json({k: v for k, v in dump.items() if k not in _OWN_FILES})
        for name, file in _OWN_FILES.items():
            if dump.get(name):
                value = dump[name]
                parts[file] = value if isinstance(value, str) else _json(value)
            else:
                missing[file] = "the server does not know it" if live else "the dump lacks it"
    parts |= _records()
    parts["contents.json"] = _json({"source": source, "parts": sorted(parts), "missing": missing})
    _write(out, parts, key)
    return Packed(str(out), source, tuple(sorted(parts)), missing)


_OWN_FILES = {
    "plan": "plan.json",
    "flight": "flight.json",
    "start_phases": "start.json",
    "log": "log.json",
    "metrics": "metrics.txt",
}


def fetch(url: str, key: str | None) -> dict[str, Any]:
    """What the server at `url` says of itself.

    Raises:
        UserError: it does not answer, or not to this key.
    """
    request = urllib.request.Request(url.rstrip("/") + "/debug/report")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise UserError(
            f"{url} refuses the report (HTTP {error.code}).",
            "Start it with --admin-key, and pass that key here as --admin-key or in "
            "METAINFER_ADMIN_KEY."
            if error.code in (401, 403)
            else "Check --url; it is the server's address without /v1.",
            code="report_refused",
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        raise UserError(
            f"{url} gives no report: {why}.",
            "Check --url, or leave it out: the last dump is packed then.",
            code="no_server",
        ) from None


def _machine(parts: dict[str, str], missing: dict[str, str]) -> None:
    from metainfer.doctor.report import doctor
    from metainfer.platform.software import versions

    parts["software.json"] = _json(versions())
    try:
        parts["machine.json"] = _json(doctor())
    except UserError as error:
        missing["machine.json"] = str(error)


def _records() -> dict[str, str]:
    """Measurements of this machine, and the dumps, as they are on disk."""
    root = cache_dir() / "records"
    found = {}
    for path in sorted(root.rglob("*.json")):
        try:
            found[f"records/{path.relative_to(root).as_posix()}"] = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
    return found


def _json(value: object) -> str:
    return json.dumps(value, indent=1, default=str)


def scrubber(key: str | None, environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """A function that takes keys, the host's name and the home folder out of a text."""
    env = os.environ if environ is None else environ
    replaced: list[tuple[re.Pattern[str], str]] = []
    for secret in (key, *(env.get(name) for name in _KEYS)):
        if secret and len(secret) >= _LEAST:
            replaced.append((re.compile(re.escape(secret)), "<key>"))
    home = str(Path.home())
    if len(home) >= _LEAST:
        replaced.append((re.compile(re.escape(home) + r"(?![\w-])"), "~"))
    host = socket.gethostname()
    if len(host) >= _LEAST:
        replaced.append((re.compile(rf"(?<![\w-]){re.escape(host)}(?![\w-])"), "<host>"))

    def scrub(text: str) -> str:
        for pattern, word in replaced:
            text = pattern.sub(word, text)
        return text

    return scrub


def _write(out: Path, parts: Mapping[str, str], key: str | None) -> None:
    scrub = scrubber(key)
    partial = out.with_name(out.name + ".part")
    try:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in sorted(parts.items()):
                archive.writestr(name, scrub(text))
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{out} cannot be written: {error.strerror or error}.",
            "Choose a folder that can be written.",
            code="not_writable",
        ) from error
