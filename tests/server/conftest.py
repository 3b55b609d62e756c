from collections.abc import Iterator

import pytest
from fake_server import Running, fake_server


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """One server for all tests that do not harm it."""
    with fake_server() as running:
        yield running
