"""How clients come in: HTTPS, a Unix socket, a proxy's path, other origins; slow bodies."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import HERE, call, chat_body, fake_server

from metainfer.core.errors import UserError
from metainfer.server.access import Gate
from metainfer.server.run import bind_unix, tls_context
from metainfer.server.state import ServerConfig

CERT = HERE / "selfsigned.pem"  # for localhost, valid for a hundred years; protects nothing
CHAT = "/v1/chat/completions"


def test_https() -> None:
    with fake_server(["--cert", str(CERT)]) as running:
        assert running.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(CERT))
        connection = http.client.HTTPSConnection("127.0.0.1", running.port, context=context)
        connection.request("POST", CHAT, json.dumps(chat_body("say:ok", stream=True)),
                           {"Content-Type": "application/json"})  # fmt: skip
        assert connection.getresponse().read().rstrip().endswith(b"data: [DONE]")
        with pytest.raises((http.client.HTTPException, OSError)):
            call(running.port, "GET", "/health")  # plain HTTP on a port of HTTPS
        assert running.stop() == 0


@pytest.mark.parametrize("data", [b"", b"no pem", CERT.read_bytes()[:300]])
def test_a_certificate_that_cannot_be_used(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "c.pem").write_bytes(data)
    with pytest.raises(UserError) as caught:
        tls_context(tmp_path / "c.pem", None)
    assert caught.value.code == "bad_certificate"
    with pytest.raises(UserError):
        tls_context(tmp_path / "absent.pem", None)
    assert tls_context(None, None) is None


class UnixConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(self.host)


def test_a_unix_socket_is_its_owners_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "door"
    with fake_server(["--uds", str(path)]) as running:
        assert path.stat().st_mode & 0o777 == 0o600
        connection = UnixConnection(str(path))
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        with pytest.raises(UserError) as caught:
            bind_unix(path)
        assert caught.value.code == "port_in_use"
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
    assert path.is_socket()  # left behind by the killed one
    bind_unix(path).close()
    path.unlink()
    with fake_server(["--uds", str(path)]) as running:
        assert running.stop() == 0
        assert not path.exists()
    path.write_text("somebody's file")
    with pytest.raises(UserError):
        bind_unix(path)
    assert path.read_text() == "somebody's file"


PAGE = "https://page.example"


def test_a_proxys_path_and_pages_of_other_origins() -> None:
    options = ["--root-path", "/llm", "--cors", PAGE, "--key", "k"]
    with fake_server(options) as running:

        def ask(method: str, path: str, **headers: str) -> Any:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return call(running.port, method, path, None, named)

        for path in ("/health", "/llm/health"):  # proxies strip it, or do not
            assert ask("GET", path).status == 200
        for path in ("/v1/models", "/llm/v1/models", "/llm/v1/models/fake", "/llmx/health", "/llm"):
            assert ask("GET", path).status == (200 if path == "/llm" else 401), path
        assert ask("GET", "/llm/v1/models", Authorization="Bearer k").status == 200
        preflight = {"Access_Control_Request_Method": "POST",
                     "Access_Control_Request_Headers": "authorization, content-type"}  # fmt: skip
        asked = ask("OPTIONS", CHAT, Origin=PAGE, **preflight)
        assert asked.status == 200
        assert asked.headers["access-control-allow-origin"] == PAGE
        refused = ask("OPTIONS", CHAT, Origin="https://other.example", **preflight)
        assert refused.status == 400
        assert "access-control-allow-origin" not in refused.headers
        shown = ask("GET", "/v1/models", Origin=PAGE)
        assert shown.status == 401
        assert shown.headers["access-control-allow-origin"] == PAGE  # the page may read why


def test_without_an_allow_list_no_page_may_call(server: Any) -> None:
    headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    answer = call(server.port, "OPTIONS", CHAT, None, headers)
    assert "access-control-allow-origin" not in answer.headers
    assert "access-control-allow-origin" not in call(
        server.port, "GET", "/health", None, {"Origin": PAGE}
    ).headers  # fmt: skip


def test_a_body_that_trickles_is_a_408_and_the_connection_ends() -> None:
    with fake_server(["--body-timeout", "0.5"]) as running:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", running.port), timeout=120) as client:
            client.sendall(f"{head}Content-Length: 5000\r\n\r\n".encode())
            ended = threading.Event()

            def trickle() -> None:
                while not ended.is_set():
                    try:
                        client.sendall(b" ")
                    except OSError:
                        return
                    time.sleep(0.05)

            sender = threading.Thread(target=trickle)
            sender.start()
            received = b""
            try:
                while part := client.recv(65536):
                    received += part
            except ConnectionResetError:
                pass
            ended.set()
            sender.join()
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in received
        assert b"connection: close" in received
        assert call(running.port, "POST", CHAT, chat_body("say:ok")).status == 200


def test_a_client_that_just_left_is_no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def gone(message: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCP>; the handler is closed")

    async def broken(message: Any) -> None:
        raise RuntimeError("Expected ASGI message 'http.response.body'")

    scope = {"type": "http", "path": "/health", "headers": []}
    gate = Gate(inner, ServerConfig(("m",)))
    asyncio.run(gate(scope, None, gone))  # type: ignore[arg-type]
    assert "internal error" not in caplog.text
    asyncio.run(gate(scope, None, broken))  # type: ignore[arg-type]
    assert "internal error" in caplog.text
