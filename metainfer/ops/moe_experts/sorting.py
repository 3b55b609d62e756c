"""Sizes of the kernels that sort pairs by expert, read by their calls and the audit. No torch."""

from __future__ import annotations

SORTED_PAIRS = 1024
"""Most (token, choice) pairs that one launch sorts, each program counting all of them; more are
counted by a launch of their own."""

FEW_PAIRS = 32
"""Most pairs that a plan sorts by comparing each with each."""

SLOTS = 128
"""Pairs whose places a program finds at once."""

SORT_WARPS = 4
"""Warps of a program: as many threads as slots."""

PROGRAMS = 128
"""Most programs that sort more pairs: each reads the counts of all."""

PLAN_ROWS = 4
"""Tokens of which a program of a plan quantises a block of channels."""


def lanes(experts: int) -> int:
    """Experts as a program counts them: a power of two, at least one a thread."""
    return max(SLOTS, 1 << (experts - 1).bit_length())


def counted(pairs: int) -> int:
    """Pairs as one launch counts them: two sizes, so that few kernels are to be compiled."""
    return SLOTS if pairs <= SLOTS else SORTED_PAIRS


def plan_of(pairs: int) -> int:
    """Pairs as a plan's launch sorts them; 0: it does not."""
    if pairs > SORTED_PAIRS:
        return 0
    return FEW_PAIRS if pairs <= FEW_PAIRS else counted(pairs)


def share_of(pairs: int) -> int:
    """Times SLOTS: the pairs of one program where there are more than one launch sorts; a multiple
    of the four that are counted at once."""
    return 4 * -(-pairs // (4 * SLOTS * PROGRAMS))


def blocks_of(pairs: int, experts: int, m: int) -> int:
    """Most blocks of up to `m` pairs of one expert that `pairs` can make."""
    return min(pairs, pairs // m + min(experts, pairs))
