"""Flags become an intent whose origins tell the user's word from ours."""

from __future__ import annotations

import pytest

from metainfer.cli.flags import EngineFlags, parse_size
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("4K", 4096), ("512MiB", 2**29), ("1.5GB", 3 * 2**29), ("24 g", 24 * 2**30),
     ("2t", 2**41), ("10b", 10)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1e9", "4 gigs", "GiB", "1.5.2G"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text, "--x")


def test_everything_left_out_is_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METAINFER_PLATFORM", raising=False)
    assert EngineFlags().intent("m") == Intent(model="m")


def test_all_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAINFER_PLATFORM", "cuda")
    flags = EngineFlags(
        context=4096, concurrency=8, kv_memory="1GiB", chunk_tokens=512, page_tokens=16, threads=2,
        goal="latency", dtype="bfloat16", op=("linear=x",), layout=("weight=y",),
        allow_fallback=("norm",), no_prefix_cache=True, draft="ngram:3",
    )  # fmt: skip
    intent = flags.intent("m")
    assert intent.origin("platform") is Origin.ENV and intent.platform == "cuda"
    for name in (
        "context",
        "concurrency",
        "kv_bytes",
        "chunk_tokens",
        "dtype",
        "ops",
        "threads",
        "draft",
    ):
        assert intent.origin(name) is Origin.FLAG, name
    assert (intent.kv_bytes, intent.ops, intent.layouts) == (
        2**30, {"linear": "x"}, {"weight": "y"}
    )  # fmt: skip
    assert intent.allow_fallback == ("norm",) and not intent.prefix_cache
    assert intent.draft == "ngram:3"
    named = EngineFlags(platform="cpu").intent("m")
    assert named.platform == "cpu" and named.origin("platform") is Origin.FLAG
