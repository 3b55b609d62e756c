"""Messages between the server process and the engine process, and the client both faces share.

Text stays on the server's side; the engine knows token ids. Messages are msgpack over a local
socket; the engine's life is watched by the operating system (exit of the child, death signal of
the parent), never by a Python heartbeat that stalls under a compile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from metainfer.core.errors import RequestError
from metainfer.core.request import Request
from metainfer.core.step import RequestOutput
from metainfer.executor.protocol import NanGuard
from metainfer.platform.facts import LinkFacts


class Guards(msgspec.Struct, frozen=True):
    """How closely an engine is watched. Decides nothing of what it computes.

    `nan_guard`: see `NanGuard`. `hang_after_s`: a step that takes longer hangs; 0 = none does.
    `try_limit`: serve a request as long as the plan promises before ready.
    """

    nan_guard: NanGuard = NanGuard.LOGITS
    hang_after_s: float = 120.0
    try_limit: bool = False


class EngineInfo(msgspec.Struct, frozen=True):
    """What the server must know to validate and tokenise, sent once with `Ready`.

    `plan` is the JSON of the resolved plan (the body of ``/plan``); `model` the reference, from
    which the server opens the tokenizer.
    """

    model: str
    vocab_size: int
    max_context: int
    kv_tokens: int
    max_running: int
    eos_token_ids: tuple[int, ...]
    plan: dict[str, Any]
    start_phases: tuple[tuple[str, float], ...] = ()  # (name, seconds)
    held_bytes: dict[str, int] = {}  # by kind of the plan's ledger, as in fact held
    links: tuple[LinkFacts, ...] = ()  # as read off the machine

    @property
    def grammar_library(self) -> str:
        """The plan's grammar library (`grammar.backends`)."""
        return str(self.plan.get("plan", self.plan).get("grammar", "llguidance"))


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and counters after a step; counters only grow."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0  # fraction of pages in use
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    longest_decode_gap_s: float = 0.0
    last_step_s: float = 0.0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    draft_alarm: str = ""  # why speculation looks broken, empty when it does not
    running_adapters: tuple[str, ...] = ()  # names that running requests ask for
    waiting_adapters: tuple[str, ...] = ()
    draft_depth: int = 0  # drafts that the latest step asked for
    draft_gain: float | None = None  # tokens per second over none, where the depth follows it
    cache_alarms: tuple[str, ...] = ()  # why the prefix cache looks broken
    non_finite: int = 0  # requests that met NaN or infinity
    abandoned_steps: int = 0  # steps for which memory did not suffice
    overlapped_steps: int = 0  # launched before the step ahead of them was read
    step_waits: dict[str, int] = {}  # steps that had to wait for the one ahead, by reason
    step_draws: dict[str, int] = {}  # draws behind captured steps, by how they were launched
    emulated_calls: int = 0  # collectives of which all peers were a stand-in
    emulated_wait_s: float = 0.0  # seconds in them, none of which overlapped with compute


# -- server to engine ------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    requests: tuple[Request, ...]


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_ids: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave after the running requests (`drain`), or at once."""

    drain: bool = True


ToEngine = Submit | Cancel | Stop

# -- engine to server ------------------------------------------------------------------------------


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A start-up phase began (`seconds` None) or ended."""

    phase: str
    seconds: float | None = None
    detail: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: tuple[RequestOutput, ...]
    stats: EngineStats


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """One request was refused by the scheduler; the fields of a `RequestError`."""

    request_id: str
    status: int
    cause: str
    remedy: str
    code: str
    param: str | None = None
    error_type: str = "invalid_request_error"
    retry_after_s: float | None = None


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """Something broke and the engine goes on; `text` holds nothing of a user's."""

    kind: str
    text: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot go on (or cannot start): one line of cause, one of remedy."""

    cause: str
    remedy: str
    code: str
    exit_code: int = 1
    body: dict[str, Any] = {}


FromEngine = Progress | Ready | Outputs | Rejected | Fault | Failed


def rejected(request_id: str, error: RequestError) -> Rejected:
    """The message that carries `error` to the other side."""
    return Rejected(
        request_id,
        error.status,
        error.cause,
        error.remedy,
        error.code,
        error.param,
        error.error_type,
        error.retry_after_s,
    )


class EngineClient(Protocol):
    """What server, `generate`, `chat` and `bench` talk to; in-process and two-process alike."""

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready.

        Raises:
            UserError: the engine refused to start; cause and remedy are its own.
        """
        ...

    def submit(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Stream `RequestOutput` until one has `finish` set. Leaving the iterator cancels.

        Raises:
            RequestError: the scheduler refused the request, or the engine died (status 503,
                code ``engine_dead``).
        """
        ...

    async def cancel(self, request_ids: Sequence[str]) -> None: ...

    def abort(self, request_ids: Sequence[str], error: RequestError) -> None:
        """End requests in the engine; their streams raise `error` after what they hold already."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def alive(self) -> bool: ...

    @property
    def phase(self) -> str: ...

    async def close(self, *, drain: bool = True, grace_s: float = 30.0) -> None: ...
