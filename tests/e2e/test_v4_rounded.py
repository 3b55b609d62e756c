"""Rounded caches against `transformers` with the same rounding put where its entries are made.

Latents and entries: e4m3 in groups of the body, the rotated tail in bfloat16. Index keys and
queries: the Hadamard matrix, then e2m1 (or e4m3 with a float32 scale a key). In float64 nothing
else may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import v4
from harness import start
from test_v4_oracle import Recorder, prompts, scored
from torch import Tensor

from metainfer.formats.activation import activation_fp8, index_fp4

LATENT, KEY, TAIL, BLOCK = 32, 16, 8, 8


def latent(x: Tensor) -> Tensor:
    body = activation_fp8(x[..., :-TAIL], BLOCK)
    return torch.cat((body, x[..., -TAIL:].bfloat16().to(x.dtype)), dim=-1)


def mixed(x: Tensor) -> Tensor:
    """x times the Sylvester matrix of order KEY, orthonormal."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while matrix.shape[0] < KEY:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return x @ matrix * KEY**-0.5


def amax(x: Tensor) -> Tensor:
    """e4m3 by amax / 448 in float32."""
    scale = (x.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448).float().to(x.dtype)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "index@1": lambda x: x,
    "index-fp4@1": lambda x: index_fp4(mixed(x), KEY),
    "index-fp8@1": lambda x: amax(mixed(x)),
}


@contextmanager
def rounding(kv: str, index: str) -> Iterator[None]:
    """`transformers` rounds what it turns: latents and entries have one head, keys their width."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    turn = modeling.apply_rotary_pos_emb

    def turned(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = turn(x, *args, **kwargs)
        if x.shape[-1] == KEY:
            return KEYS[index](out)
        return latent(out) if x.shape[1] == 1 and kv == "latent-fp8@1" else out

    modeling.apply_rotary_pos_emb = turned
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = turn


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("v4")
    layers = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}
    return folder, v4.save(v4.tiny(11, **layers), folder)


@pytest.mark.parametrize(
    ("kv", "index"),
    [
        ("latent-fp8@1", "index@1"),
        ("latent@1", "index-fp8@1"),
        ("latent-fp8@1", "index-fp4@1"),
    ],
)
def test_rounded_caches_are_the_recipes(checkpoint: tuple[Path, Any], kv: str, index: str) -> None:
    folder, model = checkpoint
    engine = start(
        folder, dtype="float64", chunk_tokens=21, concurrency=1, context=256, prefix_cache=False,
        layouts={"kv": kv, "index": index},
    )  # fmt: skip
    record = Recorder().attach(engine)
    for prompt in prompts(3, (5, 40, 140)):
        got = scored(engine, record, prompt)
        with rounding(kv, index):
            torch.testing.assert_close(got, v4.oracle(model, prompt), rtol=0, atol=1e-10)
        if len(prompt) > 100:  # the rounding is felt
            assert (got - v4.oracle(model, prompt)).abs().max() > 1e-3
