"""``metainfer serve``: the OpenAI-compatible server over an engine process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from metainfer.cli import output, settings
from metainfer.cli.flags import NO_FLAGS, Adapters, EngineFlags, Json, RankMachine
from metainfer.cli.output import Result
from metainfer.cli.server_flags import NO_SERVER_FLAGS, ServerFlags
from metainfer.core.errors import UsageError
from metainfer.core.intent import MAX_PENDING

if TYPE_CHECKING:
    from pathlib import Path

    from metainfer.core.intent import Intent
    from metainfer.engine.model_text import TextTools
    from metainfer.engine.protocol import EngineClient, EngineInfo
    from metainfer.server.state import ServerConfig


def serve(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    server: ServerFlags = NO_SERVER_FLAGS,
    engine: EngineFlags = NO_FLAGS,
    adapter: Adapters = (),
    machine: RankMachine = None,
    as_json: Json = False,
) -> Result:
    """Serve MODEL over HTTP. Ctrl-C drains; a second one stops at once.

    Example: metainfer serve smollm2-135m --port 8000
    """
    intent = engine.intent(model, adapter, machine)
    config = replace(server.config(model), adapters=intent.adapters)
    _check_names(config)
    if config.max_pending != MAX_PENDING:
        intent = replace(intent, max_waiting=config.max_pending)
    from metainfer.server.run import run

    return Result(code=run(_serve(intent, config, server)))


def _check_names(config: ServerConfig) -> None:
    """Refuse an adapter with a name of the model itself."""
    shared = [name for name in config.adapters if name in config.model_names]
    if shared:
        raise UsageError(
            f"--adapter gives {shared[0]!r}, which is a name of the model itself.",
            "Give the adapter another name.",
        )


async def _serve(intent: Intent, config: ServerConfig, flags: ServerFlags) -> int:
    import sys

    from metainfer.cli import start_screen
    from metainfer.cli.clients import Screen, make_client
    from metainfer.server.app import new_state
    from metainfer.server.run import Lifecycle, describe, tls_context

    tls = tls_context(flags.ssl_certfile, flags.ssl_keyfile)
    listener = flags.bind()  # first, so that a clash is told before minutes of loading
    out = output.current
    screen = Screen(sys.stderr if out.as_json else sys.stdout)
    screen.lines(start_screen.opening(intent.model, settings.current))
    url = describe(listener, secure=tls is not None) + config.root_path

    def renew() -> EngineClient:
        return make_client(intent, screen, flags.guards())

    state = new_state(config, renew())

    def ready(info: EngineInfo) -> None:
        screen.lines(start_screen.summary(info, url, config.served))
        if not config.api_keys and flags.exposed:
            screen.line("  warning: no --api-key, and the address is reachable from other machines")
        if out.as_json:
            out.document(_ready_document(info, url, config, state.fingerprint))

    def text(info: EngineInfo) -> TextTools:
        return _load_text(info, flags.chat_template)

    life = Lifecycle(
        state, listener, load_text=text, on_ready=ready, say=screen.line, tls=tls, renew=renew
    )
    return await life.run()


def _load_text(info: EngineInfo, chat_template: Path | None) -> TextTools:
    from metainfer.engine.model_text import load_text

    tools = load_text(info.model, info.vocab_size)
    if chat_template is not None:
        from metainfer.text.chat import ChatTemplate
        from metainfer.text.dialogue import JinjaFormat

        template = ChatTemplate.from_file(chat_template, tools.tokenizer.special_tokens)
        tools = replace(tools, format=JinjaFormat(tools.tokenizer, template))
    expected, found = settings.current.answers, tools.format.markup.name
    if expected and found not in expected:
        raise UsageError(
            f"The parsers that were named read {' or '.join(expected)}; this model's answers are "
            f"of the form {found}.",
            "Leave --tool-call-parser and --reasoning-parser out.",
            code="unsupported_flag",
        )
    return tools


def _ready_document(
    info: EngineInfo, url: str, config: ServerConfig, fingerprint: str
) -> dict[str, object]:
    return {
        "url": url,
        "models": list(config.served),
        "max_context": info.max_context,
        "kv_tokens": info.kv_tokens,
        "max_running": info.max_running,
        "plan_fingerprint": fingerprint,
        "start_phases": [
            {"phase": phase, "seconds": seconds} for phase, seconds in info.start_phases
        ],
    }
