"""What changed of this machine since an engine last started here. No torch.

Records belong to a fingerprint: after a change those of the former machine are not found any more,
and plans fall back to seeds. Whoever starts an engine is told so, with what changed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from metainfer.core.digest import to_plain
from metainfer.core.env import cache_dir
from metainfer.core.records import Fingerprint

FILE = "last-machine-{}.json"
"""Below the cache folder, by platform: asking for another one is no change of the machine."""
_log = logging.getLogger("metainfer.engine")


def drift(found: Fingerprint) -> list[str]:
    """One line for each fact that differs from the last start's, and remember this one's.

    Empty at the first start, and where nothing changed. What cannot be read or written is none of
    a start's business: it is as if nothing had been remembered.
    """
    path = cache_dir() / FILE.format(found.facts["platform"])
    now = Fingerprint(dict(_flat("", to_plain(found.facts))))
    before = _remembered(path)
    if before is None or before.facts != now.facts:
        _remember(path, now)
    lines = [] if before is None else now.differences(before)
    if lines:
        _log.warning(
            "this machine changed since the last start: %s. Records of the former one do not "
            "apply: tune and verify again.",
            "; ".join(lines),
        )
    return lines


def _flat(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Leaves by dotted path, so that a difference names one fact."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _flat(f"{path}.{index}", inner)
    else:
        yield path, value


def _remembered(path: Path) -> Fingerprint | None:
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return Fingerprint(facts) if isinstance(facts, dict) else None


def _remember(path: Path, found: Fingerprint) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found.facts))
    except OSError as error:
        _log.debug("the machine is not remembered: %s", error)
