"""Fixtures that every room uses: a seed that belongs to the test, poisoned memory."""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# OpenMP's threads sleep while they wait, here and in every child: beside another worker they would
# turn in a loop on the core that it needs (on two cores `tests/ops/test_qualify.py` took four times
# the processor's time). Read once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The same examples on every machine, however slow: no time counts. `--hypothesis-seed=N` draws
# others.
settings.register_profile(
    "repo",
    deadline=None,
    print_blob=True,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repo")

# Some draws are constants out of the modules that happen to be imported, so they would depend on
# which tests a worker ran before.
assert callable(providers._get_local_constants)
providers._get_local_constants = providers.Constants


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Generators of the whole process begin alike, whatever a worker ran before."""
    number = zlib.crc32(item.nodeid.encode())
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that follows from the test's name: stable, and different for each test."""
    return zlib.crc32(request.node.nodeid.encode())


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def poison() -> Iterator[None]:
    """Every uninitialised tensor starts as NaN (or the largest integer) inside the test."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
