"""``/page/status``: what the live page shows, as one JSON document. Unknown is null, never zero."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

import metainfer
from metainfer.engine.protocol import EngineInfo, EngineStats
from metainfer.server.metrics_facts import end, op_counts, planned_bytes
from metainfer.server.recent import SAMPLE_S, WINDOW_S, Percentiles, Sample
from metainfer.server.state import ServerState

OVER_PLAN = 1.01
"""Bytes held over bytes planned from which the ledger is wrong, and the page says so."""


class Latency(msgspec.Struct, frozen=True):
    """Over the last `window_s` seconds."""

    window_s: float
    first_token: Percentiles
    inter_token: Percentiles
    queue: Percentiles


class Cache(msgspec.Struct, frozen=True):
    """`tokens`: what fits; `used`: fraction of pages; the rest is counted since the start."""

    tokens: int | None
    used: float
    query_tokens: int
    hit_tokens: int
    hit_rate: float | None


class Drafts(msgspec.Struct, frozen=True):
    """`method` is None until the plan is known, ``off`` without speculation."""

    method: str | None
    depth: int | None
    drafted: int
    accepted: int
    acceptance: float | None


class Pool(msgspec.Struct, frozen=True):
    """Memory of one kind of the plan's ledger, as planned and as counted after the start."""

    pool: str
    planned_bytes: int | None
    held_bytes: int | None


class Link(msgspec.Struct, frozen=True):
    """One link as read at the start. Ends are device numbers or ``host``."""

    source: str
    target: str
    kind: str | None
    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None
    bytes_s: float | None
    peer_read: bool | None
    peer_write: bool | None


class StartPhase(msgspec.Struct, frozen=True):
    name: str
    seconds: float


class Alarm(msgspec.Struct, frozen=True):
    """`code` is a stable word, `text` for people."""

    code: str
    text: str


class PageStatus(msgspec.Struct, frozen=True):
    """Counters count since the start; `now` and the samples' times are seconds since 1970.

    `history`: samples later than the request's ``since``, one every `sample_s` seconds, at most
    ten minutes. `links` is None where no engine has told; empty where none lies between.
    """

    version: str
    now: float
    started: float
    sample_s: float
    models: list[str]
    status: str
    phase: str
    plan_fingerprint: str | None
    max_context: int | None
    max_running: int | None
    max_pending: int
    pending: int
    running: int
    waiting: int
    steps: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    longest_decode_gap_s: float
    requests: dict[str, int]
    admission_rejections: int
    latency: Latency
    cache: Cache
    drafts: Drafts
    memory: list[Pool]
    links: list[Link] | None
    ops: dict[str, int] | None
    start_phases: list[StartPhase]
    alarms: list[Alarm]
    history: list[Sample]


def page_status(state: ServerState, since: float = 0.0) -> PageStatus:
    """The document of now; `since` cuts the history."""
    stats, info, metrics = state.client.stats, state.info, state.metrics
    return PageStatus(
        version=metainfer.__version__,
        now=round(time.time(), 3),
        started=float(state.created),
        sample_s=SAMPLE_S,
        models=list(state.config.served),
        status=state.status,
        phase=state.phase if info else getattr(state.client, "phase", state.phase),
        plan_fingerprint=state.fingerprint or None,
        max_context=None if info is None else info.max_context,
        max_running=None if info is None else info.max_running,
        max_pending=state.config.max_pending,
        pending=state.pending,
        running=stats.running,
        waiting=stats.waiting,
        steps=stats.steps,
        preemptions=stats.preemptions,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
        longest_decode_gap_s=stats.longest_decode_gap_s,
        requests=dict(metrics.outcomes),
        admission_rejections=metrics.admission_rejections,
        latency=Latency(
            WINDOW_S,
            metrics.recent_first_token.percentiles(),
            metrics.recent_token_gap.percentiles(),
            metrics.recent_queue.percentiles(),
        ),
        cache=Cache(
            None if info is None else info.kv_tokens,
            stats.kv_used,
            stats.cache_query_tokens,
            stats.cache_hit_tokens,
            _share(stats.cache_hit_tokens, stats.cache_query_tokens),
        ),
        drafts=_drafts(info, stats),
        memory=[] if info is None else pools(info),
        links=None if info is None else links(info),
        ops=None if info is None else op_counts(info),
        start_phases=_phases(state),
        alarms=list(alarms(state)),
        history=state.history.since(since),
    )


def _phases(state: ServerState) -> list[StartPhase]:
    """Those that ended, also while others are still to come."""
    if state.info is not None:
        return [StartPhase(name, seconds) for name, seconds in state.info.start_phases]
    ended = getattr(state.client, "progress", ())
    return [StartPhase(each.phase, each.seconds) for each in ended]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _drafts(info: EngineInfo | None, stats: EngineStats) -> Drafts:
    plan: dict[str, Any] = {} if info is None else info.plan.get("plan", {})
    chosen = plan.get("draft", {})
    return Drafts(
        chosen.get("method"),
        chosen.get("depth"),
        stats.drafted_tokens,
        stats.accepted_drafts,
        _share(stats.accepted_drafts, stats.drafted_tokens),
    )


def pools(info: EngineInfo) -> list[Pool]:
    """Every pool that is planned or counted, in the ledger's order."""
    planned = planned_bytes(info)
    names = list(dict.fromkeys([*planned, *info.held_bytes]))
    return [Pool(name, planned.get(name), info.held_bytes.get(name)) for name in names]


def links(info: EngineInfo) -> list[Link]:
    """The links that were read, with names for their ends."""
    return [
        Link(
            end(link.source),
            end(link.target),
            link.kind,
            link.generation,
            link.width,
            link.max_generation,
            link.max_width,
            link.bytes_s,
            link.peer_read,
            link.peer_write,
        )
        for link in info.links
    ]


def alarms(state: ServerState) -> Iterator[Alarm]:
    """What an operator should look at now, worst first."""
    stats, info = state.client.stats, state.info
    if state.status not in ("starting", "ready"):
        yield Alarm(state.status, state.reason)
    if state.emulated:
        yield Alarm("emulated", f"Answers mean nothing: {state.emulated}, its peers a stand-in.")
    if state.restarts.count:
        yield Alarm(
            "restarted", f"The engine died and was started again: {state.restarts.count} x."
        )
    if stats.draft_alarm:
        yield Alarm("drafts", f"Speculation: {stats.draft_alarm}.")
    for text in stats.cache_alarms:
        yield Alarm("prefix_cache", f"Prefix cache: {text}.")
    if stats.non_finite:
        yield Alarm("non_finite", f"{stats.non_finite} requests met NaN or infinity.")
    if stats.abandoned_steps:
        yield Alarm("memory_short", f"Memory did not suffice for {stats.abandoned_steps} steps.")
    if info is None:
        return
    counts = op_counts(info)
    if counts["reference"]:
        yield Alarm(
            "reference_ops",
            f"{counts['reference']} of {sum(counts.values())} ops run on a reference path; "
            "metainfer doctor says why.",
        )
    for pool in pools(info):
        if pool.planned_bytes and (pool.held_bytes or 0) > OVER_PLAN * pool.planned_bytes:
            more = (pool.held_bytes or 0) - pool.planned_bytes
            yield Alarm("memory", f"{pool.pool} holds {more:,} B more than was planned.")
    for link in info.links:
        if link.width and link.max_width and link.width < link.max_width:
            yield Alarm(
                "link_width",
                f"The link {end(link.source)} to {end(link.target)} runs x{link.width} of "
                f"x{link.max_width}.",
            )
    lost = state.metrics.spans().get("lost", 0)
    if lost:
        yield Alarm("traces", f"{lost} spans could not be handed to the collector.")
