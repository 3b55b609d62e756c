"""Through an engine: words that an answer must not hold, ids it must keep to, with drafts too."""

from __future__ import annotations

from itertools import pairwise

import pytest

from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.engine.engine import Engine

from harness import start  # isort: skip

PROMPT = tuple(range(3, 40))
COUNT = 24


def answer(engine: Engine, **params: object) -> tuple[list[int], FinishReason | None, str]:
    wish = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, **params)  # type: ignore[arg-type]
    engine.submit(Request("r", PROMPT, wish, (2,)))
    tokens: list[int] = []
    while True:
        for output in engine.step()[0]:
            tokens += output.tokens
            if output.finish is not None:
                return tokens, output.finish, output.error or ""


@pytest.fixture(scope="module", params=["off", "ngram:3"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return start("random:tiny-llama", draft=request.param, concurrency=4)


def test_bad_words_and_allowed_ids(engine: Engine) -> None:
    free, _, _ = answer(engine)
    pair = (free[3], free[4])
    first = next(at for at in range(COUNT) if tuple(free[at : at + 2]) == pair)
    found, finish, _ = answer(engine, bad_words=(pair,))
    assert finish is FinishReason.LENGTH and len(found) == COUNT
    assert found[: first + 1] == free[: first + 1]  # the pair's beginning may be said
    assert pair not in set(pairwise(found))
    banned, _, _ = answer(engine, bad_words=tuple((token,) for token in set(free)))
    assert not set(banned) & set(free)
    some = (5, 7, 11)
    kept, _, _ = answer(engine, allowed_token_ids=some)
    assert len(kept) == COUNT and set(kept) <= set(some)
    nothing, finish, error = answer(engine, allowed_token_ids=(5,), bad_words=((5,),))
    assert (nothing, finish) == ([], FinishReason.ERROR) and "leave no token" in error
    assert answer(engine)[0] == free
