"""The slab in numbers, and one call as C sees it; the same as ``slab.h``, and compared with it.

A slab is a header page, the flags, and two halves of slots: one slot per rank where peers push
(`shared` false), one where the owner writes and peers read. A slot is `SIDE` bytes of counts and
the payload.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

WORLD = 8
PHASES = 2
BLOCKS = 16
HEADER = 4096
FLAG_STEP = 128
SIDE = 256
AT_PID = 64
AT_CALLS = 128
AT_ABORT = 384
AT_BEAT = 512
AT_ERROR = 640
AT_CAUSE = 1024
CAUSE = 1024
HEAD = HEADER + PHASES * BLOCKS * WORLD * FLAG_STEP
CLOSED = (1 << 64) - 1  # the heartbeat of a rank that has left in order


class Code(IntEnum):
    """How a call ended; what an abort word is about."""

    OK = 0
    TIMEOUT = 1
    ABORTED = 2
    MISMATCH = 3
    DIED = 4
    LEFT = 5
    RAISED = 6


class Kind(IntEnum):
    """What a call does with what arrived."""

    SUM_ALL = 0
    SUM_PART = 1
    SUM_GATHER = 2
    COPY = 3
    NOTHING = 4


KERNELS = {
    Kind.SUM_ALL: "mi_all_kernel",
    Kind.SUM_PART: "mi_part_kernel",
    Kind.SUM_GATHER: "mi_gather_kernel",
    Kind.COPY: "mi_copy_kernel",
    Kind.NOTHING: "mi_meet_kernel",
}
"""Kernels of ``kernels.cu``, one for each kind of call."""
TYPES = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3, "int32": 4}
BYTES = 5

_u64, _u32 = ctypes.c_uint64, ctypes.c_uint32


class Call(ctypes.Structure):
    """``MiCall`` of ``slab.h``."""

    _fields_ = (
        *[(name, _u64 * WORLD) for name in ("slab", "in_begin", "in_len", "out_begin", "out_len")],
        *[(name, _u64) for name in ("input", "output", "side_in", "side_out", "residual")],
        *[(name, _u64) for name in ("weight", "normed", "error", "state", "slot_bytes", "stride")],
        *[(name, _u64) for name in ("second", "stripe", "budget_ns", "plan")],
        *[(name, _u32) for name in ("rank", "world", "kind", "type", "width", "shared", "same")],
        *[(name, _u32) for name in ("dry", "side", "hidden")],
        ("eps", ctypes.c_float),
        ("lag", _u32),
    )


class ErrorRecord(ctypes.Structure):
    """``MiError`` of ``slab.h``."""

    _fields_ = tuple(
        (name, _u64)
        for name in ("code", "phase", "peer", "wanted", "seen", "plan", "waited_ns", "block")
    )


#: What ``mi_layout`` answers, in its order.
CHECKED = (
    *(WORLD, PHASES, BLOCKS, HEADER, FLAG_STEP, SIDE, AT_PID, AT_CALLS, AT_ABORT, AT_BEAT),
    *(AT_ERROR, AT_CAUSE, CAUSE, ctypes.sizeof(Call), ctypes.sizeof(ErrorRecord)),
)


def slab_bytes(world: int, slot_bytes: int, *, shared: bool) -> int:
    """Size of one rank's slab, whole pages."""
    slots = 1 if shared else world
    size = HEAD + 2 * slots * (SIDE + slot_bytes)
    return -(-size // 4096) * 4096


def abort_word(code: Code, rank: int, peer: int) -> int:
    """Never zero; `rank` says it, `peer` is whom it is about."""
    return 1 << 63 | int(code) << 32 | rank << 8 | peer


def read_abort(word: int) -> tuple[Code, int, int]:
    """`abort_word` taken apart: code, rank, peer."""
    return Code(word >> 32 & 0xFFFF), word >> 8 & 0xFF, word & 0xFF
