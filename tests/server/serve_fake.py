"""A real server process over the fake engine: ``serve_fake.py PORT [--key K ...] -- ENGINE ARGS``.

Prints one JSON line with its URL and the engine's process id when it is ready.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fake_texts import TEXTS

from metainfer.core.errors import UserError
from metainfer.core.intent import Intent
from metainfer.engine.client import ProcessClient
from metainfer.server.bounds import Bounds
from metainfer.server.run import Lifecycle, bind, bind_unix, describe, run, tls_context
from metainfer.server.state import ServerConfig

FAKE = Path(__file__).with_name("fake_engine.py")


async def serve(options: argparse.Namespace, engine: list[str]) -> int:
    from metainfer.server.app import new_state

    listener = bind_unix(options.uds) if options.uds else bind("127.0.0.1", options.port)
    tls = tls_context(options.cert, None)
    client = ProcessClient(Intent(model="fake"), command=[sys.executable, str(FAKE), *engine])
    config = ServerConfig(
        ("fake", "alias"),
        api_keys=tuple(options.key),
        admin_keys=tuple(options.admin_key),
        max_pending=options.max_pending,
        keep_alive_s=options.keep_alive,
        drain_grace_s=options.grace,
        stall_s=options.stall,
        vllm_metrics=options.vllm_metrics,
        otlp_endpoint=options.otlp,
        bounds=Bounds({name: int(n) for name, _, n in (x.partition("=") for x in options.limit)}),
        request_timeout_s=options.request_timeout,
        body_s=options.body_timeout,
        higher_first=options.higher_first,
        cors_origins=tuple(options.cors),
        root_path=options.root_path,
    )
    state = new_state(config, client)

    def ready(info: object) -> None:
        url = describe(listener, secure=tls is not None)
        print(json.dumps({"url": url, "engine": client.pid}), flush=True)

    print(json.dumps({"url": describe(listener), "engine": -1}), flush=True)
    life = Lifecycle(
        state,
        listener,
        load_text=lambda info: TEXTS[options.text](info.vocab_size),
        on_ready=ready,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        tls=tls,
    )
    return await life.run()


def main() -> int:
    own, engine = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, engine = own[:split], own[split + 1 :]
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--admin-key", action="append", default=[])
    parser.add_argument("--max-pending", type=int, default=1024)
    parser.add_argument("--keep-alive", type=float, default=15.0)
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("--stall", type=float, default=120.0)
    parser.add_argument("--limit", action="append", default=[])
    parser.add_argument("--request-timeout", type=float)
    parser.add_argument("--body-timeout", type=float, default=60.0)
    parser.add_argument("--higher-first", action="store_true")
    parser.add_argument("--cors", action="append", default=[])
    parser.add_argument("--root-path", default="")
    parser.add_argument("--uds", type=Path)
    parser.add_argument("--cert", type=Path)
    parser.add_argument("--vllm-metrics", action="store_true")
    parser.add_argument("--otlp")
    parser.add_argument("--text", choices=list(TEXTS), default="bytes")
    try:
        return run(serve(parser.parse_args(own), engine))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
