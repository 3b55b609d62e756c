"""The price of a step that nobody measured: what it must do, at shares of the device's rates.

``seconds = bytes / (READ_SHARE read) + FLOPs / (RATE_SHARE rate) + kernels KERNEL_S``, then the
collectives as they are modelled; at least what a host needs to launch it where the step is no
graph. The form is that of a calibrated price (`calibration`), with seeds for coefficients.
`benchmarks/steps_priced.py` sets recorded decode steps of one, two and eight ranks beside it: they
lie within 10 %, but for single tokens of `ep2`.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.step import Phase
from metainfer.planner.amounts import Amounts
from metainfer.planner.launches import launch_seconds
from metainfer.platform.facts import CPU, CUDA, Facts

READ_SHARE, RATE_SHARE = 0.9, 0.7
"""Of the device's rates, what kernels reach (seeds)."""
KERNEL_S = 2.1e-6
"""Of a kernel in a captured step beside its bytes and FLOPs: it starts behind the one before."""
LOW, HIGH = 0.4, 2.0
"""Ends of the band over a predicted rate (seeds): what is above is of our kernels on one card."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The uncalibrated price. `read`: bytes/s, `rate`: FLOP/s or None where it is unknown;
    `kernel_s`: of a kernel on the device, `launch_s`: of the host for one. `slower`: times all of
    it.
    """

    read: float
    rate: float | None
    kernel_s: float = 0.0
    launch_s: float = 0.0
    slower: float = 1.0

    def __call__(self, phase: Phase, amounts: Amounts) -> float:
        flops = amounts.flops + amounts.attention
        busy = amounts.moved / (READ_SHARE * self.read) + amounts.kernels * self.kernel_s
        if self.rate is not None:
            busy += flops / (RATE_SHARE * self.rate)
        return self.slower * amounts.taken(busy, self.launch_s)


def bound(facts: Facts, dtype: str) -> Bound | None:
    """The uncalibrated price on a machine; None where its read rate is unknown."""
    device = facts.device
    read = device.read_bytes_s
    if read is None and device.kind == CPU:
        read = facts.host.read_bytes_s
    if read is None:
        return None
    kernel_s = KERNEL_S if device.kind == CUDA else 0.0
    return Bound(read, device.dot_flops.get(dtype), kernel_s, launch_seconds(device.kind))
