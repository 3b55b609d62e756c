"""Compressed entries against `transformers`, against loops, and however the tokens are cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepseek_oracle import TIGHT, config, filled, lifted, noise, table, theirs
from entry_caches import NAN, Candidate, closing, double_latent, line, poisoned, where
from entry_caches import table as page_table
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metainfer.kv.book.form import EntryForm, index_fp4, index_fp8, index_plain, latent_fp8
from metainfer.kv.store.entries import EntryPages, StateRows
from metainfer.kv.store.entry_codecs import rounded
from metainfer.ops.common import hadamard
from metainfer.ops.compress import ref, torch_compress
from metainfer.ops.compress.ref import visible_entries
from metainfer.ops.rope.tables import RopeSpec, cos_sin

compress = Candidate(ref.compress)


@pytest.fixture(params=[ref, torch_compress], ids=["ref", "torch"], autouse=True, scope="module")
def implementation(request: pytest.FixtureRequest) -> None:
    compress.op = request.param.compress


Caches = tuple[StateRows, EntryPages, Tensor]


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
    page: int = 3  # entries
    form: EntryForm | None = None

    def fresh(self) -> Caches:
        """State, pages and table of one sequence; everything NaN."""
        total, width = self.kv.shape
        rows = self.ratio * (2 if self.overlap else 1) + self.ring
        state = torch.full((3, 2, rows, width), NAN, dtype=torch.float64)
        found, count = page_table([total // self.ratio + 1], self.page, seed=total)
        form = self.form or double_latent(self.weight.shape[0], 4)
        return StateRows(0, state), poisoned(form, count + 1, self.page), found[0]

    def feed(self, caches: Caches, first: int, last: int) -> None:
        state, pages, row = caches
        compress(
            self.kv[first:last], self.gate[first:last], self.ape, self.weight, self.turn,
            state, torch.tensor([1]), pages, closing(row, self.page, first, last, self.ratio),
            *where([last - first], [last]), ratio=self.ratio, overlap=self.overlap, eps=1e-6,
        )  # fmt: skip

    def run(self, cuts: list[int]) -> Tensor:
        caches = self.fresh()
        borders = [0, *cuts, self.kv.shape[0]]
        for first, last in itertools.pairwise(borders):
            self.feed(caches, first, last)
        return self.entries(caches)

    def entries(self, caches: Caches) -> Tensor:
        """All entries; nobody else's line or page was touched."""
        state, pages, row = caches
        assert state.data[[0, 2]].isnan().all()
        count = self.kv.shape[0] // self.ratio
        every = line(pages, torch.arange(pages.data.shape[0]), pages.data.shape[0] * self.page)
        assert (~every.isnan().any(1)).sum() == count
        return line(pages, row, count)


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
    assert torch.equal(q.run(cuts), q.run([]))


@pytest.mark.parametrize(("ratio", "overlap", "total"), [(128, False, 140), (4, True, 30)])
def test_token_by_token_and_every_offset(ratio: int, overlap: bool, total: int, seed: int) -> None:
    q = sequence(seed, total, ratio, overlap)
    whole = q.run([])
    assert torch.equal(q.run(list(range(1, total))), whole)
    for cut in range(1, total):
        assert torch.equal(q.run([cut]), whole)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_the_length_can_be_set_back_by_the_rows_to_spare(
    overlap: bool, drafts: int, seed: int
) -> None:
    """Rejected drafts: other rows at the same positions, written over; windows closed by them."""
    q = sequence(seed, 24, 4, overlap, ring=drafts)
    wrong = sequence(seed + 9, 24, 4, overlap, ring=drafts)
    wrong.ape, wrong.weight = q.ape, q.weight
    for accepted in range(8, 16):
        caches = q.fresh()
        q.feed(caches, 0, accepted)
        wrong.feed(caches, accepted, accepted + drafts)
        for t in range(accepted, 24):
            q.feed(caches, t, t + 1)
        assert torch.equal(q.entries(caches), q.run([]))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 9)), min_size=1, max_size=4))
def test_a_batch_is_its_sequences(lengths: list[tuple[int, int]]) -> None:
    """(tokens before, tokens now) each; lines in reverse; padding after the last."""
    parts = [sequence(31 * i, before + now, 4, True) for i, (before, now) in enumerate(lengths)]
    one = parts[0]
    count, entries = len(parts), 2
    state = StateRows(0, torch.full((count + 1, 2, 8, 12), NAN, dtype=torch.float64))
    tables, pages_ = page_table([len(part.kv) // 4 for part in parts], entries)
    pages = poisoned(double_latent(6, 4), pages_, entries)
    turn = cos_sin(RopeSpec(rotated=4), 32).double()

    def step(spans: list[tuple[int, int]]) -> None:
        pad = torch.full((2, 12), NAN, dtype=torch.float64)
        kv = torch.cat([*(p.kv[a:b] for p, (a, b) in zip(parts, spans, strict=True)), pad])
        gate = torch.cat([*(p.gate[a:b] for p, (a, b) in zip(parts, spans, strict=True)), pad])
        rows = zip(tables, spans, strict=True)
        slots = torch.cat([closing(row, entries, a, b, 4) for row, (a, b) in rows])
        compress(
            kv, gate, one.ape, one.weight, turn, state, torch.arange(count - 1, -1, -1), pages,
            torch.cat((slots, torch.tensor([-1, -1]))),
            *where([b - a for a, b in spans], [b for _, b in spans]),
            ratio=4, overlap=True, eps=1e-6,
        )  # fmt: skip

    step([(0, before) for before, _ in lengths])
    step([(before, before + now) for before, now in lengths])
    for i, part in enumerate(parts):
        part.ape, part.weight, part.turn = one.ape, one.weight, turn
        want = part.run([])
        assert torch.equal(line(pages, tables[i], len(want)), want)


FORMS = [latent_fp8(16, 8), index_fp4(16), index_fp8(16), index_plain(16, "float64")]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.layout)
@settings(max_examples=10)
@given(cuts=st.lists(st.integers(0, 33), max_size=5))
def test_stored_bytes_do_not_depend_on_the_cut(form: EntryForm, cuts: list[int]) -> None:
    """Scaled forms: the whole cache is equal, and it is the plain entries, mixed and rounded."""
    q = sequence(5, 33, 4, True, d=16)
    plain = q.run([])
    q.form = form
    caches, whole = q.fresh(), q.fresh()
    for first, last in itertools.pairwise([0, *sorted(cuts), 33]):
        q.feed(caches, first, last)
    q.feed(whole, 0, 33)
    assert torch.equal(caches[1].data.view(torch.uint8), whole[1].data.view(torch.uint8))
    want = rounded(form, hadamard(plain) if form.hadamard else plain)
    assert torch.equal(q.entries(caches).double(), want)


def test_rows_may_be_slices_of_a_fused_projection(seed: int) -> None:
    q = sequence(seed, 21, 4, True)
    want = q.run([])
    q.kv, q.gate = torch.cat((q.kv, q.gate, q.kv), dim=1)[:, :24].split(12, dim=1)
    assert not q.kv.is_contiguous() and torch.equal(q.run([5, 6]), want)


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
