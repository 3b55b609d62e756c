"""The application: routes, handlers, error forms. Imports FastAPI: import it when serving."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

import metainfer
from metainfer.core.errors import RequestError
from metainfer.engine.protocol import EngineClient
from metainfer.server import openapi
from metainfer.server.access import Gate, read_body
from metainfer.server.bodies import convert, parse_json
from metainfer.server.chat import chat_answer, chat_events
from metainfer.server.completions import completion_answer, completion_events
from metainfer.server.errors import (
    on_exception,
    on_http_error,
    on_request_error,
    on_validation_error,
)
from metainfer.server.health import Health
from metainfer.server.metrics import Metrics
from metainfer.server.prepare import chat_job, check_model, completion_job, encode_chat, off_loop
from metainfer.server.reply import EventReply, JsonReply, KeepAlive
from metainfer.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from metainfer.server.state import ServerConfig, ServerState


def new_state(config: ServerConfig, client: EngineClient) -> ServerState:
    """The state of a server whose engine is not ready yet."""
    state: ServerState
    metrics = Metrics(config.model_names[0], lambda: client.stats, lambda: state.status)
    state = ServerState(config, client, metrics, KeepAlive(config.keep_alive_s))
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
    openapi.install(app, state)
    return Gate(app, state.config)


def _add_routes(app: Any, state: ServerState) -> None:
    health = Health(state)
    reports: tuple[tuple[str, Any], ...] = (
        ("/health", health.health),
        ("/health/live", health.live),
        ("/health/ready", health.ready),
        ("/ready", health.ready),
        ("/metrics", health.metrics),
        ("/plan", health.plan),
        ("/v1/models", health.models),
        ("/v1/models/{model_id:path}", health.model),
    )
    for path, handler in reports:
        app.add_api_route(path, handler, methods=["GET"], **openapi.operation(path))

    async def body_of(request: Request, kind: Any) -> Any:
        raw = await read_body(request.scope, request.receive, state.config.max_body_bytes)
        return await off_loop(len(raw) // 16, lambda: convert(parse_json(raw), kind))

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

    async def tokenize(request: Request) -> Any:
        return await _tokenize(state, await body_of(request, TokenizeRequest))

    generating: tuple[tuple[str, Any], ...] = (
        ("/v1/chat/completions", chat),
        ("/v1/completions", completion),
        ("/tokenize", tokenize),
    )
    for path, handler in generating:
        app.add_api_route(
            path, handler, methods=["POST"], response_model=None, **openapi.operation(path)
        )


async def _tokenize(state: ServerState, body: TokenizeRequest) -> Any:
    info, text = state.serving()
    if body.model is not None:
        check_model(state.config, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(
            "Either prompt or messages is needed, not both.", "Send one.", param="prompt"
        )
    if body.prompt is not None:
        prompt = body.prompt
        special = body.add_special_tokens is not False
        ids = await off_loop(len(prompt), lambda: text.tokenizer.encode(prompt, special))
    else:
        messages = body.messages or []
        generate = body.add_generation_prompt
        ids = await off_loop(
            sum(len(message.content) for message in messages),
            lambda: encode_chat(text, messages, add_generation_prompt=generate, variables=None),
        )
    answer = {"count": len(ids), "max_model_len": info.max_context, "tokens": ids}
    return Response(msgspec.json.encode(answer), media_type="application/json")
