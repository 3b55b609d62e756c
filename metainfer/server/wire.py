"""HTTP/1.1 below the application: heads are bounded in size and time, faults are OpenAI errors.

The parser itself reads a head of any length for any time, so that one connection could fill the
memory, and idle ones the table of open files.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from metainfer.core.errors import RequestError

MAX_HEAD_BYTES = 64 * 1024
HEAD_S = 20.0
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a bound on each request's head."""

    _head_bytes = 0
    _in_head = False
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began = self._in_head
        super().data_received(data)
        if began and self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)  # what came with the head's first bytes is not counted
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    431, f"The request's head exceeds {MAX_HEAD_BYTES} bytes.", "headers_too_large"
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._late is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._head_came()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "The request is not valid HTTP/1.1.", "invalid_http")

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(HEAD_S, self._too_late)

    def _head_came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self._refuse(
                408, f"No complete request head came within {HEAD_S:g} s.", "request_timeout"
            )

    def _refuse(self, status: int, cause: str, code: str) -> None:
        body = msgspec.json.encode(RequestError(cause, status=status, code=code).openai_body())
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\n" % (status, _REASONS[status])
        self.transport.write(
            head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body
        )
        self.transport.close()
