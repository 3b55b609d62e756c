"""B-13: tiers from timings, cut at buckets; the plan file that keeps them, pinnable."""

from __future__ import annotations

import itertools
from math import log
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.comm.plan_file import PlanFile, parse, read, render, retune, write
from metainfer.comm.plan_tiers import (
    MIN_GAIN,
    Bucket,
    Sample,
    Tier,
    decode_buckets,
    find_tier,
    make_tiers,
)
from metainfer.core.errors import UserError
from metainfer.core.ledger import Origin

CAPTURED = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def table(buckets: tuple[Bucket, ...], lines: dict[str, tuple[float, float]]) -> dict:
    """Straight lines: microseconds at zero bytes, microseconds per MiB."""
    return {
        name: {b.bytes: Sample(us=base + b.bytes / 2**20 * per) for b in buckets}
        for name, (base, per) in lines.items()
    }


HOST_A = {"ipc:one_shot": (6.0, 97.0), "ipc:two_shot": (9.0, 48.0), "nccl:ring": (13.0, 40.0)}
HOST_B = {"ipc:one_shot": (7.0, 240.0), "ipc:two_shot": (16.0, 120.0), "nccl:ring": (32.0, 60.0)}


@pytest.mark.parametrize("hidden", [4096, 5120, 6144])
@pytest.mark.parametrize("draft", [0, 3, 5])
def test_b13_buckets_are_the_payloads_of_the_captured_batches(hidden: int, draft: int) -> None:
    buckets = decode_buckets(CAPTURED, hidden, drafts=(draft,))
    captured = [b for b in buckets if b.rows]
    assert [b.bytes for b in captured] == [n * (1 + draft) * hidden * 2 for n in CAPTURED]
    sizes = [b.bytes for b in buckets]
    assert sizes == sorted(set(sizes))
    between = [b.bytes for b in buckets if not b.rows]
    assert all(size & (size - 1) == 0 for size in between)


@pytest.mark.parametrize("lines", [HOST_A, HOST_B])
@pytest.mark.parametrize("hidden", [4096, 5120, 6144])
@pytest.mark.parametrize("draft", [0, 3, 5])
def test_b13_no_captured_bucket_straddles_a_tier(lines: dict, hidden: int, draft: int) -> None:
    buckets = decode_buckets(CAPTURED, hidden, drafts=(draft,))
    timings = table(buckets, lines)
    tiers = make_tiers(buckets, timings)
    sizes = [b.bytes for b in buckets]
    assert tiers[0].bytes_from == sizes[0]
    assert all(tier.bytes_from in sizes for tier in tiers)
    assert all(a.bytes_to == b.bytes_from for a, b in itertools.pairwise(tiers))
    for bucket in buckets:
        tier = find_tier(tiers, bucket.bytes)
        assert tier is not None
        best = min(row[bucket.bytes].us for row in timings.values())
        # Never slower than the best by more than what a switch must gain.
        assert timings[tier.method][bucket.bytes].us <= best * (1 + MIN_GAIN) + 1e-9 or (
            bucket is buckets[-1]
        )


def brute_force(buckets: tuple[Bucket, ...], timings: dict) -> float:
    """Least sum of logs over all assignments that obey the rules as the module states them."""
    best = float("inf")
    n = len(buckets)
    for path in itertools.product(timings, repeat=n):
        runs = [len(list(group)) for _, group in itertools.groupby(path)]
        if min(runs) < min(2, n):
            continue
        fair = True
        for i in range(1, n):
            old, new = timings[path[i - 1]], timings[path[i]]
            if path[i] == path[i - 1]:
                continue
            for place in (i, i + 1):
                if place >= n:
                    fair = False
                    continue
                size = buckets[place].bytes
                gain = max(MIN_GAIN, 3 * new[size].mad / new[size].us)
                fair &= new[size].us * (1 + gain) < old[size].us
        if fair:
            best = min(
                best, sum(log(timings[m][b.bytes].us) for m, b in zip(path, buckets, strict=True))
            )
    return best


@given(st.data())
def test_b13_tiers_are_optimal_under_the_rules(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    buckets = tuple(Bucket(bytes=1024 << i) for i in range(n))
    timings = {}
    for name in ("a:x", "b:x", "c:x"):
        steps = data.draw(st.lists(st.floats(1.0, 2.0), min_size=n, max_size=n))
        us = list(itertools.accumulate(steps, lambda x, y: x * y))
        mads = data.draw(st.lists(st.sampled_from([0.0, 0.05]), min_size=n, max_size=n))
        timings[name] = {
            b.bytes: Sample(us=t, mad=m) for b, t, m in zip(buckets, us, mads, strict=True)
        }
    tiers = make_tiers(buckets, timings)
    cost = 0.0
    for bucket in buckets:
        tier = find_tier(tiers, bucket.bytes)
        assert tier is not None
        cost += log(timings[tier.method][bucket.bytes].us)
    assert cost == pytest.approx(brute_force(buckets, timings))


@pytest.mark.parametrize("place", range(1, 13))
def test_b13_one_outlier_makes_no_tier(place: int) -> None:
    buckets = decode_buckets(CAPTURED, 4096)
    timings = table(buckets, HOST_A)
    clean = [(t.bytes_from, t.method) for t in make_tiers(buckets, timings)]
    size = buckets[min(place, len(buckets) - 1)].bytes
    right = find_tier(make_tiers(buckets, timings), size)
    assert right is not None
    for name in timings:
        if name != right.method:
            noisy = {m: dict(row) for m, row in timings.items()}
            noisy[name][size] = Sample(us=timings[name][size].us * 0.3)
            assert [
                t.bytes_to - t.bytes_from > 0 and t.method for t in make_tiers(buckets, noisy)
            ] == [method for _, method in clean], (name, size)


def test_a_method_without_a_sample_cannot_serve_and_unmeasured_sizes_join_below() -> None:
    buckets = tuple(Bucket(bytes=1024 << i) for i in range(5))
    timings = {
        "a:x": {1024 << i: Sample(us=5.0 + i) for i in range(2)},
        "b:x": {1024 << i: Sample(us=9.0 + i) for i in range(4)},
    }
    tiers = make_tiers(buckets, timings)
    assert [(t.method, t.bytes_from) for t in tiers] == [("a:x", 1024), ("b:x", 4096)]
    assert find_tier(tiers, 1024 << 4) is tiers[1] and find_tier(tiers, 2) is tiers[0]
    assert make_tiers(buckets, {}) == () and find_tier((), 5) is None


def stored() -> PlanFile:
    buckets = decode_buckets(CAPTURED, 4096)
    tiers = make_tiers(buckets, table(buckets, HOST_B))
    seeds = (
        Tier(bytes_from=0, bytes_to=9, method="gloo:gather", origin=Origin.SEED, why='a "seed"'),
    )
    return PlanFile(
        fingerprint="3f9c",
        machine="two cards, PCIe 4.0 ×16",
        tiers={("all_reduce", 4, "bfloat16"): tiers, ("all_gather", 2, "uint8"): seeds},
        refused={"ipc:one_shot": "wrong result on ranks 2 and 5"},
    )


def test_the_file_reads_back_as_written(tmp_path: Path) -> None:
    plan = stored()
    write(tmp_path / "sub" / "plan.toml", plan)
    again, warnings = read(tmp_path / "sub" / "plan.toml", "3f9c")
    assert again == plan and warnings == ()
    assert read(tmp_path / "none.toml", "3f9c") == (None, ())


def test_b18_a_foreign_or_damaged_file_is_a_warning_and_the_seed_table() -> None:
    text = render(stored())
    for broken, word in (
        ("schema = [", "not TOML"),
        (text.replace("schema = 1", "schema = 2"), "p.toml:1: schema 2"),
        (text.replace("3f9c", "0000"), "p.toml:2: fingerprint '0000'"),
    ):
        plan, warnings = parse(broken, "p.toml", "3f9c")
        assert not plan.tiers and len(warnings) == 1 and word in warnings[0]


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('dtype = "uint8"', 'dtype = "bf16"', "dtype 'bf16'"),
        ("world = 2", "world = 9", "world 9"),
        ("world = 2", "world = true", "wrong type"),
        ("bytes_to = 9", "bytes_to = 0", "bytes from 0 to 0"),
        ('"gloo:gather"', '"gloo"', "not backend:algorithm"),
        ('origin = "seed"', 'origin = "guess"', "origin 'guess'"),
        ('origin = "seed"', "", "origin is missing"),
        ('origin = "seed"', 'origin = "seed"\nblocks = 4', "blocks is not known"),
        ('op = "all_gather"', 'op = "gather"', "op 'gather'"),
    ],
)
def test_a_bad_entry_costs_that_entry_and_names_its_line(old: str, new: str, word: str) -> None:
    text = render(stored()).replace(old, new, 1)
    plan, warnings = parse(text, "p.toml", "3f9c")
    assert ("all_reduce", 4, "bfloat16") in plan.tiers and len(plan.tiers) == 1
    assert len(warnings) == 1 and word in warnings[0]
    line = int(warnings[0].split(":")[1])
    assert text.splitlines()[line - 1] == "[[tier]]"


def test_b18_a_pinned_tier_survives_tuning_and_is_the_files_word() -> None:
    key = ("all_reduce", 4, "bfloat16")
    text = render(stored())
    first = text.index("[[tier]]")
    text = text[:first] + text[first:].replace("why =", "pinned = true\nwhy =", 1)
    old, warnings = parse(text, "p.toml", "3f9c")
    pin = old.tiers[key][0]
    assert not warnings and pin.pinned and pin.origin is Origin.FILE
    whole = Tier(
        bytes_from=0, bytes_to=1 << 40, method="nccl:ring", origin=Origin.RECORD, why="fast", us=1.0
    )
    rows = retune(old, PlanFile(fingerprint="3f9c", tiers={key: (whole,)})).tiers[key]
    assert [t.method for t in rows] == ["nccl:ring", pin.method, "nccl:ring"]
    assert rows[0].bytes_to == pin.bytes_from and rows[2].bytes_from == pin.bytes_to
    assert rows[1] == pin


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path / "file" / "plan.toml", stored())
