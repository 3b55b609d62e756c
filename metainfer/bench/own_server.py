"""A server of our own for a measurement: started, waited for, ended whatever happens."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from metainfer.bench.client import Server
from metainfer.core.errors import UserError

START_S = 900.0
"""Until a server that is still loading is given up."""
END_S = 60.0


@contextmanager
def own_server(words: Sequence[str], log: Callable[[str], None]) -> Iterator[Server]:
    """``metainfer serve`` with `words`, ready, on a free port of this host.

    Raises:
        UserError: it did not become ready; the cause is what it printed last.
    """
    port = _free_port()
    command = [sys.executable, "-m", "metainfer.cli.main", "serve", *words]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    log(f"starting a server on port {port}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        server = Server("127.0.0.1", port)
        _wait(process, server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], server: Server) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise UserError(
                f"the server ended with exit code {process.returncode} before it was ready.",
                "See its lines above.",
                code="server_ended",
            )
        try:
            asyncio.run(server.get("/ready"))
        except UserError:
            time.sleep(0.2)
        else:
            return
    raise UserError(f"the server was not ready within {START_S:.0f} s.", code="server_slow")
