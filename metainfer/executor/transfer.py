"""Numbers between host and device, without making the host wait for the device."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def staged(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` where a copy to `device` may start from: pinned memory for CUDA, itself elsewhere.

    A copy from pageable memory waits for the device or leans on the driver's own staging; a pinned
    block goes back to torch's cache only after the copies from it have run.
    """
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of `array` on `device`; on CPU it shares the array's memory."""
    return staged(array, device).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy of `tensor` on its way to the host: read it once the device has got there."""
    # Into pinned memory; what is no CUDA device is waited for, as `wait_for` knows no other.
    copy = tensor.to("cpu", non_blocking=tensor.is_cuda)
    return copy.clone() if copy is tensor else copy


def wait_for(device: torch.device) -> None:
    """Until the device has got through all that was launched."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
