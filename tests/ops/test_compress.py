"""Compressed entries against `transformers`, against loops, and however the tokens are cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepseek_oracle import TIGHT, config, filled, lifted, noise, table, theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.ops.compress.ref import compress, visible_entries
from metainfer.ops.rope.tables import RopeSpec, cos_sin

NAN = float("nan")


@dataclass
class Sequence:
    """One sequence's rows and parameters; `run` feeds them in pieces."""

    kv: Tensor
    gate: Tensor
    ape: Tensor
    weight: Tensor
    turn: Tensor
    ratio: int
    overlap: bool
    ring: int = 0

    def fresh(self) -> tuple[Tensor, Tensor]:
        """State and cache full of NaN."""
        total, width = self.kv.shape
        rows = self.ratio * (2 if self.overlap else 1) + self.ring
        state = torch.full((2, 2, rows, width), NAN, dtype=torch.float64)
        entries = total // self.ratio + 1
        return state, torch.full((2, entries, self.weight.shape[0]), NAN, dtype=torch.float64)

    def feed(self, state: Tensor, cache: Tensor, first: int, last: int) -> None:
        compress(
            self.kv[first:last], self.gate[first:last], self.ape, self.weight, self.turn,
            state, cache, torch.tensor([1]), torch.tensor([0, last - first], dtype=torch.int32),
            torch.tensor([last], dtype=torch.int32),
            ratio=self.ratio, overlap=self.overlap, eps=1e-6,
        )  # fmt: skip

    def run(self, cuts: list[int]) -> Tensor:
        state, cache = self.fresh()
        borders = [0, *cuts, self.kv.shape[0]]
        for first, last in itertools.pairwise(borders):
            self.feed(state, cache, first, last)
        assert cache[0].isnan().all() and state[0].isnan().all()  # nobody else's line
        assert cache[1, self.kv.shape[0] // self.ratio :].isnan().all()
        return cache[1, : self.kv.shape[0] // self.ratio]


def sequence(
    seed: int, total: int, ratio: int, overlap: bool, d: int = 6, ring: int = 0
) -> Sequence:
    width = 2 * d if overlap else d
    return Sequence(
        noise(seed, total, width), noise(seed + 1, total, width) * 2, noise(seed + 2, ratio, width),
        noise(seed + 3, d), cos_sin(RopeSpec(rotated=4), max(total, 1)).double(),
        ratio, overlap, ring,
    )  # fmt: skip


def by_hand(q: Sequence) -> Tensor:
    """Window by window, slot by slot, channel by channel."""
    d = q.weight.shape[0]
    found = torch.zeros(q.kv.shape[0] // q.ratio, d, dtype=torch.float64)
    for w in range(found.shape[0]):
        slots = [(p, d if q.overlap else 0) for p in range(w * q.ratio, (w + 1) * q.ratio)]
        if q.overlap and w:
            slots += [(p, 0) for p in range((w - 1) * q.ratio, w * q.ratio)]
        for c in range(d):
            z = torch.stack([q.gate[p, o + c] + q.ape[p % q.ratio, o + c] for p, o in slots])
            share = z.exp() / z.exp().sum()
            found[w, c] = (share * torch.stack([q.kv[p, o + c] for p, o in slots])).sum()
        found[w] = found[w] / (found[w].square().mean() + 1e-6).sqrt() * q.weight
        half = q.turn.shape[1] // 2
        for i in range(half):
            cos, sin = q.turn[w * q.ratio, i], q.turn[w * q.ratio, half + i]
            a, b = (
                found[w, d - 2 * half + 2 * i].clone(),
                found[w, d - 2 * half + 2 * i + 1].clone(),
            )
            found[w, d - 2 * half + 2 * i] = a * cos - b * sin
            found[w, d - 2 * half + 2 * i + 1] = a * sin + b * cos
    return found


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (5, False), (1, False), (3, True)])
def test_by_hand(ratio: int, overlap: bool, seed: int) -> None:
    q = sequence(seed, 17, ratio, overlap)
    torch.testing.assert_close(q.run([]), by_hand(q), **TIGHT)


@settings(max_examples=40)
@given(st.data())
def test_any_cut_gives_the_entries_of_one_pass(data: st.DataObject) -> None:
    ratio, overlap = data.draw(st.sampled_from([(4, True), (4, False), (7, False), (2, True)]))
    total = data.draw(st.integers(0, 40))
    q = sequence(
        data.draw(st.integers(0, 999)), total, ratio, overlap, ring=data.draw(st.integers(0, 9))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=8)))
    torch.testing.assert_close(q.run(cuts), q.run([]), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("ratio", "overlap", "total"), [(128, False, 140), (4, True, 30)])
def test_token_by_token_and_every_offset(ratio: int, overlap: bool, total: int, seed: int) -> None:
    q = sequence(seed, total, ratio, overlap)
    whole = q.run([])
    torch.testing.assert_close(q.run(list(range(1, total))), whole, rtol=1e-13, atol=1e-14)
    for cut in range(1, total):
        torch.testing.assert_close(q.run([cut]), whole, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_length_can_be_set_back_by_the_rows_to_spare(overlap: bool, seed: int) -> None:
    """Rejected drafts: other rows at the same positions, written over."""
    q = sequence(seed, 24, 4, overlap, ring=5)
    wrong = sequence(seed + 9, 24, 4, overlap, ring=5)
    wrong.ape, wrong.weight = q.ape, q.weight
    for accepted in range(8, 16):
        state, cache = q.fresh()
        q.feed(state, cache, 0, accepted)
        wrong.feed(state, cache, accepted, accepted + 5)
        for t in range(accepted, 24):
            q.feed(state, cache, t, t + 1)
        torch.testing.assert_close(cache[1, :6], q.run([]), rtol=1e-13, atol=1e-14)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 9)), min_size=1, max_size=4))
def test_a_batch_is_its_sequences(lengths: list[tuple[int, int]]) -> None:
    """(tokens before, tokens now) each; slots in reverse; padding after the last."""
    parts = [sequence(31 * i, before + now, 4, True) for i, (before, now) in enumerate(lengths)]
    one = parts[0]
    count, entries = len(parts), 7
    state = torch.full((count, 2, 8, 12), NAN, dtype=torch.float64)
    cache = torch.full((count, entries, 6), NAN, dtype=torch.float64)
    turn = cos_sin(RopeSpec(rotated=4), 32).double()

    def step(spans: list[tuple[int, int]]) -> None:
        pad = torch.full((2, 12), NAN, dtype=torch.float64)
        kv = torch.cat([*(p.kv[a:b] for p, (a, b) in zip(parts, spans, strict=True)), pad])
        gate = torch.cat([*(p.gate[a:b] for p, (a, b) in zip(parts, spans, strict=True)), pad])
        starts = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).int()
        lens = torch.tensor([b for _, b in spans], dtype=torch.int32)
        slots = torch.arange(count - 1, -1, -1)
        compress(
            kv, gate, one.ape, one.weight, turn, state, cache, slots, starts, lens,
            ratio=4, overlap=True, eps=1e-6,
        )  # fmt: skip

    step([(0, before) for before, _ in lengths])
    step([(before, before + now) for before, now in lengths])
    for i, part in enumerate(parts):
        part.ape, part.weight, part.turn = one.ape, one.weight, turn
        want, line = part.run([]), cache[count - 1 - i]
        torch.testing.assert_close(line[: len(want)], want, rtol=1e-13, atol=1e-14)
        assert line[len(want) :].isnan().all()


def test_visible_entries_are_those_of_closed_windows() -> None:
    for ratio in (1, 4, 128):
        seen = visible_entries(torch.arange(400), ratio).tolist()
        for t, count in enumerate(seen):
            assert count == sum((w + 1) * ratio - 1 <= t for w in range(400))


# ---- transformers --------------------------------------------------------------------------------


def fed(module: Any, x: Tensor, ratio: int, overlap: bool, turn: Tensor) -> Tensor:
    """Our entries from their weights."""
    with torch.no_grad():
        q = Sequence(
            module.kv_proj(x), module.gate_proj(x), module.position_bias, module.kv_norm.weight,
            turn, ratio, overlap,
        )  # fmt: skip
        return q.run([1, 6, 30])


@pytest.mark.parametrize("kind", ["HCA", "CSA"])
def test_is_transformers_compressor(kind: str, seed: int) -> None:
    """Their YaRN table has an amplitude of 1, as the model's recipe; ours is taken from it."""
    settings_ = config(index_topk=64)
    overlap = kind == "CSA"
    ratio = 4 if overlap else settings_.compress_rates["heavily_compressed_attention"]
    x, qr = noise(seed, 75, 64), noise(seed + 1, 75, 32)
    with lifted(), torch.no_grad():
        module = filled(getattr(theirs, f"DeepseekV4{kind}Compressor")(settings_), seed)
        turn = table(module.rotary_emb, "compress", 80)
        want, bias = module(x[None], qr[None], torch.arange(75)[None], None, 0)
    assert turn[:, :4].square().add(turn[:, 4:].square()).sub(1).abs().max() < 1e-12
    got = fed(module, x, ratio, overlap, turn)
    torch.testing.assert_close(got, want[0, 0], **TIGHT)
    seen = (bias[0, 0] == 0).sum(-1)
    assert torch.equal(seen, visible_entries(torch.arange(75), ratio))
    if overlap:
        keys = []
        module.indexer.scorer.register_forward_pre_hook(lambda _, args: keys.append(args[1]))
        with lifted(), torch.no_grad():
            module(x[None], qr[None], torch.arange(75)[None], None, 0)
        torch.testing.assert_close(fed(module.indexer, x, 4, True, turn), keys[0][0], **TIGHT)
