"""Ranks agree or stop: what each rank decided, compared before anything depends on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from metainfer.core.digest import canonical_json, digest
from metainfer.core.errors import MetaInferError

#: Every rank's bytes, in rank order, given one's own: an all-gather over any transport.
Exchange = Callable[[bytes], Sequence[bytes]]


class DisagreementError(MetaInferError):
    """Ranks decided differently; the same error, word for word, on all of them."""

    default_code = "ranks_disagree"


def agree(what: str, mine: Mapping[str, object], exchange: Exchange) -> str:
    """Return the common digest of `mine`, or raise on every rank alike.

    Digests travel first; the values only when they differ, to say in which entry.

    Raises:
        DisagreementError: naming the entries that differ, with each rank's value.
    """
    own = digest(mine, 32)
    seen = [text.decode() for text in exchange(own.encode())]
    if len(set(seen)) == 1:
        return own
    bodies = [json.loads(text) for text in exchange(canonical_json(mine).encode())]
    lines = differences(bodies)
    raise DisagreementError(
        f"ranks disagree on {what}: {'; '.join(lines)}.",
        "Let one rank decide and the others take over its plan; clear stale plan files.",
    )


def differences(values: Sequence[Mapping[str, object]]) -> list[str]:
    """One line per entry that is not equal on all ranks, with the ranks that hold each value."""
    lines = []
    for key in sorted({key for value in values for key in value}):
        held: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            text = canonical_json(value[key]) if key in value else "absent"
            held.setdefault(text, []).append(rank)
        if len(held) > 1:
            shown = ", ".join(f"{text} on {_ranks(ranks)}" for text, ranks in held.items())
            lines.append(f"{key}: {shown}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
