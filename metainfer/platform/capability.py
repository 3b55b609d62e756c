"""What follows from an NVIDIA compute capability: native element types and features. Pure.

Rules of the instruction set, by capability pair, never by family name: 12.x shares a marketing
family with 10.x and has neither its tensor memory (tcgen05) nor 9.0's wgmma (PTX ISA manual,
"target architecture" notes of each instruction). Machine files and probes use the same rules.
An unlisted, newer capability gets None: unknown, not "as its neighbour".
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32 = "float32"
FLOAT16 = "float16"
BFLOAT16 = "bfloat16"
INT8 = "int8"
E4M3 = "float8_e4m3fn"
E5M2 = "float8_e5m2"
E2M1 = "float4_e2m1"
TF32 = "tf32"

_PLAIN = frozenset({FLOAT32, FLOAT16, INT8})
_AMPERE_DOT = frozenset({FLOAT16, BFLOAT16, TF32, INT8})
_FP8 = frozenset({E4M3, E5M2})
_BASE = frozenset({"graphs", "streams"})


@dataclass(frozen=True, slots=True)
class Instructions:
    """Element types with native matrix instructions, types it converts natively, features."""

    dot_types: frozenset[str]
    storage_types: frozenset[str]
    features: frozenset[str]


def instructions(capability: tuple[int, int]) -> Instructions | None:
    """The rules for one capability; None where we have no rule for it."""
    return _TABLE.get(capability)


def _row(dot: frozenset[str], storage: frozenset[str], *features: str) -> Instructions:
    return Instructions(dot, _PLAIN | storage, _BASE | frozenset(features))


_BF16 = frozenset({BFLOAT16})
_ASYNC = "cp_async"
_TABLE: dict[tuple[int, int], Instructions] = {
    (7, 0): _row(frozenset({FLOAT16}), frozenset()),
    (7, 5): _row(frozenset({FLOAT16, INT8}), frozenset()),
    (8, 0): _row(_AMPERE_DOT, _BF16, _ASYNC),
    (8, 6): _row(_AMPERE_DOT, _BF16, _ASYNC),
    (8, 7): _row(_AMPERE_DOT, _BF16, _ASYNC),
    (8, 9): _row(_AMPERE_DOT | _FP8, _BF16 | _FP8, _ASYNC),
    (9, 0): _row(_AMPERE_DOT | _FP8, _BF16 | _FP8, _ASYNC, "tma", "wgmma", "cluster"),
    **{
        pair: _row(
            _AMPERE_DOT | _FP8 | {E2M1},
            _BF16 | _FP8 | {E2M1},
            _ASYNC,
            "tma",
            "tcgen05",
            "cluster",
        )
        for pair in ((10, 0), (10, 3))
    },
    **{
        pair: _row(
            _AMPERE_DOT | _FP8 | {E2M1},
            _BF16 | _FP8 | {E2M1},
            _ASYNC,
            "tma",
            "cluster",
            "block_scaled_mma",
        )
        for pair in ((12, 0), (12, 1))
    },
}
