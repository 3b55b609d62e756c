"""`allowed_token_ids` and `bad_words`: what may be drawn, behind drafts too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core.errors import RequestError
from metainfer.core.request import SamplingParams
from metainfer.executor.sampler import _Row, gather
from metainfer.executor.slots import SlotState
from metainfer.ops.sample.ref import processed

V = 6
IDS = st.integers(0, V - 1)


def row(params: SamplingParams, prompt: list[int], said: list[int], ahead: list[int]) -> _Row:
    tokens = [*prompt, *said]
    return _Row(SlotState("r", params, len(prompt), tokens, len(said), (0,), V), tuple(ahead))


@given(
    st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4),
    st.lists(IDS, max_size=4, unique=True),
    st.lists(IDS, max_size=4),
    st.lists(IDS, max_size=5),
    st.lists(IDS, max_size=3),
    st.integers(0, 6),
)
def test_no_draw_is_outside_or_completes_a_bad_word(
    words: list[tuple[int, ...]],
    allowed: list[int],
    prompt: list[int],
    said: list[int],
    ahead: list[int],
    least: int,
) -> None:
    params = SamplingParams(
        bad_words=tuple(words), allowed_token_ids=tuple(allowed), min_tokens=least, max_tokens=9
    )
    free = row(SamplingParams(), [], [1], [])
    inputs = gather([row(params, prompt, said, ahead), free], torch.device("cpu"))
    scores = processed(torch.zeros(2, V), inputs)
    answer = [*said, *ahead]
    for token in range(V):
        longer = (*answer, token)
        fine = not any(longer[-len(word) :] == word for word in words)
        fine &= not allowed or token in allowed
        fine &= token != 0 or len(answer) >= least
        assert torch.isfinite(scores[0, token]) == fine, token
        assert torch.isfinite(scores[1, token])


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (V,)}, {"allowed_token_ids": (-1,)}, {"bad_words": ((1, V),)},
        {"bad_words": ((),)},
    ],
)  # fmt: skip
def test_ids_are_of_the_vocabulary(params: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params).check(V)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(params))


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ({}, True),
        ({"ignore_eos": True, "stop_token_ids": (3,), "max_tokens": 9}, True),
        ({"min_tokens": 2}, True),
        ({"min_tokens": 3}, False),  # the end and the stops may not be drawn yet
        ({"temperature": 0.5}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": {1: 2.0}}, False),
        ({"allowed_token_ids": (1,)}, False),
        ({"bad_words": ((1,),)}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
    ],
)
def test_a_likeliest_token_is_known_where_nothing_else_bears_on_it(
    more: dict[str, object], known: bool
) -> None:
    params = SamplingParams(**{"temperature": 0.0, **more})  # type: ignore[arg-type]
    assert row(params, [5], [1], [2]).likeliest is known
