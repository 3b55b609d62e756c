"""`tune comm`: right before timed, in turns, kept in a file that ranks follow and people pin."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from metainfer.bench import collectives
from metainfer.bench.collectives import Bench, CollectivesOptions, run
from metainfer.comm.plan_tiers import Bucket
from metainfer.comm.request import Op
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.request import Request, SamplingParams
from metainfer.engine import rank
from metainfer.engine.engine import Engine

LLAMA = "random:tiny-llama"
SIZES = (Bucket(bytes=64, rows=1), Bucket(bytes=128, rows=2))


class Ranks:
    """Two ranks; `times[method]`: microseconds of each, by call. `wrong`: method -> what is."""

    def __init__(self, times: dict[str, Any], wrong: dict[str, str] | None = None) -> None:
        self.times, self.wrong = times, wrong or {}
        self.log: list[str] = []

    def call(self, method: str, *given: Any) -> list[Any]:
        if method == "methods":
            return [list(self.times), list(self.times)]
        name = given[1]
        self.log.append(f"{method} {name}")
        if method == "check":
            return ["", self.wrong.get(name, "")]
        us = self.times[name]
        us = us(len(self.log)) if callable(us) else us
        return [us, us + 1.0]


def measured(ranks: Ranks) -> Bench:
    bench = Bench(ranks, "tensor", Op.ALL_REDUCE, "float32", SIZES, 0.0)
    bench.measure()
    return bench


def test_candidates_take_turns_forwards_and_backwards_and_the_slowest_rank_counts() -> None:
    ranks = Ranks({"a:x": 10.0, "b:y": 20.0})
    bench = measured(ranks)
    timed = [line.split()[1] for line in ranks.log if line.startswith("time")]
    assert timed[:4] == ["a:x", "b:y", "b:y", "a:x"]
    assert len(timed) == 2 * 2 * collectives.SAMPLES  # no time left: the least samples
    assert {name: row[64].us for name, row in bench.timings.items()} == {"a:x": 11.0, "b:y": 21.0}
    assert not any(row["noisy"] for row in bench.rows(2))


def test_what_is_wrong_on_one_rank_is_never_timed_and_says_where() -> None:
    ranks = Ranks({"a:x": 1.0, "b:y": 20.0}, wrong={"a:x": "3 of 16 elements are wrong"})
    bench = measured(ranks)
    assert set(bench.timings) == {"b:y"} and "time a:x" not in ranks.log
    assert bench.refused == {"a:x": "rank 1, all_reduce of 16 elements: 3 of 16 elements are wrong"}
    assert ranks.log.count("check a:x") == 1  # once wrong is enough


def test_a_timing_that_scatters_is_told_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SAMPLES", collectives.MOST_SAMPLES)
    ranks = Ranks({"a:x": lambda n: 10.0 if n % 3 else 40.0, "b:y": 20.0})
    ranks.times["a:x"] = lambda n: float(10 + 7 * (n % 5))
    bench = measured(ranks)
    assert set(bench.timings) == {"b:y"}
    noisy = [row for row in bench.rows(2) if row["noisy"]]
    assert {(row["method"], row["bytes"]) for row in noisy} == {("a:x", 64), ("a:x", 128)}


def test_a_layout_without_talk_has_nothing_to_tune() -> None:
    with pytest.raises(UsageError, match="send each other"):
        run(Intent(model=LLAMA, platform="cpu", context=64), CollectivesOptions(), lambda t: None)


def paths(intent: Intent) -> dict[str, float]:
    """Share of collectives by path, of one request."""
    engine = Engine(intent)
    engine.start()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.submit(Request("a", tuple(range(5, 25)), params))
        while engine.has_work:
            engine.step()
        group: Any = engine._executor._group  # type: ignore[union-attr]
        (found,) = group.call("collectives")[0].values()
        share: dict[str, float] = found["share"]
        return share
    finally:
        engine.close()


@pytest.mark.timeout(300)
def test_b13_b18_ranks_follow_the_file_and_a_pin_survives_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (collectives, rank):  # kernels that are compiled already stay where they are
        monkeypatch.setattr(module, "tiers_path", lambda name: tmp_path / f"{name}.toml")
    for name, fewer in (("CALLS", 2), ("SAMPLES", 3)):
        monkeypatch.setattr(collectives, name, fewer)
    wish = Intent(model=LLAMA, platform="cpu", context=64, concurrency=4, parallel="tp2")
    options = CollectivesOptions(seconds=0.01)
    document = run(wish, options, lambda text: None)
    file = Path(document["file"])
    assert document["kept"] and file.is_relative_to(tmp_path) and not document["refused"]
    sizes = {row["bytes"] for row in document["rows"] if row["op"] == "all_reduce"}
    starts = {row["bytes_from"] for row in document["tiers"] if row["op"] == "all_reduce"}
    assert starts and starts <= sizes  # tiers begin where steps have sizes
    text = file.read_text()
    other = {"one_shot": "two_shot", "two_shot": "one_shot"}
    pin = re.sub(
        r'method = "shm_cpu:(one_shot|two_shot)"',
        lambda found: f'method = "shm_cpu:{other[found[1]]}"\npinned = true',
        text,
    )
    was = [row["method"] for row in document["tiers"] if row["op"] == "all_reduce"]
    file.write_text(pin)
    shares = paths(wish)
    now = {f"shm_cpu:{other[name.partition(':')[2]]}" for name in was}
    assert {path for path in shares if not path.endswith("direct")} == now
    ranks = Ranks({"shm_cpu:one_shot": 1.0, "shm_cpu:two_shot": 2.0})
    monkeypatch.setattr(collectives.ProcessGroup, "spawn", lambda *a, **k: nullcontext(ranks))
    again = run(wish, options, lambda text: None)
    kept = [row for row in again["tiers"] if row["op"] == "all_reduce"]
    assert {row["method"] for row in kept} == now and all(row["pinned"] for row in kept)
    file.write_text(file.read_text().replace('fingerprint = "', 'fingerprint = "another'))
    told: list[str] = []
    fresh = run(wish, options, told.append)
    assert not any(row["pinned"] for row in fresh["tiers"])  # another machine's pins are not ours
    assert any("is not this machine's" in line for line in told)
