"""`sample`: oracle processors, statistics of the draw, independence of batch, ties, reports."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from metainfer.ops.sample import torch_partial
from metainfer.ops.sample.draw import uniform
from metainfer.ops.sample.inputs import NO_LOGPROBS, SampleInputs, SampleOutput, count_tokens
from metainfer.ops.sample.ref import best, kept_by_sorting, processed, sample, tempered

BOTH = [sample, torch_partial.sample]


def logits_of(seed: int, rows: int, vocab: int, scale: float = 3.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=g) * scale


def draws(rows: int, **fields: Any) -> SampleInputs:
    merged: dict[str, Any] = {
        "temperature": torch.ones(rows),
        "seed": torch.zeros(rows, dtype=torch.int64),
        "index": torch.arange(rows),
        **fields,
    }
    return SampleInputs(**merged)


def histogram(probabilities: Tensor, count: int, seed: int, **fields: Any) -> Tensor:
    """How often each id of one distribution is drawn in `count` draws of one stream."""
    rows = probabilities.log().expand(count, -1)
    fixed = torch.full((count,), seed, dtype=torch.int64)
    tokens = sample(rows, draws(count, seed=fixed, **fields)).tokens
    return torch.bincount(tokens, minlength=probabilities.numel()).double()


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected).square() / expected).sum())


# ---- the random number ---------------------------------------------------------------------------


def splitmix_uniform(seed: int, index: int) -> float:
    """The generator written with Python's integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    inner = mix((seed + golden) & mask)
    return (mix((inner + index * golden + 0xBF58476D1CE4E5B9) & mask) >> 11) * 2.0**-53


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**62))
def test_uniform_is_the_written_function(seed: int, index: int) -> None:
    got = uniform(torch.tensor([seed]), torch.tensor([index])).item()
    assert got == splitmix_uniform(seed, index) and 0 <= got < 1


def test_uniform_is_flat_and_streams_are_unrelated() -> None:
    n = 200_000
    along = uniform(torch.zeros(n, dtype=torch.int64), torch.arange(n))
    across = uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64))
    for numbers in (along, across):
        counts = torch.histc(numbers.float(), 100, 0, 1).double()
        assert chi_square(counts, torch.full((100,), 0.01, dtype=torch.float64)) < 160  # p ~ 1e-4
        lagged = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]
        assert abs(lagged) < 0.01
    assert abs(torch.corrcoef(torch.stack((along, across)))[0, 1]) < 0.01


# ---- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 50, 499])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
def test_kept_set_is_that_of_transformers(k: int, p: float, seed: int) -> None:
    logits = logits_of(seed, 5, 500)
    ids = torch.zeros(5, 1, dtype=torch.int64)
    want = TopPLogitsWarper(p)(ids, TopKLogitsWarper(k)(ids, logits.clone()))  # type: ignore[no-untyped-call]
    args = torch.full((5,), k), torch.full((5,), p)
    for kept in (kept_by_sorting, torch_partial.kept_by_head):
        hot = logits - logits.amax(-1, keepdim=True)
        assert torch.equal(kept(hot, *args), torch.isfinite(want))


def test_min_p_and_temperature_are_those_of_transformers(seed: int) -> None:
    logits = logits_of(seed, 4, 300)
    ids = torch.zeros(4, 1, dtype=torch.int64)
    warm = TemperatureLogitsWarper(0.7)(ids, logits.clone())  # type: ignore[no-untyped-call]
    ours = tempered(logits, torch.full((4,), 0.7))
    torch.testing.assert_close(ours.softmax(-1), warm.softmax(-1))
    kept = torch.isfinite(MinPLogitsWarper(0.1)(ids, warm))  # type: ignore[no-untyped-call]
    n = 4000
    for row in range(4):
        many = logits[row].expand(n, -1)
        tokens = sample(
            many, draws(n, temperature=torch.full((n,), 0.7), min_p=torch.full((n,), 0.1))
        ).tokens
        assert set(tokens.tolist()) <= set(kept[row].nonzero().flatten().tolist())


def test_repetition_penalty_is_that_of_transformers(seed: int) -> None:
    logits = logits_of(seed, 2, 40)
    prompt, output = [[1, 2, 3], [5]], [[2, 7], [8, 9, 9]]
    ids = torch.tensor([[1, 2, 3, 2, 7], [5, 5, 8, 9, 9]])
    want = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())  # type: ignore[no-untyped-call]
    got = processed(
        logits,
        SampleInputs(
            repetition=torch.full((2,), 1.7),
            output_counts=count_tokens(output, 40),
            prompt_seen=count_tokens(prompt, 40) > 0,
        ),
    )
    torch.testing.assert_close(got, want)


def test_penalties_bias_and_bans_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    counts = count_tokens([[1, 1, 3], []], 4)
    got = processed(
        logits,
        SampleInputs(
            presence=torch.tensor([0.5, 0.5]),
            frequency=torch.tensor([0.25, 0.25]),
            output_counts=counts,
            bias_rows=torch.tensor([1, 1]),
            bias_tokens=torch.tensor([0, 0]),
            bias_values=torch.tensor([10.0, 5.0]),
            ban_rows=torch.tensor([1]),
            ban_tokens=torch.tensor([3]),
        ),
    )
    never = float("-inf")
    want = torch.tensor([[1.0, 2 - 0.5 - 0.5, 3.0, 4 - 0.25 - 0.5], [16.0, 2.0, 3.0, never]])
    torch.testing.assert_close(got, want)
    assert logits[1, 3] == 4.0  # the caller's tensor is untouched


# ---- statistics ----------------------------------------------------------------------------------

TOY = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01], dtype=torch.float64)


@pytest.mark.parametrize("stream", range(4))
def test_frequencies_follow_the_distribution(stream: int) -> None:
    counts = histogram(TOY, 50_000, stream)
    assert chi_square(counts, TOY) < 27.9  # 6 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_frequencies_follow_the_temperature(temperature: float) -> None:
    n = 50_000
    counts = histogram(TOY, n, 5, temperature=torch.full((n,), temperature))
    want = TOY ** (1 / temperature)
    assert chi_square(counts, want / want.sum()) < 27.9


def test_filtered_frequencies_are_renormalised() -> None:
    n = 50_000
    counts = histogram(TOY, n, 6, top_k=torch.full((n,), 4), top_p=torch.full((n,), 0.8))
    # top-k leaves 0.9; of that, 0.4/0.9 + 0.25/0.9 + 0.15/0.9 is the first sum above 0.8.
    want = TOY[:3] / TOY[:3].sum()
    assert counts[3:].sum() == 0
    assert chi_square(counts[:3], want) < 18.4  # 2 degrees of freedom, p = 1e-4


# ---- independence --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", BOTH)
def test_a_row_does_not_depend_on_the_batch(function: Any, seed: int) -> None:
    rows, vocab = 12, 400
    logits = logits_of(seed, rows, vocab)
    g = torch.Generator().manual_seed(seed)
    fields: dict[str, Tensor] = {
        "temperature": torch.rand(rows, generator=g) + 0.3,
        "top_k": torch.randint(0, 60, (rows,), generator=g),
        "top_p": torch.rand(rows, generator=g) * 0.9 + 0.1,
        "min_p": torch.rand(rows, generator=g) * 0.1,
        "seed": torch.randint(2**40, (rows,), generator=g),
        "index": torch.randint(100, (rows,), generator=g),
    }
    together = function(logits, SampleInputs(**fields)).tokens  # type: ignore[arg-type]
    order = torch.randperm(rows, generator=g)
    shuffled = {name: value[order] for name, value in fields.items()}
    moved = function(logits[order], SampleInputs(**shuffled)).tokens  # type: ignore[arg-type]
    assert torch.equal(moved, together[order])
    for row in range(rows):
        alone = {name: value[row : row + 1] for name, value in fields.items()}
        single = function(logits[row : row + 1], SampleInputs(**alone)).tokens  # type: ignore[arg-type]
        assert single.item() == together[row].item()


def test_a_row_does_not_depend_on_features_of_others(seed: int) -> None:
    """Filters that are off in this row do not change its draw when another row uses them."""
    logits = logits_of(seed, 2, 400)
    plain = sample(logits, draws(2)).tokens[0]
    other = draws(
        2,
        top_k=torch.tensor([0, 3]),
        top_p=torch.tensor([1.0, 0.5]),
        min_p=torch.tensor([0.0, 0.2]),
    )
    assert sample(logits, other).tokens[0] == plain


def test_next_index_is_another_draw() -> None:
    flat = torch.zeros(1000, 5000)
    tokens = sample(flat, draws(1000)).tokens
    assert tokens.unique().numel() > 850


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.0])
def test_partial_ordering_draws_the_same(scale: float, seed: int) -> None:
    """Peaked, flat and tied distributions over more ids than the head holds."""
    rows, vocab = 16, 3000
    logits = logits_of(seed, rows, vocab, scale).mul(8).round().div(8)
    g = torch.Generator().manual_seed(seed)
    inputs = draws(
        rows,
        top_k=torch.tensor([0, 1, 2, 5, 40, 255, 256, 257, 258, 500, 2999, 3000, 0, 0, 7, 100]),
        top_p=torch.rand(rows, generator=g) * 0.98 + 0.02,
        top_logprobs=4,
    )
    mine, want = torch_partial.sample(logits, inputs), sample(logits, inputs)
    assert torch.equal(mine.tokens, want.tokens)
    hot = logits - logits.amax(-1, keepdim=True)
    assert torch.equal(
        torch_partial.kept_by_head(hot, inputs.top_k, inputs.top_p),
        kept_by_sorting(hot, inputs.top_k, inputs.top_p),
    )


# ---- ties and broken rows ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_greedy_ties_go_to_the_lower_id(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 5000, dtype=dtype)
    logits[1, [700, 4000]] = 1
    logits[2, [4999]] = 1
    assert sample(logits, SampleInputs(greedy=True)).tokens.tolist() == [0, 700, 4999]
    zero = draws(3, temperature=torch.zeros(3))
    assert sample(logits, zero).tokens.tolist() == [0, 700, 4999]


def test_top_k_keeps_the_lower_ids_of_a_tie() -> None:
    hot = torch.zeros(1, 600)
    for kept in (kept_by_sorting, torch_partial.kept_by_head):
        assert kept(hot, torch.tensor([3]), None).nonzero()[:, 1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("function", BOTH)
def test_broken_rows_are_reported_alone(function: Any, greedy: bool) -> None:
    logits = torch.zeros(5, 8)
    logits[0, 3], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, :7] = float("-inf")
    inputs = SampleInputs(greedy=True) if greedy else draws(5, top_p=torch.full((5,), 0.9))
    output: SampleOutput = function(logits, inputs)
    assert output.bad.tolist() == [True, True, True, False, False]
    assert output.tokens[3] == 7
    assert ((output.tokens >= 0) & (output.tokens < 8)).all()


def test_row_with_everything_forbidden_is_bad() -> None:
    mask = torch.zeros(1, 4, dtype=torch.bool)
    assert sample(torch.zeros(1, 4), draws(1, allowed=mask)).bad.item()


def test_impossible_ids_are_never_drawn() -> None:
    n = 20_000
    logits = torch.zeros(n, 6)
    logits[:, [0, 2, 5]] = float("-inf")
    assert set(sample(logits, draws(n)).tokens.tolist()) == {1, 3, 4}


@pytest.mark.parametrize(("number", "token"), [(0.0, 1), (1 - 2.0**-53, 3)])
def test_the_ends_of_the_interval_draw_possible_ids(
    number: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 may not choose a leading id of weight 0, and rounding up to 1 not a trailing one."""
    from metainfer.ops.sample import ref

    def fixed(seed: Tensor, index: Tensor) -> Tensor:
        return torch.full(seed.shape, number, dtype=torch.float64)

    monkeypatch.setattr(ref, "uniform", fixed)
    never = float("-inf")
    logits = torch.tensor([[never, 0.1, never, 0.3, never, never]])
    assert sample(logits, draws(1)).tokens.item() == token


# ---- reports -------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution(seed: int) -> None:
    logits = logits_of(seed, 6, 200)
    output = sample(
        logits,
        draws(6, temperature=torch.full((6,), 1.7), top_k=torch.full((6,), 5), top_logprobs=3),
    )
    want = logits.double().log_softmax(-1)
    assert output.logprobs is not None and output.ranks is not None
    assert output.top_tokens is not None and output.top_logprobs is not None
    picked = want.gather(1, output.tokens[:, None])[:, 0]
    torch.testing.assert_close(output.logprobs.double(), picked, rtol=0, atol=1e-5)
    order = want.sort(-1, descending=True).indices
    assert torch.equal(output.top_tokens, order[:, :3])
    torch.testing.assert_close(
        output.top_logprobs.double(), want.gather(1, order[:, :3]), rtol=0, atol=1e-5
    )
    ranks = (order == output.tokens[:, None]).nonzero()[:, 1] + 1
    assert torch.equal(output.ranks, ranks) and int(ranks.max()) <= 5


def test_ranks_and_alternatives_order_ties_by_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 2.0]])
    output = sample(logits, SampleInputs(greedy=True, top_logprobs=4))
    assert output.top_tokens is not None and output.ranks is not None
    assert output.top_tokens.tolist() == [[4, 1, 2, 3]] and output.ranks.tolist() == [1]
    banned = SampleInputs(
        greedy=True,
        top_logprobs=0,
        ban_rows=torch.tensor([0, 0, 0]),
        ban_tokens=torch.tensor([4, 1, 2]),
    )
    chosen = sample(logits, banned)
    assert chosen.tokens.tolist() == [3] and chosen.ranks is not None
    assert chosen.ranks.tolist() == [4]
    assert chosen.top_tokens is not None and chosen.top_tokens.shape == (1, 0)


def test_more_alternatives_than_ids() -> None:
    ids, values = best(torch.tensor([[1.0, 3.0]]), 2)
    assert ids.tolist() == [[1, 0]] and values.tolist() == [[3.0, 1.0]]
    output = sample(torch.zeros(1, 2), SampleInputs(greedy=True, top_logprobs=9))
    assert output.top_tokens is not None and output.top_tokens.shape == (1, 2)


@pytest.mark.parametrize("levels", [0, 5, 40])
@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_the_best_are_those_of_a_stable_sort(seed: int, levels: int, count: int) -> None:
    raw = torch.randn(9, 300, generator=torch.Generator().manual_seed(seed))
    if levels:  # ties in most rows, also across the last place
        raw = (raw * levels).round() / levels
    kept = raw.clone()
    ids, values = best(raw, count)
    expected = raw.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, expected.indices[:, :count])
    assert torch.equal(values, expected.values[:, :count])
    assert torch.equal(raw, kept)


def test_rows_without_ties_are_read_once_for_their_best() -> None:
    """20 passes over a prompt's rows held up every stream for seconds."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    raw = torch.arange(1000.0).reshape(2, 500)
    with Watch():
        best(raw, 20)
    assert sum("topk" in name for name in seen) == 1
    assert not any("max" in name for name in seen)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("count", [NO_LOGPROBS, 0, 3])
def test_no_rows(function: Any, count: int) -> None:
    output = function(torch.zeros(0, 10), SampleInputs(greedy=True, top_logprobs=count))
    assert output.tokens.shape == (0,) and output.bad.shape == (0,)
    assert (output.logprobs is None) is (count == NO_LOGPROBS)


def test_all_greedy_without_reports_is_one_pass() -> None:
    """The fast path reads the logits once, in their own dtype."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(isinstance(a, Tensor) and a.numel() > 100 for a in args):
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    logits = torch.randn(3, 1000, dtype=torch.bfloat16)
    with Watch():
        sample(logits, SampleInputs(greedy=True))
    assert seen == ["aten.max.dim"]


def test_tiny_temperature_is_greedy_and_finite(seed: int) -> None:
    logits = logits_of(seed, 4, 100) * 100
    cold = draws(4, temperature=torch.full((4,), 1e-7))
    assert torch.equal(sample(logits, cold).tokens, logits.argmax(-1))
    assert math.isfinite(tempered(logits, torch.full((4,), 1e-7)).amax().item())
