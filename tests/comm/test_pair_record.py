"""The cost model beside what two cards without peer access took: records of `comm_gpu.py`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from metainfer.comm import model
from metainfer.comm.topology import Topology, from_facts
from metainfer.platform.machine_catalog import find_machine

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"
STREAMS = ("2026-11-30-2xh200-streams.json", "streams")
PAIR = ("2026-11-29-2xh200-comm.json", "pair_without_peer")


@cache
def pair() -> Topology:
    return from_facts(find_machine("2x-h200-nop2p").facts)


def measured(record: tuple[str, str], backend: str) -> dict[int, float]:
    """Bytes -> the least microseconds of `backend`, whatever its grid, in graphs or eager."""
    rows = json.loads((RECORDS / record[0]).read_text())[record[1]]["rows"]
    found: dict[int, float] = {}
    for name, row in rows.items():
        by, _, size, *_ = name.split()
        if by == backend:
            found[int(size)] = min(found.get(int(size), row["us"]), row["us"])
    return found


#: The first record took turns where calls of 256 KiB and more now go in parts.
KERNELS = measured(STREAMS, "host") | {
    size: us for size, us in measured(PAIR, "host").items() if size < 256 << 10
}


@pytest.mark.parametrize(("size", "us"), sorted(KERNELS.items()))
def test_sums_by_kernels_within_twenty_percent(size: int, us: float) -> None:
    by_kernels = {name: model.HOST[name] for name in ("one_shot", "two_shot")}
    name, predicted = model.best(by_kernels, pair(), size)
    assert predicted == pytest.approx(us, rel=0.20)
    assert name == "one_shot"  # what two ranks send is the same in two phases


@pytest.mark.parametrize(("size", "us"), sorted(measured(STREAMS, "nccl").items()))
def test_nccl_within_twenty_percent(size: int, us: float) -> None:
    assert model.nccl_through_host(pair(), size) == pytest.approx(us, rel=0.20)


def test_the_machine_s_own_rate_of_kernels_is_taken() -> None:
    facts = find_machine("2x-h200-nop2p").facts
    assert from_facts(facts).kernel_bytes_s == 51e9
    other = from_facts(find_machine("8x-4090").facts)
    assert other.kernel_bytes_s == pytest.approx(other.link_bytes_s * 51 / 55)
