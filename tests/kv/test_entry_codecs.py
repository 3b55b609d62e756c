"""Entry forms byte by byte, against definitions written out in exact arithmetic."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.formats import activation, elements
from metainfer.kv.book.form import (
    EntryForm,
    entry_form,
    index_fp4,
    index_fp8,
    index_plain,
    latent_fp8,
    latent_plain,
)
from metainfer.kv.store.entries import EntryPages, gather, locate, store
from metainfer.kv.store.entry_codecs import decode, encode, rounded

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [
    (math.ldexp(code & 7, -9) if code < 8 else math.ldexp(8 + (code & 7), (code >> 3) - 10))
    for code in range(127)
]
SCALED = [
    latent_fp8(512, 64), latent_fp8(32, 8), latent_fp8(26, 10), index_fp4(128), index_fp4(16),
    index_fp4(8), index_fp8(128), index_fp8(16),
]  # fmt: skip


def fresh(form: EntryForm, pages: int, entries: int) -> EntryPages:
    if form.scale == "none":
        shape: tuple[int, ...] = (pages, entries, form.width)
        return EntryPages(0, torch.zeros(shape, dtype=getattr(torch, form.stored)), form, entries)
    data = torch.full((pages, form.page_bytes(entries)), 0xAB, dtype=torch.uint8)
    return EntryPages(0, data, form, entries)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- definitions ---------------------------------------------------------------------------------


def nearest(value: Fraction, negative: bool, grid: list[float], sign: int) -> int:
    """The code of the nearest grid value, ties to the even code, beyond the end the last."""
    size = abs(value)
    best = min(range(len(grid)), key=lambda code: (abs(Fraction(grid[code]) - size), code % 2))
    return best | (sign if negative else 0)


def exponent(amax: float, largest: int, floor: float) -> int:
    """The smallest e with amax <= largest * 2^e."""
    size, e = Fraction(max(amax, floor)), -160
    while size > largest * Fraction(2) ** e:
        e += 1
    return e


def group_bytes(
    group: list[float], largest: int, floor: float, grid: list[float], sign: int
) -> tuple[list[int], int]:
    """Codes and scale byte of one group by the definition."""
    if not all(map(math.isfinite, group)):
        return [], 255
    e = exponent(max(map(abs, group)), largest, floor)
    codes = [
        nearest(Fraction(v) / Fraction(2) ** e, math.copysign(1, v) < 0, grid, sign) for v in group
    ]
    return codes, e + 127


def bf16_bytes(value: float) -> list[int]:
    """Round a float32 to bfloat16, half to even, by its bits; little endian."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if math.isnan(value):
        return []
    bits += 0x7FFF + ((bits >> 16) & 1)
    return [(bits >> 16) & 0xFF, (bits >> 24) & 0xFF]


def latent_bytes(form: EntryForm, row: list[float]) -> tuple[list[list[int]], list[int]]:
    """Value bytes group by group ([] where NaN leaves them open), then the scale row."""
    body, found, scales = form.width - form.tail, [], []
    for start in range(0, body, form.group):
        codes, scale = group_bytes(row[start : start + form.group], 448, 1e-4, E4M3, 0x80)
        found.append(codes)
        scales.append(scale)
    found += [bf16_bytes(v) for v in row[body:]]
    return found, scales + [0] * (-len(scales) % 8)


EDGES = [
    0.0, -0.0, 448.0, -448.0, 2.0**-9, 1.5 * 2.0**-9, 2.0**-10, -(2.0**-6), 15.5 * 2.0**-9,
    1e-4, 1e-5, 3.0, -7.25, 0.1, 464.0, 1e-30, 1e-42, -1e-45, 3e38, math.nan, math.inf,
]  # fmt: skip
single = st.one_of(
    st.sampled_from(EDGES),
    st.floats(width=32),
    st.floats(-500, 500, width=32),
)


@settings(max_examples=60)
@given(st.data())
def test_latents_byte_by_byte(data: st.DataObject) -> None:
    form = latent_fp8(24, 8)
    assert (form.group, form.bytes) == (16, 16 + 16 + 8)
    row = data.draw(st.lists(single, min_size=24, max_size=24))
    rows, scales = encode(form, torch.tensor([row], dtype=torch.float64).float())
    exact = torch.tensor([row], dtype=torch.float32)[0].tolist()
    want, want_scales = latent_bytes(form, exact)
    assert scales[0].tolist() == want_scales
    got, at = rows[0].tolist(), 0
    for part, size in zip(want, [16, *[2] * 8], strict=True):
        if part:
            assert got[at : at + size] == part
        at += size
    back = decode(form, rows, scales)[0].tolist()
    for value, found in zip(exact[:16], back[:16], strict=True):
        assert math.isnan(found) == (want_scales[0] == 255), value
    for value, found in zip(exact[16:], back[16:], strict=True):
        assert math.isnan(found) == math.isnan(value)


@settings(max_examples=60)
@given(st.lists(single, min_size=16, max_size=16))
def test_fp4_keys_byte_by_byte(row: list[float]) -> None:
    form = index_fp4(16)
    x = torch.tensor([row], dtype=torch.float32)
    rows, scales = encode(form, x)
    codes, scale = group_bytes(x[0].tolist(), 6, 6 * 2.0**-126, E2M1, 8)
    assert scales.tolist() == [[scale]]
    if codes:
        want = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        assert rows[0].tolist() == want
        values = [math.ldexp(E2M1[c & 7], scale - 127) * (-1 if c & 8 else 1) for c in codes]
        # 4 * 2^126 is one that float32 lacks.
        assert decode(form, rows, scales)[0].tolist() == torch.tensor(values).float().tolist()
    else:
        assert decode(form, rows, scales).isnan().all()


@settings(max_examples=60)
@given(st.lists(single, min_size=8, max_size=8))
def test_fp8_keys_byte_by_byte(row: list[float]) -> None:
    form = index_fp8(8)
    x = torch.tensor([row], dtype=torch.float32)
    rows, scales = encode(form, x)
    if not all(map(math.isfinite, row)) or not x.isfinite().all():
        assert decode(form, rows, scales).isnan().all()
        return

    def to_single(value: float) -> float:
        return float(torch.tensor(value, dtype=torch.float64).float())

    # A float64 quotient of float32 numbers, rounded to float32, is their float32 quotient.
    amax = max(max(map(abs, x[0].tolist())), to_single(1e-4))
    scale = to_single(amax / 448)
    assert scales[0].tolist() == list(struct.pack("<f", scale))
    quotients = [to_single(v / scale) for v in x[0].tolist()]
    want = [nearest(Fraction(v), math.copysign(1, v) < 0, E4M3, 0x80) for v in quotients]
    assert rows[0].tolist() == want


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_reading_back_is_the_recipe_s_rounding(dtype: torch.dtype, seed: int) -> None:
    """`formats.activation` rounds without bytes: the same numbers, in any float type."""
    x = noise(seed, 40, 512).mul(noise(seed + 1, 40, 1).mul(4).exp()).to(dtype)
    x[3] = 0
    x[4, :64] = torch.nan
    x[5, 64] = torch.inf
    wide = x if dtype == torch.float64 else x.float()
    want = activation.kv_fp8(wide)
    want[:, 448:] = want[:, 448:].bfloat16().to(want.dtype)
    got = rounded(latent_fp8(512, 64), wide)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert got[4, :64].isnan().all() and got[5, 64:128].isnan().all()
    keys = wide[:, :128].contiguous()
    assert torch.equal(
        rounded(index_fp4(128), keys).nan_to_num(7.0), activation.index_fp4(keys).nan_to_num(7.0)
    )
    assert torch.equal(
        rounded(index_fp4(16), keys[:, :16]).nan_to_num(7.0),
        activation.index_fp4(keys[:, :16], group=16).nan_to_num(7.0),
    )
    assert rounded(index_plain(128, "float32"), keys) is keys


def test_float32_is_cast_to_e4m3_as_defined() -> None:
    """Every value, every middle and their neighbours: one pass of the cast is enough."""
    grid = torch.tensor(E4M3, dtype=torch.float64)
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2)).float()
    ends = torch.tensor([448.0, 463.9, 464.0, 500.0, 3e38, 1e-45])
    up, down = points.nextafter(torch.tensor(1e9)), points.nextafter(torch.tensor(-1e9))
    every = torch.cat((points, up, down, ends))
    every = torch.cat((every, -every)).unsqueeze(1)
    ones = torch.full_like(every, 448.0)
    form = index_fp8(2)  # amax 448: the scale is exactly 1
    got = encode(form, torch.cat((every.clamp(-448, 448), ones), dim=1))[0][:, 0]
    assert torch.equal(got, elements.e4m3_encode(every.squeeze(1)))
    double = encode(form, torch.cat((every.clamp(-448, 448), ones), dim=1).double())[0][:, 0]
    assert torch.equal(double, got)


# ---- pages ---------------------------------------------------------------------------------------


def test_forms_of_v4_and_of_tiny_models() -> None:
    v4 = latent_fp8(512, 64)
    assert (v4.bytes, v4.group, v4.page_multiple, v4.page_bytes(64)) == (584, 64, 576, 65 * 576)
    assert v4.page_bytes(2) == 3 * 576
    assert (index_fp4(128).bytes, index_fp4(128).page_bytes(64)) == (68, 68 * 64)
    assert (index_fp8(128).bytes, index_fp8(128).scale) == (132, "amax")
    tiny = latent_fp8(32, 8)
    assert (tiny.group, tiny.bytes, tiny.page_multiple) == (8, 24 + 16 + 8, 40)
    assert (index_fp4(16).group, index_fp4(16).bytes) == (16, 9)
    assert index_fp4(128).hadamard and index_fp8(16).hadamard and not v4.hadamard
    assert latent_plain(512, 64, "bfloat16").bytes == 1024
    assert not index_plain(128, "bfloat16").hadamard


@pytest.mark.parametrize("form", SCALED, ids=lambda f: f"{f.layout}-{f.width}")
@pytest.mark.parametrize("entries", [1, 4, 64])
def test_a_page_is_value_rows_then_scale_rows(form: EntryForm, entries: int, seed: int) -> None:
    pages = fresh(form, 3, entries)
    values = noise(seed, 1, form.width)
    rows, scales = encode(form, values)
    page, offset = 2, entries - 1
    store(pages, torch.tensor([page * entries + offset]), values)
    flat = pages.data.flatten().tolist()
    value, scale = rows.shape[1], scales.shape[1]
    assert value + scale == form.bytes
    size = -(-entries * form.bytes // form.page_multiple) * form.page_multiple
    start = page * size
    want = [0xAB] * (3 * size)
    at = start + offset * value
    want[at : at + value] = rows[0].tolist()
    at = start + entries * value + offset * scale
    want[at : at + scale] = scales[0].tolist()
    assert flat == want


@pytest.mark.parametrize(
    "name", ["latent@1", "latent-fp8@1", "index@1", "index-fp8@1", "index-fp4@1"]
)
@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16", "float16"])
def test_what_is_stored_is_read_back(name: str, stored: str, seed: int) -> None:
    form = entry_form(name, 32, 8 if "latent" in name else 0, stored)
    pages, values = fresh(form, 5, 4), noise(seed, 9, 32)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:9]
    skipped = slots.clone()
    skipped[[2, 7]] = -1
    before = pages.data.clone()
    store(pages, skipped, values)
    got = gather(pages, skipped)
    wide = torch.float64 if form.stored == "float64" else torch.float32
    assert got.dtype == wide and got.shape == (9, 32)
    want = values.to(getattr(torch, stored)) if form.scale == "none" else rounded(form, values)
    want = want.to(wide)
    want[[2, 7]] = 0
    assert torch.equal(got, want)
    store(pages, torch.full((9,), -1), values)
    other = fresh(form, 5, 4)
    store(other, slots[[0, 1, 3, 4, 5, 6, 8]], values[[0, 1, 3, 4, 5, 6, 8]])
    assert torch.equal(pages.data, other.data) and not torch.equal(pages.data, before)
    assert gather(pages, slots[:0]).shape == (0, 32)
    store(pages, slots[:0], values[:0])


def test_scales_of_the_rows_type_or_wider(seed: int) -> None:
    """Values of a wider type than the cache are rounded once."""
    values = noise(seed, 6, 32) * 10
    form = latent_fp8(32, 8)
    rows, scales = encode(form, values)
    again, same = encode(form, decode(form, rows, scales))
    assert torch.equal(rows[:, :24], again[:, :24]) and torch.equal(scales, same)


def test_places_of_entries() -> None:
    table = torch.tensor([7, -1, 2], dtype=torch.int32)
    got = locate(table, 4, torch.tensor([0, 3, 4, 8, 11, -1]))
    assert got.tolist() == [28, 31, -1, 8, 11, -1]
    both = locate(torch.stack((table, table.flip(0))), 4, torch.tensor([[0, 9], [0, -5]]))
    assert both.tolist() == [[28, 9], [8, -1]]


def test_what_is_no_form_is_refused() -> None:
    for make in (
        lambda: latent_fp8(8, 8),
        lambda: index_fp4(7),
        lambda: index_fp8(0),
        lambda: entry_form("kv-pages@1", 8, 0, "float32"),
        lambda: encode(index_plain(8, "float32"), torch.zeros(1, 8)),
    ):
        with pytest.raises(InternalError):
            make()
