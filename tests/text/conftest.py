"""Small tokenizers made in the test run, and the catalogue's real one where it can be had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from text_backends import BACKENDS

from metainfer.core.errors import ModelError
from metainfer.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_metadata() -> Mapping[str, Any]:
    """GGUF metadata of the catalogue's model; skips when it can not be had."""
    from metainfer.formats.source import resolve

    try:
        return resolve("smollm2-135m").gguf_metadata
    except ModelError as error:
        pytest.skip(f"the model smollm2-135m can not be had here: {error.cause}")


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(smollm2_metadata)


@pytest.fixture(scope="session")
def backends() -> Mapping[str, Tokenizer]:
    """One `Tokenizer` per kind of decoder."""
    return {name: Tokenizer(make()) for name, make in BACKENDS.items()}
