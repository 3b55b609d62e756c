"""The application: routes, handlers, error forms. Imports FastAPI: import it when serving."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import metainfer
from metainfer.core.errors import RequestError
from metainfer.engine.protocol import EngineClient
from metainfer.server import openapi
from metainfer.server.access import Gate, read_body
from metainfer.server.bodies import CHAT, Rules, convert, parse_json
from metainfer.server.chat import chat_answer, chat_events
from metainfer.server.completions import completion_answer, completion_events
from metainfer.server.dialects import routes as dialects
from metainfer.server.errors import (
    on_exception,
    on_http_error,
    on_request_error,
    on_validation_error,
)
from metainfer.server.health import Health
from metainfer.server.live_page import add_page
from metainfer.server.metrics import Metrics
from metainfer.server.prepare import chat_job, completion_job, off_loop
from metainfer.server.reply import EventReply, JsonReply, KeepAlive
from metainfer.server.report import Report
from metainfer.server.restarts import Restarts
from metainfer.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from metainfer.server.state import ServerConfig, ServerState
from metainfer.server.tokens import detokenize, tokenize
from metainfer.server.tracing import Traces


def new_state(config: ServerConfig, client: EngineClient) -> ServerState:
    """The state of a server whose engine is not ready yet.

    Raises:
        UserError: traces are asked for and cannot be made.
    """
    state: ServerState
    metrics = Metrics(
        config.model_names[0],
        lambda: state.client.stats,
        lambda: state.status,
        vllm_names=config.vllm_metrics,
    )
    state = ServerState(config, client, metrics, KeepAlive(config.keep_alive_s))
    if config.otlp_endpoint is not None:
        state.traces = Traces(config.otlp_endpoint, config.model_names[0])
        metrics.spans = state.traces.counts
    state.restarts = metrics.restarts = Restarts(config.max_restarts)
    return state


def create_app(state: ServerState) -> Gate:
    """The ASGI application over `state`; the FastAPI object is its `app`."""
    app = FastAPI(
        title="Meta-Infer",
        version=metainfer.__version__,
        docs_url=None,  # its page loads from a CDN and is blank offline
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_exception)
    _add_routes(app, state)
    add_page(app, state)
    openapi.install(app, state)
    return Gate(app, state.config, lambda: state.emulated)


def _add_routes(app: Any, state: ServerState) -> None:
    health = Health(state)
    reports: tuple[tuple[str, Any], ...] = (
        ("/health", health.health),
        ("/health/live", health.live),
        ("/health/ready", health.ready),
        ("/ready", health.ready),
        ("/metrics", health.metrics),
        ("/plan", health.plan),
        ("/debug/report", Report(state).report),
        ("/v1/models", health.models),
        ("/v1/models/{model_id:path}", health.model),
    )
    for path, handler in reports:
        app.add_api_route(path, handler, methods=["GET"], **openapi.operation(path))

    async def body_of(request: Request, kind: Any, rules: Rules = CHAT) -> Any:
        config = state.config
        raw = await read_body(request.scope, request.receive, config.max_body_bytes, config.body_s)

        def read() -> Any:
            value = parse_json(raw)
            config.bounds.check_counts(value)
            return convert(value, kind, rules)

        return await off_loop(len(raw) // 16, read)

    async def chat(request: Request) -> Any:
        arrived = perf_counter()
        body: ChatRequest = await body_of(request, ChatRequest)
        job = await chat_job(state, body, arrived)
        top = body.top_logprobs or 0
        if body.stream:
            return EventReply(chat_events(state, job, top), state.keep_alive)
        return JsonReply(lambda: chat_answer(state, job, top))

    async def completion(request: Request) -> Any:
        arrived = perf_counter()
        body: CompletionRequest = await body_of(request, CompletionRequest)
        job = await completion_job(state, body, arrived)
        how: dict[str, Any] = {"echo": bool(body.echo), "top": body.logprobs}
        if body.stream:
            return EventReply(completion_events(state, job, **how), state.keep_alive)
        return JsonReply(lambda: completion_answer(state, job, **how))

    async def to_tokens(request: Request) -> Any:
        return await tokenize(state, await body_of(request, TokenizeRequest))

    async def to_text(request: Request) -> Any:
        return await detokenize(state, await body_of(request, DetokenizeRequest))

    generating: tuple[tuple[str, Any], ...] = (
        ("/v1/chat/completions", chat),
        ("/v1/completions", completion),
        ("/tokenize", to_tokens),
        ("/detokenize", to_text),
        *dialects.routes(state, body_of),
    )
    for path, handler in generating:
        app.add_api_route(
            path, handler, methods=["POST"], response_model=None, **openapi.operation(path)
        )
