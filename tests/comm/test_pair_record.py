"""The cost model beside what two cards without peer access took: records of `comm_gpu.py`."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest

from metainfer.comm import model
from metainfer.comm.topology import Topology, from_facts
from metainfer.platform.machine_catalog import find_machine

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
FIRST, SECOND = "2026-11-30-2xh200-streams.json", "2026-11-30-2xh200-streams-second.json"
FOURTH, LINK = "2026-11-30-2xh200-streams-fourth.json", "2026-11-30-2xh200-one-link.json"


@cache
def pair() -> Topology:
    return from_facts(find_machine("2x-h200-nop2p").facts)


def measured(record: str, section: str, place: int, by: str, op: str = "") -> dict[int, float]:
    """Bytes -> the least microseconds of rows whose word at `place` is `by`, whatever the grid and
    the pieces; `op`: their first word."""
    found: dict[int, float] = {}
    for name, row in json.loads((RECORDS / record).read_text())[section]["rows"].items():
        words = name.split()
        if words[place] == by and words[0].startswith(op):
            size = int(words[2])
            found[size] = min(found.get(size, row["us"]), row["us"])
    return found


#: Of each size the newest: from 16 MiB on the first record's, older kernels than ADR 0049's.
KERNELS = (
    measured(FIRST, "streams", 0, "host")
    | measured(SECOND, "streams", 0, "host")
    | measured(FOURTH, "streams", 0, "host")
)
COPIES = measured(FOURTH, "streams", 0, "copy")
NCCL = measured(FIRST, "streams", 0, "nccl") | measured(SECOND, "streams", 0, "nccl")


@pytest.mark.parametrize(("size", "us"), sorted(KERNELS.items()))
def test_sums_by_kernels_within_twenty_percent(size: int, us: float) -> None:
    name, predicted = model.best(model.HOST_KERNELS, pair(), size)
    assert predicted == pytest.approx(us, rel=0.20)
    assert name == "one_shot"  # what two ranks send is the same in two phases


@pytest.mark.parametrize(("size", "us"), sorted(COPIES.items()))
def test_sums_by_copy_engines_within_twenty_percent(size: int, us: float) -> None:
    assert model.host_copy(pair(), size) == pytest.approx(us, rel=0.20)


def test_what_is_chosen_is_what_was_faster() -> None:
    both = KERNELS.keys() & COPIES.keys()
    assert len(both) >= 3
    for size in both:
        copied = model.best(model.HOST, pair(), size)[0] == "copy"
        assert copied == (COPIES[size] < KERNELS[size]), size


@pytest.mark.parametrize("record", [SECOND, LINK])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_gathers_and_scattered_sums_within_twenty_percent(op: str, record: str) -> None:
    """By kernels and copies from before and after ADR 0049 and 0050."""
    copied = model.copied_gather if op == "all_gather" else model.copied_scatter
    kernels, copies = (measured(record, "rows", 1, by, op) for by in ("host", "copy"))
    assert len(kernels) == len(copies) == 4
    for size in kernels:
        predicted = min(
            model.direct(pair(), size, through_host=True), copied(pair(), size, model.SEEDS)
        )
        assert predicted == pytest.approx(min(kernels[size], copies[size]), rel=0.20), size


@pytest.mark.parametrize(("size", "us"), sorted(NCCL.items()))
def test_nccl_within_twenty_percent(size: int, us: float) -> None:
    assert model.nccl_through_host(pair(), size) == pytest.approx(us, rel=0.20)


def test_nccl_takes_the_link_whatever_our_copies_reach() -> None:
    slow = dataclasses.replace(pair(), duplex_bytes_s=43e9)
    size = 64 << 20
    assert model.nccl_through_host(slow, size) == model.nccl_through_host(pair(), size)
    assert model.host_copy(slow, size) > model.host_copy(pair(), size)


def test_the_machine_s_own_rates_are_taken_and_others_have_seeds() -> None:
    own = from_facts(find_machine("2x-h200-nop2p").facts)
    assert (own.duplex_bytes_s, own.kernel_bytes_s, own.copy_us) == (92e9, 56e9, 80)
    other = from_facts(find_machine("8x-4090").facts)
    assert other.kernel_bytes_s == pytest.approx(other.link_bytes_s * 51 / 55)
    assert other.duplex_bytes_s == pytest.approx(other.link_bytes_s * 93 / 54)
    assert other.copy_us == 90
