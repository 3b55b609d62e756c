"""Measured step times become a price: per phase, what a step costs beside and for its amounts.

``seconds = overhead + bytes * b + FLOPs * f + attention FLOPs * a``, coefficients not negative and
a at least f, fitted to relative errors; times a ratio over the rows of a step, interpolated between
those that were measured, for what the line misses (a kernel that changes its tile). Few samples do
not carry four coefficients: then a phase has those that bound it, bytes where it decodes and FLOPs
where it computes prompts (a = f: prompts of a few lengths cannot tell the two apart). Collectives
are added as modelled: they are not part of a fit.

A step that no graph holds takes at least as long as its launches: at the seed for each, or less
where a measured step took less. Steps that wait for their host say nothing of the line.

The band is honest about rows that were not measured: every sample is predicted from the others, and
the largest error so found is its half width, never below `LEAST_BAND`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metainfer.core.digest import digest
from metainfer.core.errors import UserError
from metainfer.core.step import Phase
from metainfer.kernels.choice import Bundle
from metainfer.models.arch import Arch
from metainfer.planner.amounts import Amounts
from metainfer.planner.least_squares import not_negative

KIND = "steps"
"""Of the records that hold a `Calibration`."""
AGAIN = "Delete records/steps in the cache folder, then: metainfer bench calibrate MODEL."

LEAST_BAND = 0.10
"""Half width of a calibrated band at least (seed): another hour of the same machine."""
ENOUGH_ROWS = 3
"""Different row counts from which on ratios are interpolated."""
ENOUGH_SAMPLES = 8
"""Samples of a phase from which on all four coefficients are fitted."""

WAITED = 0.9
"""A step whose launches are at least this share of it waited for its host (seed)."""

NEAREST: Mapping[Phase, tuple[Phase, ...]] = {
    Phase.MIXED: (Phase.CHUNK, Phase.DECODE),
    Phase.VERIFY: (Phase.MIXED, Phase.DECODE, Phase.CHUNK),
    Phase.CHUNK: (Phase.MIXED,),
    Phase.DECODE: (Phase.VERIFY, Phase.MIXED),
    Phase.DRAFT: (Phase.DECODE,),
}
"""Which phase stands in for one without measurements, first choice first."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured step: what it did, and how long that took."""

    phase: Phase
    amounts: Amounts
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFit:
    """Seconds: of a step, a byte, a FLOP, an attention FLOP, a launch by the host. `ratios`: (rows,
    measured over fitted), rising in rows; empty where too few were measured."""

    overhead_s: float
    byte_s: float
    flop_s: float
    attention_s: float
    ratios: tuple[tuple[int, float], ...] = ()
    launch_s: float = 0.0

    def seconds(self, amounts: Amounts) -> float:
        return amounts.taken(self.busy(amounts), self.launch_s)

    def busy(self, amounts: Amounts) -> float:
        """Of the device, without what is sent."""
        line = (
            self.overhead_s
            + amounts.moved * self.byte_s
            + amounts.flops * self.flop_s
            + amounts.attention * self.attention_s
        )
        return line * _interpolated(self.ratios, amounts.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A `Price` of one model on one machine. `band`: half width, relative. `request_s`: of a
    request until its engine has it, `token_s`: of a token from there to its client (`bench.path`).
    `origin`: how it was taken, for people."""

    phases: Mapping[Phase, PhaseFit]
    band: float
    samples: int
    request_s: float = 0.0
    token_s: float = 0.0
    origin: str = ""

    def __call__(self, phase: Phase, amounts: Amounts) -> float:
        for candidate in (phase, *NEAREST[phase]):
            if candidate in self.phases:
                return self.phases[candidate].seconds(amounts)
        return next(iter(self.phases.values())).seconds(amounts)

    def to_json(self) -> dict[str, Any]:
        return {
            "phases": {
                phase.value: {
                    "overhead_s": fit.overhead_s,
                    "byte_s": fit.byte_s,
                    "flop_s": fit.flop_s,
                    "attention_s": fit.attention_s,
                    "ratios": [list(pair) for pair in fit.ratios],
                    "launch_s": fit.launch_s,
                }
                for phase, fit in self.phases.items()
            },
            "band": self.band,
            "samples": self.samples,
            "request_s": self.request_s,
            "token_s": self.token_s,
            "origin": self.origin,
        }


def key(arch: Arch, dtype: str, bundle: Bundle, threads: int) -> str:
    """What step times depend on beside the machine: shapes, type, kernels, threads."""
    phases = {phase.value for phase in (Phase.CHUNK, Phase.MIXED, Phase.DECODE)}
    ops = {
        f"{choice.request.site}@{choice.request.phase.value}": choice.impl.id
        for choice in bundle.choices
        if choice.request.phase.value in phases
    }
    return digest(
        {
            "arch": arch,
            "dtype": dtype,
            "layouts": dict(bundle.layouts),
            "ops": ops,
            "threads": threads,
        }
    )


def nothing_measured(key: str) -> Calibration | None:
    """The records of a machine that has none."""
    return None


def calibration_from(payload: Any) -> Calibration:
    """The calibration of a record or a file.

    Raises:
        UserError: it is something else.
    """
    try:
        phases = {
            Phase(name): PhaseFit(
                overhead_s=float(fit["overhead_s"]),
                byte_s=float(fit["byte_s"]),
                flop_s=float(fit["flop_s"]),
                attention_s=float(fit["attention_s"]),
                ratios=tuple((int(rows), float(ratio)) for rows, ratio in fit["ratios"]),
                launch_s=float(fit.get("launch_s", 0.0)),
            )
            for name, fit in payload["phases"].items()
        }
        found = Calibration(
            phases=phases,
            band=float(payload["band"]),
            samples=int(payload["samples"]),
            request_s=float(payload["request_s"]),
            token_s=float(payload.get("token_s", 0.0)),
            origin=str(payload["origin"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"a calibration of step times cannot be read: {error!r}.",
            AGAIN,
            code="bad_record",
        ) from error
    if not found.phases:
        raise UserError("a calibration of step times is empty.", AGAIN, code="bad_record")
    return found


def calibrate(
    samples: Sequence[Sample], *, launch_s: float = 0.0, request_s: float = 0.0, origin: str = ""
) -> Calibration:
    """Fit every phase that was measured. `launch_s`: of the host for a launch, at most.

    Raises:
        UserError: nothing was measured, or a step took no time.
    """
    if not samples or any(not each.seconds > 0 for each in samples):
        raise UserError("there are no step times to fit.", "Measure at least one step.")
    phases, errors = {}, [0.0]
    for phase in dict.fromkeys(each.phase for each in samples):
        of_phase = [each for each in samples if each.phase is phase]
        phases[phase] = fit(of_phase, launch_s)
        errors += left_out(of_phase, launch_s)
    return Calibration(
        phases=phases,
        band=max(LEAST_BAND, *errors),
        samples=len(samples),
        request_s=request_s,
        origin=origin,
    )


def left_out(samples: Sequence[Sample], launch_s: float = 0.0) -> list[float]:
    """Relative error of each sample as the others predict it; none for a lone one."""
    if len(samples) < 2:
        return []
    errors = []
    for index, sample in enumerate(samples):
        rest = [*samples[:index], *samples[index + 1 :]]
        errors.append(abs(fit(rest, launch_s).seconds(sample.amounts) / sample.seconds - 1))
    return errors


def fit(samples: Sequence[Sample], launch_s: float = 0.0) -> PhaseFit:
    """One phase. Coefficients minimise the squares of relative errors and are not negative. Left
    out of them are steps that waited for their host, unless all did."""
    eager = [each for each in samples if each.amounts.launches]
    launch_s = min([launch_s, *(each.seconds / each.amounts.launches for each in eager)])
    samples = [
        each for each in samples if each.amounts.launches * launch_s < WAITED * each.seconds
    ] or samples
    spent = [max(each.seconds * each.amounts.gain - each.amounts.sent, 1e-9) for each in samples]
    columns = [
        [1.0 for _ in samples],
        [each.amounts.moved for each in samples],
        [each.amounts.flops + each.amounts.attention for each in samples],
        [each.amounts.attention for each in samples],
    ]
    weighted = [[value / s for value, s in zip(column, spent, strict=True)] for column in columns]
    allowed: tuple[int, ...] = (0, 1, 2, 3)
    if len(samples) < ENOUGH_SAMPLES:
        decodes = samples[0].phase in (Phase.DECODE, Phase.VERIFY, Phase.DRAFT)
        allowed = (1, 0) if decodes else (2, 0)
    found = [0.0] * len(columns)
    for column, value in zip(
        allowed, not_negative([weighted[i] for i in allowed], [1.0] * len(samples)), strict=True
    ):
        found[column] = value
    overhead, byte, flop, more = found
    attention = flop + more
    line = PhaseFit(overhead_s=overhead, byte_s=byte, flop_s=flop, attention_s=attention)
    by_rows: dict[int, list[float]] = {}
    for sample, seconds in zip(samples, spent, strict=True):
        fitted = line.busy(sample.amounts)
        by_rows.setdefault(sample.amounts.rows, []).append(seconds / fitted if fitted else 1.0)
    ratios = tuple((rows, statistics.median(found)) for rows, found in sorted(by_rows.items()))
    return PhaseFit(
        overhead_s=overhead,
        byte_s=byte,
        flop_s=flop,
        attention_s=attention,
        ratios=ratios if len(ratios) >= ENOUGH_ROWS else (),
        launch_s=launch_s,
    )


def _interpolated(ratios: Sequence[tuple[int, float]], rows: int) -> float:
    """Over the logarithm of `rows`; beyond the ends, the end's."""
    if not ratios:
        return 1.0
    if rows <= ratios[0][0]:
        return ratios[0][1]
    for (low, below), (high, above) in itertools.pairwise(ratios):
        if rows <= high:
            part = math.log(rows / low) / math.log(high / low)
            return below + part * (above - below)
    return ratios[-1][1]
