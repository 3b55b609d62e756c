"""Permission, estimate and table are three things; refusals read in full; the path is on record."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ranks import together
from test_tiers import CAPTURED

from metainfer.comm import model
from metainfer.comm.api import Communicator
from metainfer.comm.backends.local import LocalGroup
from metainfer.comm.backends.slabs import SlabComm, gather_bytes
from metainfer.comm.model import KIB, MIB
from metainfer.comm.pieces import Slots
from metainfer.comm.plan import Offer, choose
from metainfer.comm.plan_offers import Ability, cuda_abilities, offers, seed_tiers
from metainfer.comm.plan_tiers import Bucket, Tier, decode_buckets, find_tier
from metainfer.comm.request import Epilogue, Op, Precision, Request
from metainfer.comm.topology import Topology, from_facts, no_peer, one_switch
from metainfer.core.errors import InternalError, RefusedError
from metainfer.core.ledger import Origin
from metainfer.core.verdict import reject
from metainfer.platform.machine_catalog import find_machine

PUSHED, SHARED = Slots(bytes=1 << 20, shared=False), Slots(bytes=1 << 20, shared=True)
GPU = {"ipc": PUSHED, "host": SHARED}


def reduce(size: int, world: int, **change: Any) -> Request:
    return Request(op=Op.ALL_REDUCE, count=size // 2, dtype="bfloat16", world=world, **change)


def chosen(request: Request, topology: Topology, **options: Any) -> str:
    able = cuda_abilities(topology, GPU)
    plan = choose(request, offers(request, able, topology), **options)
    return f"{plan.backend}:{plan.algorithm}"


def test_peers_use_ipc_and_no_peers_use_host_memory() -> None:
    assert chosen(reduce(16 * KIB, 4), one_switch(4)) == "ipc:one_shot"
    assert chosen(reduce(256 * KIB, 4), one_switch(4)) == "ipc:two_shot"
    assert chosen(reduce(16 * KIB, 2), no_peer(2)) == "host:one_shot"
    assert chosen(reduce(MIB, 2), no_peer(2)) == "host:two_shot"
    assert chosen(reduce(32 * MIB, 2), no_peer(2)) == "host:copy"


def test_a_broadcast_leaves_one_port_once_for_each_peer_or_once_for_all() -> None:
    """64 MiB among eight: seven times over a link of 54 GB/s, or once by what host memory gives."""
    tree, size = one_switch(8), 64 * MIB
    asked = Request(op=Op.BROADCAST, count=size // 2, dtype="bfloat16", world=8)
    us = {each.backend: each.us for each in offers(asked, cuda_abilities(tree, GPU), tree)}
    assert us["ipc"] == pytest.approx(7 * size / tree.link_bytes_s * 1e6, rel=1e-2)
    assert us["host"] == pytest.approx(65 * MIB / (tree.dram_bytes_s / 8) * 1e6, rel=1e-2)
    assert us["ipc"] and us["host"] and us["host"] < us["ipc"]


@pytest.mark.parametrize("op", [Op.ALL_GATHER, Op.REDUCE_SCATTER])
def test_long_rows_and_their_sums_go_by_copy_engines_where_nobody_captures(op: Op) -> None:
    def asked(size: int, **change: Any) -> Request:
        return Request(op=op, count=size // 2, dtype="bfloat16", world=2, **change)

    tree = no_peer(2)
    assert chosen(asked(64 * KIB), tree) == "host:direct"
    assert chosen(asked(64 * MIB), tree) == "host:copy"
    assert chosen(asked(64 * MIB, captured=True), tree) == "host:direct"
    able = cuda_abilities(tree, GPU, most_copied=32 * MIB)
    plan = choose(asked(64 * MIB), offers(asked(64 * MIB), able, tree))
    assert plan.algorithm == "direct"
    said = {loser.value: loser.reasons for loser in plan.decision.losers}
    assert "exceed the 33554432 B" in said["host:copy"][0].message
    plan = choose(asked(MIB, captured=True), offers(asked(MIB), able, tree))
    said = {loser.value: loser.reasons for loser in plan.decision.losers}
    assert [reason.code for reason in said["host:copy"]] == ["graph"]


def test_copies_of_rows_cost_what_their_bytes_need_of_the_link() -> None:
    """64 MiB among four: a rank's 16 down and 48 up by the slower way of three, or 48 both ways."""
    size, tree = 64 * MIB, no_peer(4)
    rate = min(tree.host_bytes_s, tree.dram_bytes_s / 4)
    for op, down in ((Op.ALL_GATHER, size / 4), (Op.REDUCE_SCATTER, size * 3 / 4)):
        request = Request(op=op, count=size // 4, dtype="float32", world=4)
        able = cuda_abilities(tree, GPU)
        (offer,) = [each for each in offers(request, able, tree) if each.key == "host:copy"]
        both = (down + size * 3 / 4) / tree.duplex_bytes_s
        assert offer.us == pytest.approx(36 + 1e6 * max(size * 3 / 4 / rate, both))
    narrow = dataclasses.replace(tree, duplex_bytes_s=20e9)
    assert model.copied_scatter(narrow, size) > model.copied_gather(narrow, size)


def test_copies_are_not_for_graphs_nor_epilogues() -> None:
    assert chosen(reduce(32 * MIB, 2, captured=True), no_peer(2)) == "host:two_shot"
    rows = reduce(32 * MIB, 2, epilogue=Epilogue(hidden=4096))
    assert chosen(rows, no_peer(2)) == "host:two_shot"


@pytest.mark.parametrize(("peer", "word"), [(False, "may not write"), (None, "is not known")])
def test_b12_every_gate_that_is_closed_is_said(peer: bool | None, word: str) -> None:
    topology = dataclasses.replace(one_switch(4), peer=peer)
    bytes_wrong = {"ipc": reject("bytes", "pair 2->5 gave wrong bytes")}
    able = cuda_abilities(topology, GPU, bytes_wrong)
    request = reduce(8 * KIB, 4)
    with pytest.raises(RefusedError) as caught:
        choose(request, offers(request, able, topology), forced="ipc")
    for part in (word, "pair 2->5 gave wrong bytes", "ipc:one_shot", "ipc:two_shot"):
        assert part in str(caught.value)


def test_nccl_is_native_and_asked_only_where_that_is_allowed() -> None:
    only = [Ability(backend="nccl")]
    topology = no_peer(2)
    exact, loose = reduce(MIB, 2), reduce(MIB, 2, precision=Precision.NATIVE)
    with pytest.raises(RefusedError, match="rounds more than once"):
        choose(exact, offers(exact, only, topology))
    assert choose(loose, offers(loose, only, topology)).precision is Precision.NATIVE
    gather = Request(op=Op.ALL_GATHER, count=5, dtype="bfloat16", world=2)
    with pytest.raises(RefusedError, match="5 elements are not 2 equal shards"):
        choose(gather, offers(gather, only, topology))
    even = Request(op=Op.ALL_GATHER, count=6, dtype="bfloat16", world=2)
    assert choose(even, offers(even, only, topology)).precision is Precision.EXACT


def test_b15_without_peers_small_and_large_messages_take_two_ways() -> None:
    topology = from_facts(find_machine("8x-4090").facts).first(2)
    tiers = seed_tiers(
        reduce(0, 2),
        [Bucket(bytes=KIB << i) for i in range(16)],
        cuda_abilities(topology, GPU),
        topology,
    )
    assert tiers[0].method == "host:one_shot" and tiers[-1].method == "host:copy"
    assert all(tier.origin is Origin.SEED for tier in tiers)


@pytest.mark.parametrize("name", ["8x-rtx-pro-6000d", "8x-l20", "2x-h200-nop2p", "8x-5090"])
def test_every_shipped_machine_has_a_seed_table_at_its_buckets(name: str) -> None:
    topology = from_facts(find_machine(name).facts)
    buckets = decode_buckets(CAPTURED, 4096)
    world = topology.world
    tiers = seed_tiers(
        reduce(0, world, captured=True), buckets, cuda_abilities(topology, GPU), topology
    )
    assert tiers and {tier.bytes_from for tier in tiers} <= {b.bytes for b in buckets}
    assert all(tier.method.startswith("host:") for tier in tiers)  # peer access is not known
    for bucket in buckets:
        tier = find_tier(tiers, bucket.bytes)
        assert tier is not None and tier.method != "host:copy"


def test_a_slower_link_never_makes_an_estimate_faster() -> None:
    for op in (Op.ALL_REDUCE, Op.ALL_GATHER, Op.ALL_TO_ALL):
        request = Request(op=op, count=1 << 16, dtype="bfloat16", world=4)
        fast = one_switch(4)
        slow = dataclasses.replace(fast, link_bytes_s=1e9, host_bytes_s=1e9)
        for a, b in zip(
            offers(request, cuda_abilities(fast, GPU), fast),
            offers(request, cuda_abilities(slow, GPU), slow),
            strict=True,
        ):
            assert (a.us or 0) <= (b.us or 0) or a.backend == "nccl"


def communicator(comm: SlabComm, **options: Any) -> Communicator:
    able = [
        Ability(backend="local", slots=comm.slots),
        Ability(backend="gloo", verdict=reject("library", "torch has no gloo here")),
    ]
    return Communicator({"local": comm}, able, **options)  # type: ignore[dict-item]


def exchange_of(comm: SlabComm) -> Any:
    def make(request: Request) -> Any:
        return choose(request, [Offer(backend="local", algorithm="direct")])

    return lambda text: gather_bytes(comm, make, text)


def test_plans_are_agreed_on_before_their_first_call_and_paths_are_counted() -> None:
    import torch

    small, large = reduce(8, 3), reduce(4096, 3)

    def step(comm: SlabComm) -> object:
        own = communicator(comm)
        with pytest.raises(InternalError, match="not planned and agreed"):
            own.run(small, torch.ones(4, dtype=torch.bfloat16))
        plans = [own.plan(small), own.plan(large)]
        assert plans[0] is own.plan(small)
        digest = own.agree(exchange_of(comm))
        found = own.run(small, torch.ones(4, dtype=torch.bfloat16))
        described = own.describe()
        assert described["share"] == {"local:one_shot": 1.0} and described["unused"] == []
        return digest, found.tolist()

    with LocalGroup(3) as group:
        results = together(group, step)
    assert len({str(result) for result in results}) == 1 and "[3.0, 3.0, 3.0, 3.0]" in str(results)


def test_b12_a_planned_path_without_calls_is_told() -> None:
    import torch

    tiers = {
        ("all_reduce", 2, "bfloat16"): [
            Tier(bytes_from=0, bytes_to=1024, method="local:one_shot", origin=Origin.FILE, why="w"),
            Tier(
                bytes_from=1024, bytes_to=1 << 40, method="local:two_shot", origin=Origin.FILE,
                why="w",
            ),
        ]
    }  # fmt: skip

    def step(comm: SlabComm) -> object:
        own = communicator(comm, tiers=tiers)
        own.plan(reduce(8, 2))
        assert own.plan(reduce(4096, 2)).algorithm == "two_shot"
        own.agree(exchange_of(comm))
        own.run(reduce(8, 2), torch.ones(4, dtype=torch.bfloat16))
        return own.describe()["unused"]

    with LocalGroup(2) as group:
        assert together(group, step) == [["local:two_shot"]] * 2


def test_a_forced_backend_that_is_not_there_names_its_reason() -> None:
    with LocalGroup(2) as group:
        own = communicator(group.ranks[0], forced="gloo")
        with pytest.raises(RefusedError, match="torch has no gloo here"):
            own.plan(reduce(8, 2))
