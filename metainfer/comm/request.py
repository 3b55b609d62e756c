"""One collective, described by what every rank knows: what a plan may depend on, and nothing else.

`count` is in elements of `dtype` and means, per op:

* ``all_reduce``, ``broadcast``: the message, equal on all ranks;
* ``reduce_scatter``: the input, equal on all ranks; rank r keeps `shard` r of it;
* ``all_gather``: the result; rank r brings `shard` r of it;
* ``all_to_all``: the input, `world` equal blocks, block p for rank p;
* ``barrier``: 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from metainfer.core.verdict import Verdict, all_of, require

MAX_WORLD = 8  # peers mapped into one context; the flag table is laid out for it
#: Bytes of an element. Reductions run in the first four and int32; the rest is moved as bytes.
ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}
REDUCIBLE = ("bfloat16", "float16", "float32", "float64", "int32")
SIDE_BYTES = 256
"""Room beside the payload of a slot: statistics that ride along, never quantised."""


class Op(StrEnum):
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    BARRIER = "barrier"
    ALL_TO_ALL = "all_to_all"


class Precision(StrEnum):
    """`EXACT`: wide sum in rank order, one rounding, equal on all ranks whatever the algorithm.
    `NATIVE`: the wire has the element type, several roundings (NCCL, rings)."""

    EXACT = "exact"
    NATIVE = "native"


class Phase(StrEnum):
    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """After an all-reduce y of [rows, hidden]: residual += y, then RMSNorm of the residual."""

    hidden: int
    eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One collective as planned for. `side_int32`: counts summed beside the payload. `captured`:
    it must run inside a graph."""

    op: Op
    count: int
    dtype: str
    world: int
    root: int = 0
    phase: Phase = Phase.DECODE
    precision: Precision = Precision.EXACT
    epilogue: Epilogue | None = None
    side_int32: int = 0
    captured: bool = False

    @property
    def bytes(self) -> int:
        """The message S of the cost formulas."""
        return self.count * ELEMENT_BYTES[self.dtype]

    @property
    def name(self) -> str:
        """For messages: ``all_reduce of 8192 B (bfloat16) over 4 ranks``."""
        return f"{self.op} of {self.bytes} B ({self.dtype}) over {self.world} ranks"

    def check(self) -> Verdict:
        """Everything wrong with the request itself, in one pass; no backend is asked."""
        reduces = self.op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
        known = self.dtype in ELEMENT_BYTES
        checks = [
            require(known, "dtype", f"element type {self.dtype!r} is not known"),
            require(
                not (reduces and known) or self.dtype in REDUCIBLE,
                *("dtype", f"{self.dtype} cannot be summed"),
            ),
            require(
                1 <= self.world <= MAX_WORLD,
                *("world", f"{self.world} ranks; from 1 to {MAX_WORLD} are built"),
            ),
            require(self.count >= 0, "count", f"{self.count} elements"),
            require(
                self.op is not Op.BARRIER or self.count == 0,
                *("count", "a barrier carries no elements"),
            ),
            require(
                0 <= self.root < max(1, self.world),
                *("root", f"root {self.root} is not one of {self.world} ranks"),
            ),
            require(
                self.op is not Op.ALL_TO_ALL or self.count % max(1, self.world) == 0,
                *("count", f"{self.count} elements are not {self.world} equal blocks"),
            ),
            require(
                0 <= self.side_int32 * 4 <= SIDE_BYTES,
                *("side", f"{self.side_int32} counts exceed the {SIDE_BYTES} B beside a payload"),
            ),
            require(
                not self.side_int32 or self.op is Op.ALL_REDUCE,
                *("side", f"only an all_reduce carries counts, not {self.op}"),
            ),
        ]
        if self.epilogue is not None:
            hidden = self.epilogue.hidden
            checks.append(
                require(
                    self.op is Op.ALL_REDUCE and hidden > 0 and self.count % hidden == 0,
                    *(
                        "epilogue",
                        f"{self.op} of {self.count} is no sum of rows of {hidden}",
                    ),
                )
            )
        return all_of(checks)


def shard(count: int, world: int, rank: int) -> tuple[int, int]:
    """Begin and end of rank's part: contiguous, sizes differ by at most one, larger ones first."""
    base, extra = divmod(count, world)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)
