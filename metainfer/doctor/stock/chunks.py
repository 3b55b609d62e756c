"""Rows that a rank gets of a chunk, and the chunk whose rows reach a threshold (B-04)."""

from __future__ import annotations

#: Rows above which the fast prefill path is taken (field-cases B-04).
THRESHOLD = 8192


def effective_rows(chunk: int, dp: int) -> int:
    """Rows of one step that a rank gets: the configured chunk is for all of them."""
    return chunk // dp


def advised_chunk(dp: int) -> int:
    """The least configured chunk with which a full chunk of every rank is fast."""
    return THRESHOLD * dp
