"""`bench offline` on a random model: rows for every batch, and no prompt twice."""

from __future__ import annotations

from metainfer.bench.offline import OfflineOptions, run
from metainfer.core.intent import Intent


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
