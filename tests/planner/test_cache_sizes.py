"""The cache within a budget: the bytes are those of the tensors, and advice works when followed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import RefusedError
from metainfer.kv.book.capacity import fits
from metainfer.kv.book.spec import GroupSpec, form_groups
from metainfer.kv.store.pools import KVStore
from metainfer.models.deepseek_v4.config import read_arch
from metainfer.models.deepseek_v4.shapes import random_configs
from metainfer.planner.memory import CacheBudget, kv_rows, size_cache

LAYOUTS = [
    {"kv": kv, "index": index}
    for kv in ("latent@1", "latent-fp8@1")
    for index in ("index@1", "index-fp8@1", "index-fp4@1")
]


@st.composite
def hybrid_groups(draw: Callable[..., int]) -> tuple[GroupSpec, ...]:
    """Windows, entries, keys and rings of random spans."""
    csa = draw(st.integers(1, 5))
    config = {
        **random_configs()["tiny-deepseek-v4"],
        "num_hidden_layers": 3,
        "num_hash_layers": 0,
        "compress_ratios": draw(st.lists(st.sampled_from((0, 4, 128)), min_size=3, max_size=3)),
        "compress_rate_csa": csa,
        "compress_rate_hca": draw(st.integers(csa + 1, 20)),
        "sliding_window": draw(st.sampled_from((1, 2, 7, 16, 33, 128))),
    }
    arch = read_arch(config)
    specs = arch.cache_specs("float32", draw(st.sampled_from(LAYOUTS)))
    return form_groups(specs, page_tokens=arch.page_unit * draw(st.integers(1, 2)))


@settings(max_examples=150, deadline=None)
@given(
    groups=hybrid_groups(),
    budget=st.integers(1_000, 3_000_000),
    context=st.integers(1, 4096),
    running=st.sampled_from((1, 2, 3, 9, 32)),
    step=st.sampled_from((1, 16, 100, 1024)),
    caching=st.booleans(),
)
def test_what_fits_is_within_and_advice_works(
    groups: tuple[GroupSpec, ...], budget: int, context: int, running: int, step: int, caching: bool
) -> None:
    def sized(budget: int, context: int) -> CacheBudget:
        found = size_cache(
            groups, budget, context=context, running=running, step_tokens=max(step, running),
            caching=caching,
        )  # fmt: skip
        assert found.sizes.bytes() <= budget
        assert found.sizes.bytes() == sum(row.bytes for row in kv_rows(found.sizes, found.tokens))
        assert KVStore(found.sizes, torch.device("cpu")).nbytes == found.sizes.bytes()
        assert fits(found.sizes, context).accepted
        return found

    try:
        sized(budget, context)
    except RefusedError as error:
        memory = re.search(r"--kv-memory to (\d+)MiB", error.remedy)
        assert memory is not None
        sized(int(memory[1]) << 20, context)
        shorter = re.search(r"--context to ([\d,]+)", error.remedy)
        if shorter is not None:
            reach = int(shorter[1].replace(",", ""))
            sized(budget, reach)
            with pytest.raises(RefusedError):
                sized(budget, reach + 1)
