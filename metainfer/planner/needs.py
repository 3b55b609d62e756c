"""What steps take beside weights and caches, as measured: a record of `tune capacity`.

A chunk of `rows` tokens that ends at `context` needs so many bytes at once. Beyond what was
measured the need is bounded: ``a + b rows + c context + d rows context``, not negative, fitted to
relative errors and lifted until no measured peak lies above it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from metainfer.core.digest import digest
from metainfer.core.errors import UserError
from metainfer.core.plan import Limits
from metainfer.kernels.choice import Bundle
from metainfer.models.arch import Arch
from metainfer.planner.least_squares import not_negative

KIND = "capacity"
"""Of the records that hold a `Needs`."""
MEASURED = "(measured)"
"""At the end of a ledger row that follows one."""
AGAIN = "Delete records/capacity in the cache folder, then: metainfer tune capacity MODEL."


@dataclass(frozen=True, slots=True)
class Peak:
    """Most transient bytes at once in a chunk of `rows` tokens that ends at `context` tokens."""

    rows: int
    context: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Needs:
    """One model's needs on one machine.

    `outside_bytes`: what the device holds outside the allocator (context, libraries, other
    processes' share is none of it); `slack_bytes`: what the allocator kept beyond what was in use
    at the peak. `standing_bytes`: what is in use between steps beside weights and cache: results
    and tables of captured steps, libraries' workspaces; of the steps `captured` (a `graphs.key`).
    None where the device does not tell. `ops`: digest of the kernels that ran. `origin`: how it was
    taken, for people.
    """

    peaks: tuple[Peak, ...]
    ops: str
    outside_bytes: int | None = None
    slack_bytes: int | None = None
    standing_bytes: int | None = None
    captured: str = ""
    origin: str = ""

    def transient_bytes(self, rows: int, context: int) -> int:
        """What a chunk of `rows` tokens that ends at `context` is to be given."""
        under = [p.bytes for p in self.peaks if p.rows <= rows and p.context <= context]
        found = max(under, default=0)
        if self.reaches(rows, context):
            over = [p.bytes for p in self.peaks if p.rows >= rows and p.context >= context]
            return max(found, min(over))
        terms = _terms(rows, context)
        return max(found, math.ceil(sum(a * b for a, b in zip(self._line, terms, strict=True))))

    def reaches(self, rows: int, context: int) -> bool:
        """Whether a peak of at least so many rows and tokens was measured."""
        return any(peak.rows >= rows and peak.context >= context for peak in self.peaks)

    def standing(self, captured: str) -> int | None:
        """What is in use between steps where those were captured; None where it is unknown."""
        return self.standing_bytes if self.captured == captured else None

    @property
    def reserve_bytes(self) -> int | None:
        """What the device's context and the allocator are to be left; None where it is unknown."""
        if self.outside_bytes is None or self.slack_bytes is None:
            return None
        return self.outside_bytes + self.slack_bytes

    @cached_property
    def _line(self) -> tuple[float, ...]:
        sizes = [max(peak.bytes, 1) for peak in self.peaks]
        terms = [_terms(peak.rows, peak.context) for peak in self.peaks]
        columns = [
            [row[i] / size for row, size in zip(terms, sizes, strict=True)] for i in range(4)
        ]
        fitted = not_negative(columns, [1.0] * len(sizes))
        values = [sum(a * b for a, b in zip(fitted, row, strict=True)) for row in terms]
        lift = max(
            size / value if value else 1.0 for size, value in zip(sizes, values, strict=True)
        )
        return tuple(max(lift, 1.0) * each for each in fitted)

    def to_json(self) -> dict[str, Any]:
        return {
            "peaks": [[peak.rows, peak.context, peak.bytes] for peak in self.peaks],
            "ops": self.ops,
            "outside_bytes": self.outside_bytes,
            "slack_bytes": self.slack_bytes,
            "standing_bytes": self.standing_bytes,
            "captured": self.captured,
            "origin": self.origin,
        }


def _terms(rows: int, context: int) -> tuple[float, float, float, float]:
    return 1.0, float(rows), float(context), float(rows) * context


def needs_from(payload: Any) -> Needs:
    """The needs in a record.

    Raises:
        UserError: it is something else, or empty.
    """
    try:
        found = Needs(
            peaks=tuple(Peak(int(r), int(c), int(n)) for r, c, n in payload["peaks"]),
            ops=str(payload["ops"]),
            outside_bytes=_optional(payload["outside_bytes"]),
            slack_bytes=_optional(payload["slack_bytes"]),
            standing_bytes=_optional(payload.get("standing_bytes")),
            captured=str(payload.get("captured", "")),
            origin=str(payload["origin"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"a record of capacity cannot be read: {error!r}.",
            AGAIN,
            code="bad_record",
        ) from error
    if not found.peaks:
        raise UserError("a record of capacity is empty.", AGAIN, code="bad_record")
    return found


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)


def needs_key(arch: Arch, dtype: str, layouts: Mapping[str, str], threads: int) -> str:
    """What needs depend on beside the machine and the kernels: shapes, type, packings, threads."""
    return digest({"arch": arch, "dtype": dtype, "layouts": dict(layouts), "threads": threads})


def longest_seen(limits: Limits) -> int:
    """Tokens of the longest context that a step meets: the last token of a sequence is drawn and
    never computed."""
    return max(1, limits.max_context - 1)


def ops_of(bundle: Bundle) -> str:
    """The kernels that a chunk runs, as a digest."""
    return digest(
        {
            choice.request.site: choice.impl.id
            for choice in bundle.choices
            if choice.request.phase.value == "chunk"
        }
    )


def nothing_known(key: str) -> Needs | None:
    """The records of a machine that has none."""
    return None
