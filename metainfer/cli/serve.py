"""``metainfer serve``: the OpenAI-compatible server over an engine process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from metainfer.cli import output
from metainfer.cli.flags import NO_FLAGS, EngineFlags, Json, parse_size
from metainfer.cli.output import Result
from metainfer.core import env
from metainfer.core.errors import UsageError

if TYPE_CHECKING:
    from metainfer.core.intent import Intent
    from metainfer.engine.model_text import TextTools
    from metainfer.engine.protocol import EngineInfo
    from metainfer.server.state import ServerConfig

SERVER = Group("Server", sort_key=1)


def _flag(*names: str, text: str) -> Parameter:
    return Parameter(name=names, help=text, group=SERVER, negative="")


def serve(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    host: Annotated[str, _flag("--host", text="address to listen on")] = "127.0.0.1",
    port: Annotated[int, _flag("--port", text="port; 0 = any free one")] = 8000,
    api_key: Annotated[
        tuple[str, ...],
        _flag(
            "--api-key",
            text="key a request must present (repeatable); better: METAINFER_API_KEY",
        ),
    ] = (),
    admin_key: Annotated[
        tuple[str, ...],
        _flag("--admin-key", text="key of the admin routes (repeatable); none = they are shut"),
    ] = (),
    served_model_name: Annotated[
        tuple[str, ...],
        _flag("--served-model-name", text="name(s) clients use instead of MODEL (repeatable)"),
    ] = (),
    chat_template: Annotated[
        Path | None, _flag("--chat-template", text="Jinja file instead of the model's template")
    ] = None,
    max_pending: Annotated[
        int, _flag("--max-pending", text="generations queued or running; beyond it 429")
    ] = 1024,
    max_body: Annotated[str, _flag("--max-body", text="largest request body")] = "4MiB",
    drain_grace: Annotated[
        float,
        _flag("--drain-grace", text="seconds for running requests at stop"),
    ] = 30.0,
    keep_alive: Annotated[
        float, _flag("--keep-alive", text="seconds until an idle stream gets a comment")
    ] = 15.0,
    metrics_compat: Annotated[
        Literal["vllm"] | None,
        _flag("--metrics-compat", text="also give metrics under the names of: vllm"),
    ] = None,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """Serve MODEL over HTTP. Ctrl-C drains; a second one stops at once.

    Example: metainfer serve smollm2-135m --port 8000
    """
    from metainfer.server.state import ServerConfig

    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port} is no port.", "Pass 0 to 65535.")
    for flag, value in (("--max-pending", max_pending), ("--keep-alive", keep_alive)):
        if value <= 0:
            raise UsageError(f"{flag} is {value:g}.", "Pass a positive number.")
    if drain_grace < 0:
        raise UsageError(f"--drain-grace is {drain_grace:g}.", "Pass 0 or more.")
    config = ServerConfig(
        model_names=served_model_name or (model,),
        api_keys=_keys(api_key, "METAINFER_API_KEY"),
        admin_keys=_keys(admin_key, "METAINFER_ADMIN_KEY"),
        max_body_bytes=parse_size(max_body, "--max-body"),
        max_pending=max_pending,
        keep_alive_s=keep_alive,
        drain_grace_s=drain_grace,
        vllm_metrics=metrics_compat == "vllm",
    )
    from metainfer.server.run import run

    return Result(code=run(_serve(engine.intent(model), config, host, port, chat_template)))


def _keys(given: tuple[str, ...], variable: str) -> tuple[str, ...]:
    named = env.get(variable)
    return given or ((named,) if named else ())


async def _serve(
    intent: Intent, config: ServerConfig, host: str, port: int, chat_template: Path | None
) -> int:
    import sys

    from metainfer.cli.clients import Screen, make_client
    from metainfer.server.app import new_state
    from metainfer.server.run import Lifecycle, bind, describe

    listener = bind(host, port)  # first, so that a clash is told before minutes of loading
    out = output.current
    screen = Screen(sys.stderr if out.as_json else sys.stdout)
    screen.line(f"metainfer serve {intent.model}")
    url = describe(listener)
    state = new_state(config, make_client(intent, screen))

    def ready(info: EngineInfo) -> None:
        screen.summary(info, url, config.model_names)
        if not config.api_keys and host not in ("127.0.0.1", "localhost", "::1"):
            screen.line("  warning: no --api-key, and the address is reachable from other machines")
        if out.as_json:
            out.document(_ready_document(info, url, config, state.fingerprint))

    def text(info: EngineInfo) -> TextTools:
        return _load_text(info, chat_template)

    life = Lifecycle(state, listener, load_text=text, on_ready=ready, say=screen.line)
    return await life.run()


def _load_text(info: EngineInfo, chat_template: Path | None) -> TextTools:
    from dataclasses import replace

    from metainfer.engine.model_text import load_text

    tools = load_text(info.model, info.vocab_size)
    if chat_template is None:
        return tools
    from metainfer.text.chat import ChatTemplate
    from metainfer.text.dialogue import JinjaFormat

    template = ChatTemplate.from_file(chat_template, tools.tokenizer.special_tokens)
    return replace(tools, format=JinjaFormat(tools.tokenizer, template))


def _ready_document(
    info: EngineInfo, url: str, config: ServerConfig, fingerprint: str
) -> dict[str, object]:
    return {
        "url": url,
        "models": list(config.model_names),
        "max_context": info.max_context,
        "kv_tokens": info.kv_tokens,
        "max_running": info.max_running,
        "plan_fingerprint": fingerprint,
        "start_phases": [
            {"phase": phase, "seconds": seconds} for phase, seconds in info.start_phases
        ],
    }
