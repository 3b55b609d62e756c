"""How long a request may take: ``X-Request-Timeout`` (seconds), else ``--request-timeout``.

When the time is over the engine drops the request and the client learns it: a 504 where nothing was
sent yet, else an event, and no ``[DONE]``. The time counts from the request's arrival. It is kept
in the request's context, so that every dialect has it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING

from metainfer.core.errors import RequestError

if TYPE_CHECKING:
    from metainfer.server.prepare import Job
    from metainfer.server.state import ServerState

HEADER = "x-request-timeout"
MOST_S = 86_400.0

_asked: ContextVar[float | None] = ContextVar("request_timeout_s", default=None)


def note(headers: Mapping[bytes, bytes]) -> None:
    """Keep what the header asks for, for this request.

    Raises:
        RequestError: 400; it is no number of seconds above 0 and up to a day.
    """
    given = headers.get(HEADER.encode())
    if given is None:
        _asked.set(None)
        return
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_S:
        raise RequestError(
            f"The header {HEADER} is {given[:40].decode('latin-1')!r}.",
            f"Send seconds, above 0 and up to {MOST_S:g}.",
            param=HEADER,
        )
    _asked.set(seconds)


def arm(state: ServerState, job: Job) -> asyncio.TimerHandle | None:
    """A timer that ends the job's requests when their time is over; None where there is no limit.

    Raises:
        RequestError: 504, it is over already.
    """
    default = state.config.request_timeout_s
    asked = _asked.get()
    limit = min(filter(None, (asked, default)), default=None)
    if limit is None:
        return None
    over = RequestError(
        f"The request was not done within {limit:g} s.",
        f"Allow more with the header {HEADER}."
        if limit != default
        else "Ask for fewer tokens; the server allows no more (--request-timeout).",
        status=504,
        error_type="server_error",
        code="deadline_exceeded",
    )
    left = limit - (perf_counter() - job.arrived)
    if left <= 0:
        raise over
    ids = [choice.request.request_id for choice in job.choices]
    loop = asyncio.get_running_loop()
    # A turn later: a timer that is due at once would come before the choices are with the client.
    return loop.call_later(left, loop.call_soon, state.client.abort, ids, over)
