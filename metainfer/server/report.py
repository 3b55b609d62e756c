"""``/debug/report``: what this server knows of itself, for `metainfer report`; no user's text."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec

import metainfer
from metainfer.server.state import ServerState

_SECRET = ("api_keys", "admin_keys")


class Report:
    """Handler over one `ServerState`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def report(self) -> Any:
        """Plan, start-up, the engine's last steps, counters, settings, log lines."""
        from starlette.responses import Response

        return Response(
            msgspec.json.encode(self.document()),
            headers={"content-type": "application/json"},
        )

    def document(self) -> dict[str, Any]:
        """The answer as plain data."""
        state, info = self._state, self._state.info
        client: Any = state.client
        flight = getattr(client, "flight", lambda: None)()
        restarts = state.restarts
        return {
            "schema": 1,
            "at": time.time(),
            "version": metainfer.__version__,
            "status": {
                "status": state.status,
                "reason": state.reason,
                "pending": state.pending,
                "silent_s": state.silent_s,
                "restarts": restarts.count,
                "deaths_in_window": restarts.deaths,
                "first_cause": restarts.first_cause.partition(":")[0],
                "last_restart_s": restarts.last_s,
            },
            "settings": _settings(state),
            "plan": None if info is None else info.plan,
            "start_phases": [
                {"phase": step.phase, "seconds": step.seconds}
                for step in getattr(client, "progress", ())
            ],
            "held_bytes": {} if info is None else info.held_bytes,
            "stats": msgspec.to_builtins(client.stats),
            "metrics": state.metrics.page().decode(),
            "flight": flight,
            "log": state.journal.lines(),
        }


def _settings(state: ServerState) -> dict[str, object]:
    """The server's settings; of keys only how many there are."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(state.config):
        value = getattr(state.config, field.name)
        found[field.name] = len(value) if field.name in _SECRET else _plain(value)
    return found


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value)
