"""A small HTTP client for measuring: one request a connection, times taken as bytes arrive.

Only what `bench serve` needs of HTTP/1.1 and server-sent events; asyncio alone, so that the client
takes as little as it can of the machine that it shares with the server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from metainfer.core.errors import UserError

LIMIT = 1 << 22
"""Bytes of the longest line."""

SEE_LOG = "The server's log says why."
"""The remedy where an answer did not come, or not whole."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go. `key`: sent as a bearer token."""

    host: str
    port: int
    root: str = ""
    key: str | None = None

    async def get(self, path: str) -> str:
        """The body of a GET.

        Raises:
            UserError: nothing answers there, or not with 200.
        """
        status, lines = await self._send("GET", path, None)
        body = "\n".join([line.decode() async for line in lines])
        if status != 200:
            raise UserError(
                f"GET {path} answered {status}: {_cause(body)}", SEE_LOG, code="bad_answer"
            )
        return body

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed POST, up to its ``[DONE]``.

        Raises:
            UserError: nothing answers, not with 200, or the stream broke off.
        """
        status, lines = await self._send("POST", path, json.dumps(body).encode())
        if status != 200:
            text = "\n".join([line.decode() async for line in lines])
            raise UserError(
                f"POST {path} answered {status}: {_cause(text)}", SEE_LOG, code="bad_answer"
            )
        async for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise UserError(
                    f"the stream ended: {_cause(data.decode())}", SEE_LOG, code="bad_answer"
                )
            yield event
        raise UserError("the stream broke off.", SEE_LOG, code="bad_answer")

    async def _send(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[int, AsyncIterator[bytes]]:
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, limit=LIMIT)
        except OSError as error:
            raise UserError(
                f"no server answers at {self.host}:{self.port}: {error.strerror or error}.",
                "Start one: metainfer serve MODEL.",
                code="no_server",
            ) from None
        head = [f"{method} {self.root}{path} HTTP/1.1", f"Host: {self.host}", "Connection: close"]
        head += [f"Authorization: Bearer {self.key}"] if self.key else []
        if body is not None:
            head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + (body or b""))
        await writer.drain()
        status = int((await reader.readline()).split()[1:2][0] or 0)
        chunked = False
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            chunked |= name.lower() == "transfer-encoding" and "chunked" in value.lower()
        return status, _lines(reader, writer, chunked)


async def _lines(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chunked: bool
) -> AsyncIterator[bytes]:
    """Lines of a body, as soon as each is whole."""
    held = b""
    try:
        async for piece in _pieces(reader, chunked):
            held += piece
            *whole, held = held.split(b"\n")
            for line in whole:
                yield line
        if held:
            yield held
    finally:
        writer.close()


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while piece := await reader.read(LIMIT):
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0].strip() or b"0", 16):
        try:
            piece = await reader.readexactly(size)
            await reader.readexactly(2)
        except asyncio.IncompleteReadError:
            return
        yield piece


def _cause(body: str) -> str:
    """The message of an OpenAI error, or the beginning of what came instead."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].strip() or "nothing"


def server_at(url: str, key: str | None = None) -> Server:
    """Of ``http://HOST:PORT[/ROOT]``.

    Raises:
        UserError: it is something else.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        raise UserError(
            f"{url!r} is no URL of a server.", "Write http://HOST:PORT.", code="bad_usage"
        )
    return Server(parts.hostname, port, parts.path.rstrip("/"), key)
