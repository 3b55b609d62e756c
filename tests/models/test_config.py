"""Numbers in a config that no model has are refused by name, whatever follows from them."""

from __future__ import annotations

import pytest

from metainfer.core.errors import ModelError
from metainfer.models.dense.arch import read_arch

GOOD = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("key", sorted(set(GOOD) - {"model_type"}))
@pytest.mark.parametrize("value", [10**30, 10**400, -(10**400)])
def test_huge_integers_are_refused_by_name(key: str, value: int) -> None:
    read_arch(GOOD)
    with pytest.raises(ModelError, match=key) as caught:
        read_arch({**GOOD, key: value})
    assert len(caught.value.cause) < 400
