"""Who may call a route, and the outer checks of every request. Deny by default.

Every route declares its level in `LEVELS`; a path that is not there needs the key, also when it
does not exist. A test walks the route table and finds undeclared routes.

Keys are compared as digests of equal length, against every configured key, so that the time taken
says nothing about them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from enum import StrEnum
from functools import cache
from typing import Any

from metainfer.core.errors import RequestError
from metainfer.server import deadline
from metainfer.server.errors import error_response, internal, speaks_anthropic
from metainfer.server.state import ServerConfig
from metainfer.server.tracing import incoming

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Level(StrEnum):
    """PUBLIC: anyone who reaches the port. USER: whoever presents an API key, when there is one.

    ADMIN: whoever presents the admin key; without one configured nobody, not even an API key.
    """

    PUBLIC = "public"
    USER = "user"
    ADMIN = "admin"


LEVELS: dict[str, Level] = {
    "/health": Level.PUBLIC,
    "/health/live": Level.PUBLIC,
    "/health/ready": Level.PUBLIC,
    "/ready": Level.PUBLIC,
    "/": Level.PUBLIC,
    "/page/house.css": Level.PUBLIC,
    "/page/page.css": Level.PUBLIC,
    "/page/icon.svg": Level.PUBLIC,
    "/page/page.js": Level.PUBLIC,
    "/page/api.js": Level.PUBLIC,
    "/page/charts.js": Level.PUBLIC,
    "/page/chat.js": Level.PUBLIC,
    "/page/dom.js": Level.PUBLIC,
    "/page/events.js": Level.PUBLIC,
    "/page/now.js": Level.PUBLIC,
    "/page/plan.js": Level.PUBLIC,
    "/page/status": Level.USER,
    "/metrics": Level.USER,
    "/plan": Level.USER,
    "/debug/report": Level.ADMIN,
    "/openapi.json": Level.USER,
    "/tokenize": Level.USER,
    "/detokenize": Level.USER,
    "/v1/models": Level.USER,
    "/v1/models/{model_id:path}": Level.USER,
    "/v1/chat/completions": Level.USER,
    "/v1/completions": Level.USER,
    "/v1/responses": Level.USER,
    "/v1/messages": Level.USER,
    "/v1/messages/count_tokens": Level.USER,
}


def level_of(path: str) -> Level:
    """The level that a request for `path` needs: as declared; of several templates the strictest;
    USER for a path that no route has."""
    if path in LEVELS:
        return LEVELS[path]
    matching = {LEVELS[template] for template in LEVELS if _matches(template, path)}
    return Level.ADMIN if Level.ADMIN in matching else Level.USER


def _matches(template: str, path: str) -> bool:
    return "{" in template and _pattern(template).fullmatch(path) is not None


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """What Starlette matches for ``{name}`` (one segment) and ``{name:path}`` (any text)."""
    pieces = re.split(r"(\{\w+(?::path)?\})", template)
    wild = {True: ".*", False: "[^/]+"}
    parts = [
        wild[piece.endswith(":path}")] if piece.startswith("{") else re.escape(piece)
        for piece in pieces
    ]
    return re.compile("".join(parts), re.DOTALL)


class Keys:
    """A set of secrets that answers in a time that does not depend on them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, given: bytes) -> bool:
        digest = hashlib.sha256(given).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


class ClientLeftError(Exception):
    """Nobody is there any more to take an answer."""


class Gate:
    """Outermost ASGI layer: request id, header count, API key, and the last stop of faults.

    `emulated`: what every answer says while its peers are a stand-in (``X-Metainfer-Emulated``).
    """

    def __init__(
        self, app: Any, config: ServerConfig, emulated: Callable[[], str] = lambda: ""
    ) -> None:
        self.app = app
        self._config = config
        self._emulated = emulated
        self._users = Keys(config.api_keys)
        self._admins = Keys(config.admin_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self._strip(scope)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _is_plain(given) else uuid.uuid4().hex.encode()
        scope["metainfer.request_id"] = request_id.decode()
        incoming.set((headers.get(b"traceparent", b""), headers.get(b"tracestate", b"")))

        started = False

        async def tagged(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if said := self._emulated():
                    message["headers"].append((b"x-metainfer-emulated", said.encode()))
            try:
                await send(message)
            except RuntimeError as error:
                # uvloop's word for a connection that ended a moment ago
                if "handler is closed" not in str(error):
                    raise
                raise ClientLeftError from error

        try:
            self._check(scope, headers)
        except RequestError as error:
            await error_response(error, scope["path"])(scope, receive, tagged)
            return
        try:
            await self.app(scope, receive, tagged)
        except ClientLeftError:
            return
        except Exception as error:  # noqa: BLE001 - the last stop: log, answer, go on
            failure = internal(error, request_id.decode())
            if not started:
                await error_response(failure, scope["path"])(scope, receive, tagged)

    def _strip(self, scope: Scope) -> None:
        """Take the proxy's path off, where the proxy left it on: levels are of our own paths."""
        root = self._config.root_path
        if root and (scope["path"] + "/").startswith(root + "/"):
            scope["path"] = scope["path"][len(root) :] or "/"
            scope["raw_path"] = scope["path"].encode()

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if len(scope["headers"]) > self._config.max_headers:
            raise RequestError(
                f"{len(scope['headers'])} headers are sent, "
                f"at most {self._config.max_headers} may be.",
                status=431,
                code="too_many_headers",
            )
        self._check_key(level_of(scope["path"]), _key_in(headers, scope["path"]))
        deadline.note(headers)

    def _check_key(self, level: Level, key: bytes) -> None:
        if level is Level.PUBLIC:
            return
        admin = key in self._admins
        user = admin or key in self._users
        if level is Level.ADMIN and not self._admins:
            raise RequestError(
                "This path needs an admin key, and the server was started without one.",
                "Start it with --admin-key KEY.",
                status=403,
                error_type="permission_error",
                code="admin_disabled",
            )
        if level is Level.ADMIN and user and not admin:
            raise RequestError(
                "This path needs the admin key; an API key does not open it.",
                "Send the header 'Authorization: Bearer ADMIN_KEY'.",
                status=403,
                error_type="permission_error",
                code="admin_key_required",
            )
        if admin or (level is Level.USER and (user or not self._users)):
            return
        raise RequestError(
            "The API key is missing or wrong.",
            "Send the header 'Authorization: Bearer KEY'.",
            status=401,
            error_type="authentication_error",
            code="invalid_api_key",
        )


def _key_in(headers: dict[bytes, bytes], path: str) -> bytes:
    """The key that a request presents; empty when there is none. Anthropic's clients send theirs
    in a header of its own."""
    if speaks_anthropic(path) and b"authorization" not in headers:
        return headers.get(b"x-api-key", b"").strip()
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _is_plain(value: bytes) -> bool:
    return 0 < len(value) <= 128 and all(0x21 <= byte <= 0x7E for byte in value)


async def read_body(scope: Scope, receive: Receive, limit: int, within_s: float = 60.0) -> bytes:
    """The body of a JSON request.

    Raises:
        RequestError: 415 for another content type, 413 beyond `limit` bytes, 408 when it takes more
            than `within_s` seconds to arrive.
    """
    try:
        async with asyncio.timeout(within_s):
            return await _read_body(scope, receive, limit)
    except TimeoutError as error:
        raise RequestError(
            f"The body did not arrive within {within_s:g} s.",
            "Send it faster.",
            status=408,
            code="request_timeout",
        ) from error


async def _read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
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
