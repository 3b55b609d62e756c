"""What each backend would say of a request, from facts alone, so that every rank says the same.

A backend's ability is found once, by whoever opened it (a peer matrix, a compiler, a library); from
there on permission (`Offer.verdict`), estimate (`Offer.us`, a seed from `model.py`) and measurement
(the tier table) have three owners.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from metainfer.comm import model
from metainfer.comm.model import SEEDS, Costs
from metainfer.comm.pieces import ALGORITHMS, Slots, fits
from metainfer.comm.plan import Offer
from metainfer.comm.plan_tiers import Bucket, Sample, Tier, make_tiers
from metainfer.comm.request import Op, Precision, Request
from metainfer.comm.topology import Topology
from metainfer.core.ledger import Origin
from metainfer.core.verdict import ACCEPT, Verdict, reject, require

#: Backends in the order in which ties go, and on which kind of memory they work.
CUDA_BACKENDS = ("ipc", "host", "local", "nccl")
COPY = "copy"
COPIED: Mapping[Op, model.Formula] = {
    Op.ALL_REDUCE: model.host_copy,
    Op.ALL_GATHER: model.copied_gather,
    Op.REDUCE_SCATTER: model.copied_scatter,
}
"""What copy engines carry through host memory, and its price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """What was found of one backend on this machine. `verdict`: why it cannot be opened at all;
    `slots`: what a call of it carries, None where it has no slots of ours. `copies`: why `host` has
    no copy engines; `most_copied`: bytes of their longest message, None where nothing bounds it."""

    backend: str
    verdict: Verdict = ACCEPT
    slots: Slots | None = None
    copies: Verdict = ACCEPT
    most_copied: int | None = None


def cuda_abilities(
    topology: Topology,
    slots: Mapping[str, Slots],
    found: Mapping[str, Verdict] | None = None,
    most_copied: int | None = None,
) -> tuple[Ability, ...]:
    """The GPU backends on a tree; `found` adds what opening them showed (a failed byte test, a
    missing compiler), by backend and for ``host:copy``. Peer access that is unknown is not used.
    """
    gates = dict(found or {})
    if topology.peer is not True:
        text = "cards may not write into each other"
        if topology.peer is None:
            text = "whether cards may write into each other is not known"
        gates["ipc"] = reject("peer", text) & gates.get("ipc", ACCEPT)
    return tuple(
        Ability(
            backend=name,
            verdict=gates.get(name, ACCEPT),
            slots=slots.get(name),
            copies=gates.get(f"{name}:{COPY}", ACCEPT),
            most_copied=most_copied if name == "host" else None,
        )
        for name in CUDA_BACKENDS
        if name in slots or name in gates or name == "nccl"
    )


def offers(
    request: Request,
    abilities: Sequence[Ability],
    topology: Topology | None = None,
    costs: Costs = SEEDS,
) -> tuple[Offer, ...]:
    """Every backend with every algorithm it has for `request`; refused ones carry their reasons.

    Without a tree (processes on one host, no devices) nothing is estimated and order decides.
    """
    found: list[Offer] = []
    for ability in abilities:
        if ability.backend in ("nccl", "gloo"):
            found.append(_library(request, ability, topology))
            continue
        for algorithm in ALGORITHMS[request.op]:
            verdict = ability.verdict
            if ability.slots is not None:
                verdict = verdict & fits(request, ability.slots, algorithm)
            found.append(
                Offer(
                    backend=ability.backend,
                    algorithm=algorithm,
                    verdict=verdict,
                    us=_estimate(request, ability.backend, algorithm, topology, costs),
                )
            )
        if ability.backend == "host" and request.op in COPIED:
            found.append(_copy(request, ability, topology, costs))
    return tuple(found)


def seed_tiers(
    request: Request,
    buckets: Sequence[Bucket],
    abilities: Sequence[Ability],
    topology: Topology,
    costs: Costs = SEEDS,
) -> tuple[Tier, ...]:
    """The table before anything was measured: the model's choice per bucket, labelled a seed.

    `request` gives op, type, world and class; its count is replaced by each bucket's.
    """
    timings: dict[str, dict[int, Sample]] = {}
    for bucket in buckets:
        for offer in offers(_of_size(request, bucket.bytes), abilities, topology, costs):
            able = offer.verdict.accepted and offer.us is not None
            exact = request.precision is Precision.NATIVE or offer.precision is Precision.EXACT
            graph = offer.graph_safe or not request.captured
            if able and exact and graph and offer.us is not None:
                timings.setdefault(offer.key, {})[bucket.bytes] = Sample(us=offer.us)
    return make_tiers(buckets, timings, Origin.SEED)


def _of_size(request: Request, size: int) -> Request:
    width = max(1, request.bytes // max(1, request.count))
    return dataclasses.replace(request, count=size // width, epilogue=None)


def _library(request: Request, ability: Ability, topology: Topology | None) -> Offer:
    """NCCL rounds by its own order; gloo gathers, and we sum."""
    verdict = ability.verdict & require(
        request.epilogue is None and not request.side_int32,
        *("extras", f"{ability.backend} has neither epilogues nor counts beside a payload"),
    )
    if ability.backend == "gloo":
        return Offer(backend="gloo", algorithm="gather", verdict=verdict, graph_safe=False)
    parted = request.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER)
    verdict = verdict & require(
        not parted or request.count % request.world == 0,
        *("count", f"{request.count} elements are not {request.world} equal shards"),
    )
    moves = request.op not in (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
    us = None
    if topology is not None and request.world > 1:
        us = _nccl(topology.first(request.world), request.bytes)
    exact = Precision.EXACT if moves or request.dtype == "int32" else Precision.NATIVE
    return Offer(backend="nccl", algorithm="ring", verdict=verdict, us=us, precision=exact)


def _nccl(tree: Topology, size: int) -> float:
    """By the path that it takes; with peers the middle of its bracket."""
    if tree.peer is True:
        return sum(model.nccl_bracket(tree.world, size)) / 2
    return model.nccl_through_host(tree, size)


def _copy(request: Request, ability: Ability, topology: Topology | None, costs: Costs) -> Offer:
    """Copy engines through host memory: no extras, not in graphs."""
    verdict = (
        ability.verdict
        & ability.copies
        & require(
            request.epilogue is None and not request.side_int32,
            *("extras", "copy engines carry neither epilogues nor counts"),
        )
    )
    most = ability.most_copied
    if most is not None:
        text = f"{request.bytes} B exceed the {most} B that copies were given room for"
        verdict = verdict & require(request.bytes <= most, "room", text)
    us = None
    if topology is not None and request.world > 1:
        us = COPIED[request.op](topology.first(request.world), request.bytes, costs)
    return Offer(backend="host", algorithm=COPY, verdict=verdict, us=us, graph_safe=False)


def _estimate(
    request: Request, backend: str, algorithm: str, topology: Topology | None, costs: Costs
) -> float | None:
    """A seed in microseconds, None for backends that the bus model does not describe."""
    if topology is None or backend not in ("ipc", "host") or request.world < 2:
        return None
    tree = topology.first(request.world)
    if request.op is Op.ALL_REDUCE:
        formulas = model.PEER if backend == "ipc" else model.HOST
        return formulas[algorithm](tree, request.bytes, costs)
    by_host = backend == "host"
    if request.op is Op.BROADCAST:
        return model.broadcast(tree, request.bytes, costs, through_host=by_host)
    parted = request.op is not Op.ALL_GATHER
    return model.direct(tree, request.bytes, costs, through_host=by_host, parted=parted)
