"""Help that can be searched: ``--help TERM``, ``--help all``, and ``VERB --help TERM``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from metainfer.cli import vllm_names
from metainfer.cli.declared import Chain, Flag, Verb
from metainfer.core.errors import UsageError

_MARKS = ("--help", "-h")
ALL = "all"


def term_in(words: Sequence[str]) -> tuple[Chain, str] | None:
    """The verb's words and the term of ``[VERB] --help TERM`` or ``--help=TERM``; None where help
    is not asked for, or for a whole verb."""
    for at, word in enumerate(words):
        if word.startswith("-") and word.partition("=")[0] not in _MARKS:
            return None
        name, _, term = word.partition("=")
        if name in _MARKS:
            rest = words[at + 1 :]
            term = term or (rest[0] if rest else "")
            return (tuple(words[:at]), term) if term else None
    return None


def answer(chain: Chain, term: str, verbs: Mapping[Chain, Verb]) -> str:
    """What the help holds on `term`.

    Raises:
        UsageError: nothing does; with the nearest word that does.
    """
    among = [verb for known, verb in verbs.items() if known[: len(chain)] == chain]
    lines = list(_all(among) if term == ALL else _found(term.lower(), among))
    if lines:
        return "\n".join(lines)
    names = {name for verb in among for name in (*verb.by_name, verb.name)}
    names |= set(vllm_names.BY_NAME)
    near = difflib.get_close_matches(term, names, n=1) or difflib.get_close_matches(
        f"--{term}", names, n=1
    )
    raise UsageError(
        f"Nothing in the help matches {term!r}.",
        f"Did you mean {near[0]}?" if near else "See metainfer --help all.",
        code="no_help",
    )


def _all(verbs: Iterable[Verb]) -> Iterator[str]:
    for verb in verbs:
        yield from ("", f"metainfer {verb.name}: {verb.text}")
        if verb.example:
            yield f"  Example: {verb.example}"
        for group, flags in grouped(verb.flags):
            yield f"  {group}"
            yield from (f"    {line(flag)}" for flag in flags)


def _found(term: str, verbs: Sequence[Verb]) -> Iterator[str]:
    """Verbs whose name or text holds the term, then each flag once with the verbs that have it."""
    for verb in verbs:
        if term in f"{verb.name} {verb.text}".lower():
            yield f"metainfer {verb.name}: {verb.text}"
    for shown, owners in by_flag(verbs).items():
        name = shown.name
        if term in f"{shown.group} {line(shown)}".lower():
            yield f"{line(shown)}"
            yield f"    in: {', '.join(owners)} ({shown.group}); metainfer config explain {name}"
    for alias in vllm_names.ALIASES:
        said = alias.ours or alias.already or f"refused: {alias.refused}"
        if not alias.ours and any(term in name for name in alias.names):
            yield f"{', '.join(alias.names)} of vLLM: {said}"


def by_flag(verbs: Iterable[Verb]) -> dict[Flag, list[str]]:
    """Each flag with the verbs that have it; two verbs' flags of one name may differ."""
    found: dict[Flag, list[str]] = {}
    for verb in verbs:
        for flag in verb.flags:
            found.setdefault(flag, []).append(verb.name)
    return found


def grouped(flags: Iterable[Flag]) -> list[tuple[str, list[Flag]]]:
    """Flags by group, in the order in which the groups first appear."""
    found: dict[str, list[Flag]] = {}
    for flag in flags:
        found.setdefault(flag.group, []).append(flag)
    return list(found.items())


def line(flag: Flag) -> str:
    """One flag in one line."""
    shown = " ".join((", ".join(flag.names), *((flag.value,) if flag.value else ())))
    notes = []
    if flag.usual:
        notes.append(f"default {flag.usual}")
    if flag.required:
        notes.append("required")
    if also := vllm_names.equals(flag.name):
        notes.append(f"vLLM: {', '.join(also)}")
    return f"{shown}  {flag.help}" + (f"  [{'; '.join(notes)}]" if notes else "")
