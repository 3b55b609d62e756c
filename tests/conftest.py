"""Fixtures that every room uses: a seed that belongs to the test, poisoned memory."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("repo", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("repo")


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
