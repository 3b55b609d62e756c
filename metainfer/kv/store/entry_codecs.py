"""What the bytes of a scaled entry mean: values to (value row, scale row), and back.

Formulas: DeepSeek-V4's inference code (``act_quant``, ``fp4_act_quant``), whose cache entries are
e4m3 or e2m1 with power-of-two scales rounded up; V3.2's for e4m3 with a float32 scale. A group
that holds NaN or infinity gets a NaN scale: it reads back as NaN, as in `formats.activation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.formats import elements
from metainfer.formats.activation import E2M1_AMAX_FLOOR, E4M3_AMAX_FLOOR
from metainfer.kv.book.form import EntryForm

E4M3_MAX, E2M1_MAX = 448.0, 6.0
ROWS = 1024
"""Rows that are rounded at a time, so that intermediate results stay near."""


def value_bytes(form: EntryForm) -> int:
    """Bytes of an entry's value row; the rest of `form.bytes` is its scale row."""
    match form.layout:
        case "latent-fp8@1":
            return form.width + form.tail
        case "index-fp8@1":
            return form.width
        case "index-fp4@1":
            return form.width // 2
        case _:
            raise InternalError(f"{form.layout} keeps values and scales in no byte rows")


def encode(form: EntryForm, values: Tensor) -> tuple[Tensor, Tensor]:
    """values [n, width] -> uint8 [n, value bytes], [n, scale bytes].

    Arithmetic is float32, float64 for float64; each value is rounded once.
    """
    x = values if values.dtype == torch.float64 else values.float()
    match form.layout:
        case "latent-fp8@1":
            return _encode_latent(form, x)
        case "index-fp8@1":
            return _encode_amax(x)
        case "index-fp4@1":
            blocks = _groups(x, form)
            scaled, scales = _power_of_two(blocks, E2M1_MAX, E2M1_AMAX_FLOOR)
            return elements.e2m1_pack(elements.e2m1_encode(scaled).flatten(-2)), scales
        case _:
            raise InternalError(f"{form.layout} has no scales")


def decode(form: EntryForm, rows: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `encode`: float32 [n, width]."""
    match form.layout:
        case "latent-fp8@1":
            body = form.width - form.tail
            found = _groups(elements.e4m3_decode(rows[:, :body].contiguous()), form)
            found = found * elements.e8m0_decode(scales[:, : body // form.group]).unsqueeze(-1)
            tail = rows[:, body:].contiguous().view(torch.bfloat16).float()
            return torch.cat((found.flatten(1), tail), dim=1)
        case "index-fp8@1":
            return elements.e4m3_decode(rows.contiguous()) * scales.contiguous().view(torch.float32)
        case "index-fp4@1":
            found = _groups(elements.e2m1_decode(elements.e2m1_unpack(rows)), form)
            return (found * elements.e8m0_decode(scales).unsqueeze(-1)).flatten(1)
        case _:
            raise InternalError(f"{form.layout} has no scales")


def rounded(form: EntryForm, values: Tensor) -> Tensor:
    """`values` [..., width] stored and read back, in their dtype; plain forms change nothing."""
    if form.scale == "none":
        return values
    flat = values.reshape(-1, form.width)
    turned = [_rounded(form, part) for part in torch.split(flat, ROWS)]
    return torch.cat(turned).to(values.dtype).reshape(values.shape)


def _rounded(form: EntryForm, values: Tensor) -> Tensor:
    if form.layout != "index-fp4@1":
        return decode(form, *encode(form, values))
    x = values if values.dtype == torch.float64 else values.float()
    scaled, scales = _power_of_two(_groups(x, form), E2M1_MAX, E2M1_AMAX_FLOOR)
    size = scaled.abs().clamp_(max=E2M1_MAX)
    # The step is half the binade, and that of [1, 2) below: two codes a binade.
    step = _binade(size.clamp_min(1.0)).mul_(0.5)
    grid = size.div_(step).round_().mul_(step).copysign_(scaled)
    return grid.mul_(elements.e8m0_decode(scales, x.dtype).unsqueeze(-1)).flatten(1)


def _groups(x: Tensor, form: EntryForm) -> Tensor:
    """[n, channels] as [n, groups, group]."""
    return torch.unflatten(x, 1, (x.shape[1] // form.group, form.group))


def _binade(x: Tensor) -> Tensor:
    """2^floor(log2 x) of normal positive x (overwritten), by its exponent bits."""
    if x.dtype == torch.float64:
        return x.view(torch.int64).bitwise_and_(0x7FF << 52).view(torch.float64)
    return x.view(torch.int32).bitwise_and_(0xFF << 23).view(torch.float32)


def _encode_latent(form: EntryForm, x: Tensor) -> tuple[Tensor, Tensor]:
    body = form.width - form.tail
    blocks = _groups(x[:, :body], form)
    scaled, used = _power_of_two(blocks, E4M3_MAX, E4M3_AMAX_FLOOR)
    tail = x[:, body:].to(torch.bfloat16).contiguous().view(torch.uint8)
    rows = torch.cat((_e4m3(scaled.flatten(1)), tail), dim=1)
    scales = used.new_zeros(x.shape[0], form.bytes - rows.shape[1])
    scales[:, : used.shape[1]] = used
    return rows, scales


def _encode_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale float32(max(amax, 1e-4) / 448); the quotient is rounded in the working type first."""
    amax = x.abs().amax(dim=1)
    finite = torch.isfinite(amax)
    scale = (torch.where(finite, amax, 0).clamp_min(E4M3_AMAX_FLOOR) / E4M3_MAX).float()
    scaled = x / scale.to(x.dtype).unsqueeze(1)
    scales = torch.where(finite, scale, torch.nan)
    return _e4m3(scaled), scales.view(torch.uint8).view(-1, 4)


def _power_of_two(blocks: Tensor, largest: float, floor: float) -> tuple[Tensor, Tensor]:
    """blocks [n, groups, group] over their scales, and the scales as e8m0 bytes [n, groups]."""
    amax = blocks.abs().amax(dim=-1)
    finite = torch.isfinite(amax)
    bounded = torch.where(finite, amax, 0).clamp_min(floor)
    # 2^127 is the largest scale: beyond it (float64 only) values saturate.
    exponent = elements.ceil_exponent(bounded, largest).clamp_max(127)
    scaled = blocks * elements.power_of_two(-exponent, blocks.dtype).unsqueeze(-1)
    scales = torch.where(finite, exponent + 127, elements.E8M0_NAN)
    return scaled, scales.to(torch.uint8)


def _e4m3(values: Tensor) -> Tensor:
    """Bytes; from float32 the cast rounds as `elements.e4m3_encode` does, in one pass (tests):
    scales leave nothing above 448 but a rounding error."""
    if values.dtype == torch.float32:
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    return elements.e4m3_encode(values)
