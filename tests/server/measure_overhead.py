"""CPU time of the server process per streamed token: ``measure_overhead.py [STREAMS] [TOKENS]``.

The fake engine sends one token per stream and step; the time is the server's own user and system
time, so that client and engine, which share the machine, do not count.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import threading
from pathlib import Path

from fake_server import chat_body, fake_server


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_stream(port: int, number: int, tokens: int) -> None:
    body = json.dumps(chat_body(f"stream {number}", stream=True, max_tokens=tokens)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        last = b""
        while not last.endswith(b"0\r\n\r\n"):
            part = connection.recv(65536)
            if not part:
                raise SystemExit("the server closed a stream")
            last = (last + part)[-16:]


def main() -> None:
    streams = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    with fake_server() as running:
        found = []
        for _ in range(6):
            begin = cpu_seconds(running.process.pid)
            threads = [
                threading.Thread(target=read_stream, args=(running.port, number, tokens))
                for number in range(streams)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            used = cpu_seconds(running.process.pid) - begin
            found.append(used / (streams * tokens) * 1e6)
    kept = found[1:]  # the first warms up
    middle = statistics.median(kept)
    spread = statistics.median(abs(value - middle) for value in kept)
    print(
        f"{streams} streams of {tokens} tokens: {middle:.1f} us of server CPU per token "
        f"(mad {spread:.1f}, n {len(kept)})"
    )


if __name__ == "__main__":
    main()
