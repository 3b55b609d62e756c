"""What every handler shares: the engine client, the model's text side, limits, life cycle."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metainfer.core.digest import digest
from metainfer.core.errors import RequestError
from metainfer.core.intent import MAX_PENDING
from metainfer.engine.protocol import EngineClient, EngineInfo
from metainfer.server.bounds import Bounds
from metainfer.server.journal import Journal
from metainfer.server.recent import History
from metainfer.server.restarts import Restarts

if TYPE_CHECKING:
    from metainfer.engine.model_text import TextTools
    from metainfer.server.metrics import Metrics
    from metainfer.server.reply import KeepAlive
    from metainfer.server.tracing import Traces


_RATE_S = 60.0
"""How long an ended generation counts for the rate at which places become free."""


_CODES = {"starting": "loading", "restarting": "engine_dead"}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Limits and switches of one server. Sizes in bytes, times in seconds.

    `adapters`: name -> folder of each, a model name of its own. `api_keys` open the routes of
    level USER (none: anyone), `admin_keys` all routes (none: nobody opens those of level
    ADMIN). `cors_origins`: pages that may call. `root_path`: under which a proxy shows the
    server. `max_pending` bounds choices that are queued or running; more get 429
    ``queue_full``. `bounds`: of requests. `body_s`: in which a body must be here.
    `request_timeout_s`: of requests that name none. `higher_first`: a higher priority runs
    first. `stall_s`: with work at hand and no step for this long, the server is not ready.
    `vllm_metrics` adds vLLM's names to ``/metrics``. `max_restarts` of a dead engine, within
    ten minutes. `otlp_endpoint`: URL of a collector of traces.
    """

    model_names: tuple[str, ...]
    adapters: Mapping[str, str] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    root_path: str = ""
    max_body_bytes: int = 4 * 2**20
    max_headers: int = 256
    max_pending: int = MAX_PENDING
    bounds: Bounds = field(default_factory=Bounds)
    body_s: float = 60.0
    request_timeout_s: float | None = None
    higher_first: bool = False
    keep_alive_s: float = 15.0
    drain_grace_s: float = 30.0
    stall_s: float = 120.0
    vllm_metrics: bool = False
    max_restarts: int = 0
    otlp_endpoint: str | None = None

    @property
    def served(self) -> tuple[str, ...]:
        """Every name that a request may ask for."""
        return (*self.model_names, *self.adapters)


@dataclass(slots=True)
class ServerState:
    """Mutable state of the process; touched by the event loop only."""

    config: ServerConfig
    client: EngineClient
    metrics: Metrics
    keep_alive: KeepAlive
    history: History = field(default_factory=History)
    traces: Traces | None = None
    info: EngineInfo | None = None
    text: TextTools | None = None
    fingerprint: str = ""
    phase: str = "starting"
    draining: bool = False
    restarting: str = ""  # why the engine is being started again
    back_at: float = 0.0  # when it should be ready again (monotonic seconds)
    restarts: Restarts = field(default_factory=lambda: Restarts(0))
    journal: Journal = field(default_factory=Journal)
    pending: int = 0
    ended: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=256))
    busy_since: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))

    def engine_ready(self, info: EngineInfo, text: TextTools) -> None:
        """The engine said `Ready`: requests are welcome."""
        plan = info.plan.get("plan", info.plan)
        self.fingerprint = str(plan.get("fingerprint") or digest(plan))
        self.metrics.info, self.metrics.fingerprint = info, self.fingerprint
        self.text = text
        self.info = info
        self.phase = "ready"

    @property
    def emulated(self) -> str:
        """Whose rank answers while its peers are a stand-in, so that no answer means anything;
        empty where answers are real."""
        plan = self.info.plan.get("plan", {}) if self.info is not None else {}
        said = plan.get("emulated") or {}
        return "rank {rank} of {ranks} of {machine}".format(**said) if said else ""

    @property
    def status(self) -> str:
        """One word: ``starting``, ``ready``, ``draining``, ``stalled``, ``restarting`` or
        ``engine_dead``."""
        if self.info is None:
            return "starting"
        if self.restarting:
            return "restarting"
        if not self.client.alive:
            return "engine_dead"
        if self.draining:
            return "draining"
        return "stalled" if self.hung or self.silent_s > self.config.stall_s else "ready"

    @property
    def hung(self) -> str:
        """The step that hangs, if one does."""
        return str(getattr(self.client, "hung", ""))

    @property
    def silent_s(self) -> float:
        """Seconds for which work was at hand and no step's results came; idle is not silence."""
        if not self.pending:
            return 0.0
        heard = getattr(self.client, "last_heard", self.busy_since)
        return time.monotonic() - max(heard, self.busy_since)

    @property
    def reason(self) -> str:
        """Why the status is what it is, in one sentence."""
        phase = getattr(self.client, "phase", "")
        causes = {
            "starting": f"The model is still loading ({self.phase}).",
            "ready": "Requests are served.",
            "draining": "The server is shutting down and takes no new requests.",
            "engine_dead": "The engine process ended.",
            "restarting": f"The engine ended ({self.restarting}) and is started again ({phase}).",
            "stalled": f"The engine hangs: {self.hung}."
            if self.hung
            else f"The engine has given no result for {self.silent_s:.0f} s.",
        }
        return causes[self.status]

    @property
    def _back_in_s(self) -> float:
        """Seconds until the engine should be back; 5 when it should have been by now."""
        left = self.back_at - time.monotonic()
        return max(left, 1.0) if left > 0 else 5.0

    def priority(self, given: int | None) -> int:
        """The scheduler's priority, in which lower runs first."""
        return -(given or 0) if self.config.higher_first else given or 0

    def opened(self, choices: int) -> None:
        """`choices` generations begin."""
        if not self.pending:
            self.busy_since = time.monotonic()
        self.pending += choices

    def closed(self, choices: int) -> None:
        """`choices` generations are over."""
        self.pending -= choices
        self.ended.append((time.monotonic(), choices))

    def retry_after_s(self, choices: int) -> float:
        """Seconds until `choices` places are free, at the rate at which the latest became free;
        from 1 to 60, and 5 where nothing was measured yet."""
        now = time.monotonic()
        recent = [(at, count) for at, count in self.ended if now - at < _RATE_S]
        if len(recent) < 2:
            return 5.0
        freed = sum(count for _, count in recent)
        return min(max(choices * (now - recent[0][0]) / freed, 1.0), 60.0)

    def serving(self) -> tuple[EngineInfo, TextTools]:
        """The model's facts and text side.

        Raises:
            RequestError: 503 while starting, draining or after the engine's death.
        """
        status = self.status
        if status == "ready" and self.info is not None and self.text is not None:
            return self.info, self.text
        raise RequestError(
            self.reason,
            "Send the request again later.",
            status=503,
            error_type="server_error",
            code=_CODES.get(status, status),
            retry_after_s=self._back_in_s if self.restarting else 5.0,
        )

    def admit(self, choices: int) -> None:
        """Refuse when `choices` more would exceed the queue bound (429 ``queue_full``)."""
        if self.pending + choices > self.config.max_pending:
            self.metrics.admission_rejections += 1
            raise RequestError(
                f"{self.pending} generations are queued or running, "
                f"at most {self.config.max_pending} may be.",
                "Send the request again later, or raise --max-pending.",
                status=429,
                error_type="rate_limit_error",
                code="queue_full",
                retry_after_s=self.retry_after_s(self.pending + choices - self.config.max_pending),
            )
