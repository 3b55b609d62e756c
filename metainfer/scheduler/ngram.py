"""Drafts without a model: what followed the last time the text ended like this.

Prompt look-up (Saxena 2023, "Prompt Lookup Decoding"): the continuation of the most recent earlier
occurrence of the sequence's last n tokens, for the largest n that occurs. Costs a few dictionary
entries per token and no computation on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from metainfer.core.request import Request

LONGEST = 4
"""Tokens of the longest suffix that is looked for (seed)."""
SHORTEST = 2
"""Tokens of the shortest (seed): after a single one, more drafts are wrong than right."""
REACH = 16_384
"""Latest positions that are remembered per sequence; bounds its memory to about 5 MB."""

_ID_BITS = 32


class NgramDrafts:
    """A `DraftSource`. Keeps an index per running request until `forget`.

    Proposals are a function of the tokens alone. Each token is indexed once: the amortised cost per
    token is ``longest - shortest + 1`` dictionary entries, whatever the length.
    """

    def __init__(
        self, *, longest: int = LONGEST, shortest: int = SHORTEST, reach: int = REACH
    ) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._reach = reach
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, request: Request, tokens: Sequence[int], limit: int) -> list[int]:
        """`limit` tokens, or none when no suffix occurred before."""
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = NgramIndex(self._sizes, self._reach)
        return index.propose(tokens, limit)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request; it may come back and is then indexed anew."""
        self._indexes.pop(request_id, None)

    @property
    def held(self) -> int:
        """Remembered suffixes over all requests."""
        return sum(index.held for index in self._indexes.values())


class NgramIndex:
    """One growing sequence: suffix -> where its latest occurrence ended, for each size.

    Only the last `reach` ends are remembered. `tokens` may grow between calls, never change.
    """

    def __init__(self, sizes: Sequence[int], reach: int) -> None:
        self._ends: list[tuple[int, dict[int, int]]] = [(size, {}) for size in sizes]
        self._reach = reach
        self._next = 1  # the first end that is not indexed yet

    @property
    def held(self) -> int:
        return sum(len(ends) for _, ends in self._ends)

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """The `limit` tokens after the latest earlier occurrence of the longest suffix.

        Where that occurrence is so close that fewer are known, the copy runs on into itself: a
        text that repeats with period p is proposed to go on repeating.
        """
        length = len(tokens)
        self._extend(tokens)
        for size, ends in self._ends:
            if length <= size:
                continue
            end = ends.get(_key(tokens, length, size))
            if end is not None:
                period = length - end
                known = tokens[end : end + min(limit, period)]
                return [known[i % period] for i in range(limit)]
        return []

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index every end that has a token after it."""
        length = len(tokens)
        if length - self._reach > self._next:  # all that is remembered is out of reach
            self._next = length - self._reach
            for _, ends in self._ends:
                ends.clear()
        for end in range(self._next, length):
            old = end - self._reach
            for size, ends in self._ends:
                if end >= size:
                    ends[_key(tokens, end, size)] = end
                if old >= size and ends.get(key := _key(tokens, old, size)) == old:
                    del ends[key]
        self._next = max(self._next, length)


def _key(tokens: Sequence[int], end: int, size: int) -> int:
    """The `size` ids before `end` as one number, so that equal keys mean equal ids."""
    key = 0
    for token in tokens[end - size : end]:
        key = key << _ID_BITS | token
    return key
