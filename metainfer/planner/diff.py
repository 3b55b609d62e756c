"""Two plan documents side by side: what was decided otherwise, what weighs more, who decided it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NAMED = ("name", "item")


def plan_diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between two documents of ``plan --json``.

    ``{"same", "values", "ledger", "capacity", "layouts"}``; each difference has `key`, `before` and
    `after` (None where one side has nothing), a value also `why`, the reasons of its decisions, a
    row of the ledger also `bytes`, the change. Fingerprints are left out: they follow.
    """
    values = [
        row
        | {
            "why": [
                None if row[side] is None else _why(document, row["key"])
                for side, document in (("before", before), ("after", after))
            ]
        }
        for row in _rows(before["plan"], after["plan"])
        if row["key"] != "fingerprint"
    ]
    weights = [
        row | {"bytes": (row["after"] or 0) - (row["before"] or 0)}
        for row in _rows(_bytes(before), _bytes(after))
    ]
    found = {
        "values": values,
        "ledger": weights,
        "capacity": _rows(before["capacity"], after["capacity"]),
        "layouts": _rows(_layouts(before), _layouts(after)),
    }
    return {"same": not any(found.values()), **found}


def _rows(before: object, after: object) -> list[dict[str, Any]]:
    left, right = dict(_flat("", before)), dict(_flat("", after))
    return [
        {"key": key, "before": left.get(key), "after": right.get(key)}
        for key in {**left, **right}
        if left.get(key) != right.get(key)
    ]


def _flat(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Leaves by dotted path; members of a list by their name where they have one."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, each in enumerate(value):
            names = [each[name] for name in _NAMED if isinstance(each, Mapping) and name in each]
            yield from _flat(f"{path}.{names[0] if names else index}", each)
    else:
        yield path, value


def _bytes(document: Mapping[str, Any]) -> dict[str, int]:
    return {row["item"]: row["bytes"] for row in document["ledger"]}


def _layouts(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each layout what people compare; reasons and pairs stand in the documents."""
    told = ("feasible", "kv_tokens", "max_context", "prefill_tok_s", "decode_tok_s")
    return {row["name"]: {name: row[name] for name in told} for row in document["layouts"]}


def _why(document: Mapping[str, Any], key: str) -> str | None:
    """Who decided the value: the decision for its path, or for the nearest part of it."""
    decided = {row["key"]: row for row in document["decisions"]}
    while key and key not in decided:
        key = key.rpartition(".")[0]
    return f"{decided[key]['origin']}: {decided[key]['why']}" if key else None
