"""``/health*``, ``/ready``, ``/metrics``, ``/plan``, ``/v1/models``: the server about itself."""

from __future__ import annotations

from typing import Any

import msgspec

from metainfer.core.errors import RequestError
from metainfer.server.metrics import CONTENT_TYPE
from metainfer.server.prepare import check_model
from metainfer.server.state import ServerState


def _json(body: object, status: int = 200) -> Any:
    from starlette.responses import Response

    headers = {"retry-after": "5"} if status == 503 else None
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


class Health:
    """Handlers over one `ServerState`."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self) -> Any:
        """200 while requests are served, else 503; for probes that know one path."""
        return self._report(self._state.status == "ready")

    async def live(self) -> Any:
        """200 while the process is worth keeping: starting and draining count as alive."""
        return self._report(self._state.status != "engine_dead")

    async def ready(self) -> Any:
        """200 when a request sent now would be served; idle is ready."""
        return self._report(self._state.status == "ready")

    def _report(self, good: bool) -> Any:
        state = self._state
        stats = state.client.stats
        body = {
            "status": state.status,
            "reason": state.reason,
            "ready": state.status == "ready",
            "phase": state.client.phase if state.restarting else state.phase,
            "restarts": state.restarts.count,
            "model": state.config.model_names[0],
            "plan_fingerprint": state.fingerprint or None,
            "pending": state.pending,
            "silent_s": round(state.silent_s, 3),
            "running": stats.running,
            "waiting": stats.waiting,
        }
        if state.emulated:
            body["emulated"] = state.emulated
        return _json(body, 200 if good else 503)

    async def metrics(self) -> Any:
        """The page for Prometheus."""
        from starlette.responses import Response

        return Response(self._state.metrics.page(), headers={"content-type": CONTENT_TYPE})

    async def plan(self) -> Any:
        """The resolved plan: every decision with its origin and its losers."""
        state = self._state
        if state.info is None:
            raise RequestError(
                f"The plan is not decided yet ({state.phase}).",
                "Ask again later.",
                status=503,
                error_type="server_error",
                code="loading",
                retry_after_s=5.0,
            )
        return _json(state.info.plan)

    def _model(self, name: str) -> dict[str, object]:
        info, text, config = self._state.info, self._state.text, self._state.config
        base = info.model if info is not None else config.model_names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._state.created,
            "owned_by": "metainfer",
            "root": config.adapters.get(name, base),
            "parent": config.model_names[0] if name in config.adapters else None,
            "max_model_len": info.max_context if info is not None else None,
            "prompt_format": text.format.describe() if text is not None else None,
        }

    async def models(self) -> Any:
        """The served names: of the model, then of its adapters."""
        names = self._state.config.served
        return _json({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, model_id: str) -> Any:
        """One served name, or 404 ``model_not_found``."""
        check_model(self._state.config, model_id)
        return _json(self._model(model_id))
