"""Below the application: heads without end, heads that never come, bytes that are no HTTP."""

from __future__ import annotations

import json
import socket

import pytest
from fake_server import Running, call, is_error_body

from metainfer.server import wire


def exchange(port: int, *pieces: bytes, seconds: float = 120.0) -> tuple[int, bytes]:
    """Status and body of the answer to raw bytes; the connection is closed by the server."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as client:
        got = b""
        for piece in pieces:
            client.sendall(piece)
        while chunk := client.recv(65536):
            got += chunk
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"FOO /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    ],
)
def test_what_is_no_http_is_an_openai_error(server: Running, junk: bytes) -> None:
    status, body = exchange(server.port, junk)
    assert status == 400
    assert is_error_body(json.loads(body))


@pytest.mark.parametrize("unit", [b"a" * 65536, b"X: y\r\n" * 10_000])
def test_a_head_without_end_is_refused(server: Running, unit: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: y" + (b"" if b":" not in unit else b"\r\n"))
        sent = 0
        with pytest.raises(OSError):
            while sent < 64 << 20:
                client.sendall(unit)
                sent += len(unit)
    assert sent < 32 << 20
    assert call(server.port, "GET", "/health").status == 200


def test_a_long_head_in_bounds_is_read(server: Running) -> None:
    answer = call(server.port, "GET", "/health", None, {"X-Long": "a" * 30_000})
    assert answer.status == 200


def test_a_head_that_never_comes_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import uvicorn

    monkeypatch.setattr(wire, "HEAD_S", 0.3)

    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("no request came")

    async def run() -> list[bytes]:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=wire.BoundedProtocol, lifespan="off", log_config=None)
        served = uvicorn.Server(config)
        task = asyncio.ensure_future(served.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        found = []
        for opening in (b"", b"GET /health HTTP/1.1\r\nX: "):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(opening)
            found.append(await asyncio.wait_for(reader.read(), 60))
            writer.close()
        served.should_exit = True
        await task
        return found

    for answer in asyncio.run(run()):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "request_timeout"
