"""Every environment variable we read, in one table. An unknown ``METAINFER_`` name is an error.

A typo in a variable name must not look like a setting that took effect.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from metainfer.core.errors import UsageError

PREFIX = "METAINFER_"


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One switch: its default, its effect, what it costs or who declines it, the flag it equals."""

    name: str
    default: str
    effect: str
    note: str = ""
    flag: str = ""


VARIABLES: tuple[EnvVar, ...] = (
    EnvVar(
        "METAINFER_CACHE",
        "$XDG_CACHE_HOME/metainfer or ~/.cache/metainfer",
        "folder for fetched models, compiled kernels and records",
        "deleting it costs one rebuild and one fetch",
    ),
    EnvVar(
        "METAINFER_PLATFORM",
        "auto",
        "platform plug-in to use; same as --platform",
        "an explicit platform that cannot start is fatal",
        "--platform",
    ),
    EnvVar(
        "METAINFER_API_KEY",
        "",
        "key that every request must present; same as --api-key",
        "kept out of the process list",
        "--api-key",
    ),
    EnvVar(
        "METAINFER_ADMIN_KEY",
        "",
        "key of the admin routes; same as --admin-key",
        "kept out of the process list",
        "--admin-key",
    ),
    EnvVar(
        "METAINFER_LOG",
        "info",
        "log level: error, warning, info or debug",
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}
_OFF = frozenset({"", "0", "false", "no", "off"})


def check(environ: Mapping[str, str] | None = None) -> None:
    """Refuse unknown ``METAINFER_`` names.

    Raises:
        UsageError: naming each unknown variable and the nearest known one.
    """
    names = os.environ if environ is None else environ
    unknown = sorted(name for name in names if name.startswith(PREFIX) and name not in _BY_NAME)
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], _BY_NAME, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(_BY_NAME)}."
    raise UsageError(
        f"unknown environment variable {', '.join(unknown)}.", hint, code="unknown_env"
    )


def get(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The variable's text, or None when unset or empty. `name` must be in `VARIABLES`."""
    variable = _BY_NAME[name]
    value = (os.environ if environ is None else environ).get(variable.name, "")
    return value or None


def is_off(value: str | None) -> bool:
    """Whether a switch-like value means off: unset, empty, 0, false, no, off."""
    return value is None or value.strip().lower() in _OFF


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder for everything that can be rebuilt. Not created here."""
    env = os.environ if environ is None else environ
    own = get("METAINFER_CACHE", env)
    if own:
        return Path(own).expanduser()
    base = env.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative value.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "metainfer"
