"""Queries and latents by hand: norms, rotation, places, and what is left alone."""

from __future__ import annotations

import pytest
import torch
from deepseek_oracle import TIGHT, noise
from entry_caches import NAN, Candidate, double_latent, poisoned
from torch import Tensor

from metainfer.kv.book.form import latent_fp8
from metainfer.kv.store.entries import EntryPages, gather
from metainfer.kv.store.entry_codecs import rounded
from metainfer.ops.latent_qkv import ref, torch_latent

latent_qkv = Candidate(ref.latent_qkv)


@pytest.fixture(params=[ref, torch_latent], ids=["ref", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest) -> None:
    latent_qkv.op = request.param.latent_qkv


def by_hand(x: Tensor, weight: Tensor | None, angle: Tensor, norm: bool = True) -> Tensor:
    """One vector [d], turned by `angle` [R/2] in its last channels."""
    d, half = x.shape[0], angle.shape[0]
    out = x.clone()
    if norm:
        out = out / ((x * x).sum() / d + 1e-6).sqrt()
    if weight is not None:
        out = out * weight
    done = out.clone()
    for i in range(half):
        a, b = out[d - 2 * half + 2 * i], out[d - 2 * half + 2 * i + 1]
        done[d - 2 * half + 2 * i] = a * angle[i].cos() - b * angle[i].sin()
        done[d - 2 * half + 2 * i + 1] = a * angle[i].sin() + b * angle[i].cos()
    return done


def call(seed: int, pages: EntryPages, slots: list[int], *, norm_q: bool = True) -> Tensor:
    rows, d = len(slots), 10
    q, kv, weight = noise(seed, rows, 3, d), noise(seed + 1, rows, d), noise(seed + 2, d)
    angle = noise(seed + 3, 20, 3) * 2
    positions = torch.arange(rows) * 3 + 1
    turn = torch.cat((angle.cos(), angle.sin()), dim=1)
    before = q.clone(), kv.clone()
    got = latent_qkv(
        q, kv, weight, positions, turn, pages, torch.tensor(slots).long(), eps=1e-6, norm_q=norm_q
    )
    assert torch.equal(q, before[0]) and torch.equal(kv, before[1])
    for t in range(rows):
        for h in range(3):
            want = by_hand(q[t, h], None, angle[positions[t]], norm_q)
            torch.testing.assert_close(got[t, h], want, **TIGHT)
        if slots[t] >= 0:
            want = by_hand(kv[t], weight, angle[positions[t]])
            if pages.form.scale != "none":
                want = rounded(pages.form, want[None])[0]
            found = gather(pages, torch.tensor(slots[t : t + 1]))[0].double()
            torch.testing.assert_close(found, want, **TIGHT)
    return got


@pytest.mark.parametrize("norm_q", [True, False])
def test_by_hand(norm_q: bool, seed: int) -> None:
    pages = poisoned(double_latent(10, 6), 3, 4)
    call(seed, pages, [5, -1, 11, 4, -1], norm_q=norm_q)
    left = [slot for slot in range(12) if slot not in (5, 11, 4)]
    assert gather(pages, torch.tensor(left)).isnan().all()


def test_scaled_latents_are_rounded_once(seed: int) -> None:
    pages = poisoned(latent_fp8(10, 6), 3, 4)
    call(seed, pages, [9, 2])
    left = [slot for slot in range(12) if slot not in (9, 2)]
    assert gather(pages, torch.tensor(left)).isnan().all()


def test_nothing_and_padding_alone_store_nothing(seed: int, poison: None) -> None:
    pages = poisoned(double_latent(10, 6), 2, 4)
    assert call(seed, pages, []).shape == (0, 3, 10)
    q = torch.full((2, 3, 10), NAN, dtype=torch.float64)
    still = torch.cat((torch.ones(1, 3), torch.zeros(1, 3)), dim=1)
    latent_qkv(
        q, q[:, 0], q[0, 0], torch.tensor([0, 0]), still, pages, torch.tensor([-1, -1]),
        eps=1e-6, norm_q=True,
    )  # fmt: skip
    assert pages.data.isnan().all()
