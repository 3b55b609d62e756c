"""What the checks look at, read once. The checks themselves are pure.

For a machine from a file only the facts are given; everything about *this* process and host is then
None, and the checks that need it say so or have nothing to say about that machine. A host text
stands for a machine too: its facts are derived from the text, and there is no disk to look at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from metainfer.core import env
from metainfer.core.ledger import Loser
from metainfer.platform import host_text, text_facts
from metainfer.platform.discovery import Selected
from metainfer.platform.facts import Facts
from metainfer.platform.host_text import HostText, read_host_text
from metainfer.platform.probe_host import HostProbe, probe_host, read_text

if TYPE_CHECKING:
    from metainfer.doctor.model_view import ModelView
    from metainfer.doctor.peer_test import PeerProof


@dataclass(frozen=True, slots=True)
class Disk:
    """The file system below the cache folder. `writable` is about its nearest existing parent."""

    folder: Path
    free_bytes: int | None
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """This host and this process, beyond the facts. `disk`: None where there is none to look at."""

    environ: Mapping[str, str]
    host: HostProbe
    disk: Disk | None
    huge_pages: str | None = None  # text of /sys/kernel/mm/transparent_hugepage/enabled
    cmdline: str | None = None
    platform_losers: tuple[Loser, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Facts of the machine in question, and `local` and `text` when it, or its text, is here.

    `model`: what was resolved for a model. `proofs`: outcome of the data test between GPUs, None
    when it was not run.
    """

    facts: Facts
    local: Local | None = None
    text: HostText | None = None
    model: ModelView | None = None
    proofs: tuple[PeerProof, ...] | None = None


def gather(
    selected: Selected,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> Inputs:
    """Read this machine. Never raises but for what the platform itself raises."""
    variables = dict(os.environ if environ is None else environ)
    facts = selected.platform.facts()
    return Inputs(
        facts=facts,
        local=Local(
            environ=variables,
            host=probe_host(root),
            disk=probe_disk(env.cache_dir(variables)),
            huge_pages=read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"),
            cmdline=read_text(root / "proc/cmdline"),
            platform_losers=selected.losers,
        ),
        text=read_host_text(root, variables, facts.software),
    )


def from_text(text: HostText) -> Inputs:
    """The machine of a host text; nothing of this computer is looked at."""
    host = text_facts.host_of(text)
    return Inputs(
        facts=text_facts.facts_of(text, host),
        local=Local(
            environ=text.pairs(host_text.ENVIRONMENT),
            host=host,
            disk=None,
            huge_pages=text.get("/sys/kernel/mm/transparent_hugepage/enabled"),
            cmdline=text.get("/proc/cmdline"),
        ),
        text=text,
    )


def probe_disk(folder: Path) -> Disk:
    """Space and permission where `folder` is or would be made. Never raises."""
    place = folder.absolute()
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        free = shutil.disk_usage(place).free
    except OSError:
        return Disk(folder, None, False)
    return Disk(folder, free, place.is_dir() and os.access(place, os.W_OK | os.X_OK))
