"""Which prompt lengths reach a row threshold, after a chunk was divided among ranks (B-04)."""

from __future__ import annotations

from dataclasses import dataclass

#: Rows above which the fast prefill path is taken (field-cases B-04).
THRESHOLD = 8192


@dataclass(frozen=True, slots=True)
class Interval:
    """Prompts of `low` to `high` tokens a rank; `high` None: no end. `fast`: how their rows run."""

    low: int
    high: int | None
    fast: str  # "no chunk", "every chunk", "all chunks but a short last one"


def effective_rows(chunk: int, dp: int) -> int:
    """Rows of one step that a rank gets: the configured chunk is for all of them."""
    return chunk // dp


def reached(chunk: int, dp: int, threshold: int = THRESHOLD) -> tuple[Interval, ...]:
    """What each prompt length meets.

    A prompt shorter than the threshold is one short step; beyond, every full chunk is fast when it
    reaches the threshold at all, and the last chunk only when what is left of it does.
    """
    rows = effective_rows(chunk, dp)
    if rows < threshold:
        return (Interval(1, None, "no chunk"),)
    first = Interval(1, threshold - 1, "no chunk")
    if rows == threshold:
        return (first, Interval(threshold, None, "all chunks but a short last one"))
    return (
        first,
        Interval(threshold, rows, "every chunk"),
        Interval(rows + 1, None, "all chunks but a short last one"),
    )


def fast_rows(prompt: int, chunk: int, dp: int, threshold: int = THRESHOLD) -> int:
    """Rows of a rank's prompt that run on the fast path."""
    rows = effective_rows(chunk, dp)
    if rows < 1:
        return 0
    full, last = divmod(prompt, rows)
    return (full * rows if rows >= threshold else 0) + (last if last >= threshold else 0)


def advised_chunk(dp: int, threshold: int = THRESHOLD) -> int:
    """The least configured chunk with which a full chunk of every rank is fast."""
    return threshold * dp
