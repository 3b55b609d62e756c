"""Finds the platform to run on. A plug-in that does not work is fatal, never skipped.

``auto``: a vendor's plug-in whose `detect` accepts, and there must be only one; else ours, CUDA
before the processor. A named platform is the only one loaded, so that naming another is always a
way around a broken plug-in; if it cannot run, that is an error with its reasons.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol

from metainfer.core import env
from metainfer.core.errors import RefusedError, UsageError, UserError
from metainfer.core.ledger import Loser, Origin
from metainfer.core.verdict import Reason
from metainfer.platform.base import API_VERSION, MEMBERS, Platform
from metainfer.platform.cpu import CpuPlatform
from metainfer.platform.cuda import CudaPlatform

GROUP = "metainfer.platforms"
AUTO = "auto"


class PlatformError(UserError):
    """A platform plug-in is broken. `detail` is the traceback, for the log and for its author."""

    default_code = "bad_platform"

    def __init__(self, cause: str, remedy: str, *, code: str = "", detail: str = "") -> None:
        super().__init__(cause, remedy, code=code)
        self.detail = detail

    def to_json(self) -> dict[str, object]:
        body = super().to_json()
        if self.detail:
            body["detail"] = self.detail
        return body


class EntryPoint(Protocol):
    """The part of `importlib.metadata.EntryPoint` in use."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> str: ...

    def load(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Selected:
    """The platform, who chose it and why, and what lost. The fields fit the decision ledger."""

    platform: Platform
    origin: Origin
    why: str
    losers: tuple[Loser, ...] = ()


def builtin_platforms() -> tuple[Platform, ...]:
    """Ours, in the order in which ``auto`` asks them."""
    return (CudaPlatform(), CpuPlatform())


def installed() -> list[EntryPoint]:
    """Plug-ins of installed packages, ordered by name."""
    return sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))


def select_platform(
    name: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    entries: Iterable[EntryPoint] | None = None,
    builtins: Sequence[Platform] | None = None,
) -> Selected:
    """Choose the platform: `name` (the flag), else ``METAINFER_PLATFORM``, else ``auto``.

    Raises:
        UsageError: no platform has that name.
        RefusedError: the named platform finds no device here.
        PlatformError: a plug-in does not load, is incomplete, speaks another version of the
            interface or raises; or two vendors' plug-ins claim this machine.
    """
    origin, wanted = Origin.FLAG, name
    if wanted is None:
        wanted = env.get("METAINFER_PLATFORM", environ)
        origin = Origin.ENV if wanted else Origin.PROBE
    listed = installed() if entries is None else list(entries)
    ours = builtin_platforms() if builtins is None else tuple(builtins)
    _check_names(listed, ours)
    if wanted is None or wanted == AUTO:
        return _auto(listed, ours)
    return _named(wanted, origin, listed, ours)


def _auto(listed: Sequence[EntryPoint], ours: Sequence[Platform]) -> Selected:
    losers: list[Loser] = []
    active: list[Platform] = []
    for entry in listed:
        platform = load(entry)
        reasons = _objections(platform)
        if reasons:
            losers.append(Loser(platform.name, reasons))
        else:
            active.append(platform)
    if len(active) > 1:
        names = " and ".join(f"{p.name} ({p.vendor})" for p in active)
        raise PlatformError(
            f"two platform plug-ins claim this machine: {names}.",
            f"Choose one: --platform {active[0].name}.",
            code="two_platforms",
        )
    why = "the only plug-in that finds its device"
    for platform in ours:
        if active:
            ahead = Reason("rank", f"{active[0].name} comes first and finds its device")
            losers.append(Loser(platform.name, (ahead,)))
            continue
        reasons = _objections(platform)
        if reasons:
            losers.append(Loser(platform.name, reasons))
        else:
            active.append(platform)
            why = "the first built-in platform that finds its device"
    if not active:
        raise RefusedError(
            "no platform finds a device here.",
            "Use --platform cpu.",
            reasons=[reason for loser in losers for reason in loser.reasons],
            code="no_platform",
        )
    return Selected(active[0], Origin.PROBE, why, tuple(losers))


def _named(
    name: str, origin: Origin, listed: Sequence[EntryPoint], ours: Sequence[Platform]
) -> Selected:
    platform = next((p for p in ours if p.name == name), None)
    entry = next((e for e in listed if e.name == name), None)
    if platform is None and entry is not None:
        platform = load(entry)
    if platform is None:
        known = [*(e.name for e in listed), *(p.name for p in ours)]
        raise UsageError(
            f"there is no platform {name!r}.",
            f"Installed: {', '.join(known)}.",
            code="unknown_platform",
        )
    reasons = _objections(platform)
    if reasons:
        raise RefusedError(
            f"platform {name} was asked for and cannot run here.",
            "Remove the request to let auto choose.",
            reasons=reasons,
            code="platform_refused",
        )
    return Selected(platform, origin, "asked for")


def load(entry: EntryPoint) -> Platform:
    """Load one plug-in and check that it can be used.

    Raises:
        PlatformError: with the plug-in's own traceback in `detail` if it raised.
    """
    made = _calling(entry, "cannot be loaded", entry.load)
    if callable(made):
        made = _calling(entry, "cannot be created", made)
    missing = [member for member in MEMBERS if not hasattr(made, member)]
    version = getattr(made, "api_version", None)
    if version is not None and version != API_VERSION:
        raise PlatformError(
            f"platform {entry.name} speaks interface version {version}, this is {API_VERSION}.",
            f"Install a release of {entry.value.partition('.')[0].partition(':')[0]} "
            f"for interface {API_VERSION}.",
            code="platform_version",
        )
    if missing or not isinstance(made, Platform):
        raise PlatformError(
            f"platform {entry.name} ({entry.value}) lacks {', '.join(missing)}.",
            "Tell its vendor; --platform cpu runs without it.",
            code="platform_incomplete",
        )
    if made.name != entry.name:
        raise PlatformError(
            f"the entry point {entry.name} ({entry.value}) gives a platform named {made.name}.",
            "Tell its vendor: the two names must be equal.",
            code="platform_name",
        )
    return made


def _objections(platform: Platform) -> tuple[Reason, ...]:
    try:
        return platform.detect().reasons
    except Exception as error:
        raise _broken(platform.name, "detect() raised", error) from error


def _calling(entry: EntryPoint, what: str, call: Callable[[], object]) -> object:
    try:
        return call()
    except Exception as error:
        raise _broken(f"{entry.name} ({entry.value})", what, error) from error


def _broken(name: str, what: str, error: Exception) -> PlatformError:
    return PlatformError(
        f"platform {name}: {what}: {type(error).__name__}: {error}",
        "Repair or uninstall the plug-in, or name another platform, as in --platform cpu.",
        code="platform_raised",
        detail="".join(traceback.format_exception(error)),
    )


def _check_names(listed: Sequence[EntryPoint], ours: Sequence[Platform]) -> None:
    taken: dict[str, str] = {platform.name: "built in" for platform in ours}
    taken[AUTO] = "reserved"
    for entry in listed:
        if entry.name in taken:
            raise PlatformError(
                f"two platforms are named {entry.name}: {taken[entry.name]} and {entry.value}.",
                "Uninstall one of them.",
                code="platform_name",
            )
        taken[entry.name] = entry.value
