"""A server of our own for a measurement: started, waited for, ended whatever happens."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from metainfer.bench.client import Server
from metainfer.core.errors import UserError

START_S = 900.0
"""Until a server that is still loading is given up."""
END_S = 60.0


@contextmanager
def own_server(words: Sequence[str], log: Callable[[str], None]) -> Iterator[Server]:
    """``metainfer serve`` with `words`, ready, on a port of this host that it takes itself.

    Raises:
        UserError: it did not become ready; the cause is what it printed last.
    """
    command = [sys.executable, "-m", "metainfer.cli.main", "serve", *words]
    command += ["--host", "127.0.0.1", "--port", "0", "--json"]
    log("starting a server")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr)
    try:
        yield Server("127.0.0.1", _port(process))
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _port(process: subprocess.Popen[bytes]) -> int:
    """Of the one document that a server prints: once it is ready, or why it never will be."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], START_S)[0]:
        raise UserError(
            f"the server was not ready within {START_S:.0f} s.",
            "Its lines above say in which phase it was.",
            code="server_slow",
        )
    line = process.stdout.readline()
    told = json.loads(line) if line else {}
    if "url" not in told:
        raise UserError(
            f"the server ended with exit code {process.wait()} before it was ready.",
            "See its lines above.",
            code="server_ended",
        )
    port = urlsplit(str(told["url"])).port
    assert port is not None
    return port
