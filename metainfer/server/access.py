"""Who may call a route, and the outer checks of every request. Deny by default.

Every route declares its level in `LEVELS`; a path that is not there needs the key, also when it
does not exist. A test walks the route table and finds undeclared routes.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from enum import StrEnum
from typing import Any

from metainfer.core.errors import RequestError
from metainfer.server.errors import error_response, internal
from metainfer.server.state import ServerConfig

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Level(StrEnum):
    """PUBLIC: anyone who reaches the port. USER: whoever presents the API key."""

    PUBLIC = "public"
    USER = "user"


LEVELS: dict[str, Level] = {
    "/health": Level.PUBLIC,
    "/health/live": Level.PUBLIC,
    "/health/ready": Level.PUBLIC,
    "/ready": Level.PUBLIC,
    "/metrics": Level.USER,
    "/plan": Level.USER,
    "/openapi.json": Level.USER,
    "/tokenize": Level.USER,
    "/detokenize": Level.USER,
    "/v1/models": Level.USER,
    "/v1/models/{model_id:path}": Level.USER,
    "/v1/chat/completions": Level.USER,
    "/v1/completions": Level.USER,
}

_PUBLIC = frozenset(path for path, level in LEVELS.items() if level is Level.PUBLIC)


class Gate:
    """Outermost ASGI layer: request id, header count, API key, and the last stop of faults."""

    def __init__(self, app: Any, config: ServerConfig) -> None:
        self.app = app
        self._config = config
        self._key = config.api_key.encode() if config.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _is_plain(given) else uuid.uuid4().hex.encode()
        scope["metainfer.request_id"] = request_id.decode()

        started = False

        async def tagged(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            self._check(scope, headers)
        except RequestError as error:
            await error_response(error)(scope, receive, tagged)
            return
        try:
            await self.app(scope, receive, tagged)
        except Exception as error:  # noqa: BLE001 - the last stop: log, answer, go on
            failure = internal(error, request_id.decode())
            if not started:
                await error_response(failure)(scope, receive, tagged)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if len(scope["headers"]) > self._config.max_headers:
            raise RequestError(
                f"{len(scope['headers'])} headers are sent, "
                f"at most {self._config.max_headers} may be.",
                status=431,
                code="too_many_headers",
            )
        if self._key is not None and scope["path"] not in _PUBLIC:
            self._check_key(headers.get(b"authorization", b""))

    def _check_key(self, header: bytes) -> None:
        scheme, _, key = header.partition(b" ")
        valid = hmac.compare_digest(key.strip(), self._key or b"")
        if scheme.lower() != b"bearer" or not valid:
            raise RequestError(
                "The API key is missing or wrong.",
                "Send the header 'Authorization: Bearer KEY'.",
                status=401,
                error_type="authentication_error",
                code="invalid_api_key",
            )


def _is_plain(value: bytes) -> bool:
    return 0 < len(value) <= 128 and all(0x21 <= byte <= 0x7E for byte in value)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body of a JSON request.

    Raises:
        RequestError: 415 for another content type, 413 beyond `limit` bytes.
    """
    headers = dict(scope["headers"])
    media = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    # Not only tidiness: a web page cannot send this type to a loopback server unasked.
    if media != b"application/json" and not media.endswith(b"+json"):
        raise RequestError(
            f"The content type is {media.decode('latin-1')[:100] or 'missing'}.",
            "Send the header 'Content-Type: application/json'.",
            status=415,
            code="unsupported_media_type",
        )
    length = headers.get(b"content-length", b"")
    parts: list[bytes] = []
    size = int(length) if length.isdigit() else 0
    more = size <= limit
    size = 0 if more else size
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("The client left while sending.", status=400, code="disconnected")
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        more = message.get("more_body", False) and size <= limit
    if size > limit:
        raise RequestError(
            f"The body exceeds {limit} bytes.",
            "Send less, or raise --max-body.",
            status=413,
            code="body_too_large",
        )
    return b"".join(parts)
