"""DeepSeek-V4-Flash's parameters, FLOPs and bytes against its published tables."""

from __future__ import annotations

import pytest
from test_deepseek_v4_arch import MILLION, released

from metainfer.formats.blocks import FP8_128, MXFP4, NVFP4
from metainfer.models.deepseek_v4 import cost
from metainfer.models.deepseek_v4.config import read_arch

ARCH = read_arch(released())


def test_parameters_are_those_of_the_table() -> None:
    each = cost.parameters(ARCH)
    assert each.embed == each.head == 129280 * 4096
    # The table leaves out norms, biases of places and sinks: 1.8 million.
    assert each.dense / 1e9 == pytest.approx(6.246, abs=0.002)
    assert each.routed / 1e9 == pytest.approx(277.03, abs=0.01)
    assert each.total / 1e9 == pytest.approx(284.33, abs=0.01)
    assert each.expert / 1e6 == pytest.approx(25.17, abs=0.01)
    assert cost.active(ARCH) / 1e9 == pytest.approx(13.27, abs=0.01)


@pytest.mark.parametrize(
    ("context", "csa", "index", "hca"),
    [(8192, 1.76, 0.70, 0.50), (131072, 1.76, 11.3, 3.02), (MILLION, 1.76, 90.2, 21.8)],
)
def test_decode_flops_are_those_of_the_table(
    context: int, csa: float, index: float, hca: float
) -> None:
    found = cost.decode_flops(ARCH, context)
    assert found["products"] / 1e9 == pytest.approx(26.5, abs=0.1)
    for part, wanted in (("csa", csa), ("index", index), ("hca", hca), ("window", 0.03)):
        assert found[part] / 1e9 == pytest.approx(wanted, rel=0.02, abs=0.005), part


def prefill_flops(tokens: int) -> float:
    """Of a prompt; logits of the last row alone."""
    head = cost.parameters(ARCH).head
    products = 2.0 * (cost.active(ARCH) - head) * tokens + 2.0 * head
    return products + sum(cost.prefill_attention(ARCH, tokens))


@pytest.mark.parametrize(("tokens", "petaflops"), [(131072, 4.5), (MILLION, 87.0)])
def test_prefill_flops_are_those_of_the_table(tokens: int, petaflops: float) -> None:
    assert prefill_flops(tokens) / 1e15 == pytest.approx(petaflops, rel=0.02)


@pytest.mark.parametrize("tokens", [1, 3, 4, 130, 2048, 2051, 5000])
def test_prefill_is_the_sum_of_its_tokens(tokens: int) -> None:
    """The closed form against the loop; windows that have not closed cost nothing."""
    head = 2.0 * cost.parameters(ARCH).head
    whole = sum(
        sum(cost.decode_flops(ARCH, position + 1).values()) - head for position in range(tokens)
    )
    assert prefill_flops(tokens) == pytest.approx(whole + head, rel=0.005)


@pytest.mark.parametrize(
    ("batch", "gigabytes"), [(1, 3.45), (2, 6.82), (8, 25.4), (32, 78.3), (128, 140.1)]
)
def test_routed_bytes_are_those_of_the_table(batch: int, gigabytes: float) -> None:
    f, d = ARCH.ffn, ARCH.hidden
    expert = 2 * MXFP4.nbytes(f, d) + MXFP4.nbytes(d, f)
    assert expert / 1e6 == pytest.approx(13.37, abs=0.01)
    read = ARCH.layers * cost.Costs(ARCH).distinct_experts(batch) * expert
    assert read / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_bytes_of_an_expert() -> None:
    f, d = ARCH.ffn, ARCH.hidden
    for fmt, megabytes in ((NVFP4, 14.16), (FP8_128, 25.17)):
        held = 2 * fmt.nbytes(f, d) + fmt.nbytes(d, f)
        assert held / 1e6 == pytest.approx(megabytes, abs=0.01)
