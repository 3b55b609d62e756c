"""`bench offline` on a random model: rows for every batch, and no prompt twice."""

from __future__ import annotations

import pytest

from metainfer.bench.offline import EngineSide, OfflineOptions, drawn_prompts, run
from metainfer.core.errors import RefusedError
from metainfer.core.intent import Intent
from metainfer.engine.engine import Engine


def test_rows_of_all_batches_with_default_flags() -> None:
    # A prompt of two pages: the batches once shared their first prompt, and the cache found it.
    options = OfflineOptions(
        prompt_tokens=70, output_tokens=3, batches=(1, 4), prefill_tokens=90, repeats=2
    )
    log: list[str] = []
    document = run(Intent(model="random:tiny-llama"), options, log.append)
    rows = document["rows"]
    assert isinstance(rows, list) and len(rows) == len(log) == 3
    assert all(row["n"] == 2 and row["median"] > 0 for row in rows)


def test_decodes_are_timed_while_all_of_a_batch_run() -> None:
    """Eight prompts of 20 tokens enter 16 a step behind the first three. One that ends is told."""
    engine = Engine(
        Intent(
            model="random:tiny-llama", platform="cpu", context=64, concurrency=8, chunk_tokens=64,
            mixed_tokens=16, prefix_cache=False,
        )
    )  # fmt: skip
    engine.start()
    try:
        assert engine.resolved is not None
        side = EngineSide(engine, engine.resolved.arch.vocab_size)
        side.fill(drawn_prompts(8, 20, side.vocab, 3), 6)
        entered = engine.stats().steps
        assert 6 <= entered <= 1 + side.entering(8, 20)
        assert engine.stats().running == 8
        side.decode(5)
        assert engine.stats().steps == entered + 5 and engine.stats().running == 8
        side.end()
        assert not engine.has_work
        side.fill(drawn_prompts(1, 20, side.vocab, 4), 2)
        with pytest.raises(RefusedError, match="before all of them were running"):
            side.decode(3)
    finally:
        engine.close()
