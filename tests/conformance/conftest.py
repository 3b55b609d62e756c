import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from fake_server import Running, fake_server


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with fake_server() as running:
        yield running
