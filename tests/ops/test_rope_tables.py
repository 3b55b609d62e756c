"""`rope/tables.py` against transformers' rope functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from metainfer.core.errors import ModelError
from metainfer.ops.rope.tables import RopeSpec, cos_sin, frequencies

D, CONTEXT, THETA = 64, 4096, 10_000.0
HALF = [1.0 + 0.05 * i for i in range(D // 2)]
LONG = [1.0 + 0.9 * i for i in range(D // 2)]
ORIGINAL = {"original_max_position_embeddings": 1024}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": YARN,
    "yarn-factor": {**YARN, "attention_factor": 0.75},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-untruncated": {**YARN, "truncate": False},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": HALF,
        "long_factor": LONG,
        **ORIGINAL,
    },
    "longrope-factor": {
        "rope_type": "longrope",
        "short_factor": HALF,
        "long_factor": LONG,
        "factor": 16.0,
        **ORIGINAL,
    },
}


def config(scaling: dict[str, Any], theta: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=D * 4,
        num_attention_heads=4,
        head_dim=D,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": theta, **scaling},
    )


def spec(scaling: dict[str, Any], theta: float) -> RopeSpec:
    return RopeSpec(rotated=D, theta=theta, context=CONTEXT, scaling=scaling)


@pytest.mark.parametrize("theta", [THETA, 1_000_000.0])
@pytest.mark.parametrize("length", [1000, 1024, 1025, CONTEXT, 3 * CONTEXT])
@pytest.mark.parametrize("name", [name for name in SCALINGS if name != "default"])
def test_frequencies_against_transformers(name: str, length: int, theta: float) -> None:
    scaling = SCALINGS[name]
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        config(scaling, theta), torch.device("cpu"), seq_len=length
    )
    ours, factor = frequencies(spec(scaling, theta), length)
    assert factor == pytest.approx(their_factor, rel=1e-12)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", list(SCALINGS))
def test_table_against_rotary_module(name: str) -> None:
    """Positions small enough that float32 angles are good; the dynamic types see `length`."""
    scaling = SCALINGS[name]
    length = 2000
    module = LlamaRotaryEmbedding(config(scaling, THETA))
    cos, sin = module(torch.zeros(1, 1, 1), torch.arange(length)[None])  # [1, length, D]
    table = cos_sin(spec(scaling, THETA), length)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, : D // 2], cos[0, :, : D // 2], rtol=0, atol=3e-4)
    torch.testing.assert_close(table[:, D // 2 :], sin[0, :, : D // 2], rtol=0, atol=3e-4)


def test_angles_are_exact_far_out() -> None:
    """Position 100,000 in float32 arithmetic would be off by 1e-3 and more."""
    table = cos_sin(spec({}, THETA), 100_001)
    position = torch.tensor(100_000, dtype=torch.float64)
    exponents = torch.arange(0, D, 2, dtype=torch.float64) / D
    angles = position / THETA**exponents
    torch.testing.assert_close(table[-1, : D // 2], angles.cos().float(), rtol=0, atol=1e-7)


def test_old_key_type_is_read() -> None:
    a = frequencies(spec({"type": "linear", "factor": 2.0}, THETA), 10)[0]
    b = frequencies(spec({"rope_type": "linear", "factor": 2.0}, THETA), 10)[0]
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "su"}, "su"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "two"}, "factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], **ORIGINAL}, "short_factor"),
        ({"rope_type": "llama3", "factor": 8.0, **ORIGINAL}, "low_freq_factor"),
    ],
)
def test_bad_scaling_names_the_key(scaling: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        frequencies(spec(scaling, THETA), 10)


def test_odd_width_is_refused() -> None:
    with pytest.raises(ModelError, match="even"):
        frequencies(RopeSpec(rotated=63), 10)
