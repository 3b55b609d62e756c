"""The OpenAPI document: schemas from the msgspec types, the answers that each route may give."""

from __future__ import annotations

from typing import Any

import msgspec

from metainfer.server.access import LEVELS, Level
from metainfer.server.dialects.messages_body import CountTokensRequest, MessagesRequest
from metainfer.server.dialects.responses_body import ResponsesRequest
from metainfer.server.errors import speaks_anthropic
from metainfer.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from metainfer.server.state import ServerState
from metainfer.server.status import PageStatus

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_ANSWERS: dict[str, type[msgspec.Struct]] = {"/page/status": PageStatus}
_TEMPLATE = "#/components/schemas/{name}"

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
REASONS = {
    400: "The request is malformed, out of bounds or asks for something unsupported.",
    401: "The API key is missing or wrong.",
    403: "The path needs the admin key.",
    404: "No such model.",
    405: "The path has no such method.",
    408: "The body or the head came too slowly.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; see Retry-After.",
    431: "Too many headers.",
    500: "Our fault.",
    504: "The request's time was over.",
    503: "Starting, draining, or the engine is gone; see Retry-After.",
}


def operation(path: str) -> dict[str, Any]:
    """Keyword arguments of ``add_api_route`` that describe `path`."""
    statuses = [401, 405, 431, 500]
    generates = path in _GENERATING
    if path in _BODIES:
        statuses += [400, 404, 408, 413, 415, 503]
    if generates:
        statuses += [429, 504]
    if path in ("/health", "/health/live", "/health/ready", "/ready", "/plan"):
        statuses.append(503)
    if "{" in path:
        statuses.append(404)
    if path == "/page/status":
        statuses.append(400)
    if LEVELS[path] is Level.ADMIN:
        statuses.append(403)
    form = "AnthropicError" if speaks_anthropic(path) else "Error"
    error = {"application/json": {"schema": {"$ref": _TEMPLATE.format(name=form)}}}
    status_form = {"application/json": {"schema": {"type": "object"}}}
    health = path.startswith("/health") or path == "/ready"
    responses: dict[int | str, dict[str, Any]] = {
        status: {
            "description": REASONS[status],
            "content": status_form if health and status == 503 else error,
        }
        for status in sorted(statuses)
    }
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path in _ANSWERS:
        name = _ANSWERS[path].__name__
        content = {"application/json": {"schema": {"$ref": _TEMPLATE.format(name=name)}}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if generates:
        event = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
        content["text/event-stream"] = {"schema": event}
    responses[200] = {"description": "Done.", "content": content}
    extra: dict[str, Any] = {}
    if path in _BODIES:
        name = _BODIES[path].__name__
        schema = {"$ref": _TEMPLATE.format(name=name)}
        extra["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if LEVELS[path] is not Level.PUBLIC:
        extra["security"] = [{"key": []}, {}] if LEVELS[path] is Level.USER else [{"adminKey": []}]
    return {"responses": responses, "openapi_extra": extra}


def install(app: Any, state: ServerState) -> None:
    """Make `app` answer ``/openapi.json`` with the finished document."""
    from fastapi.openapi.utils import get_openapi

    def build() -> dict[str, Any]:
        document: dict[str, Any] = get_openapi(
            title=app.title, version=app.version, routes=app.routes
        )
        _drop_default_errors(document)
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for unwanted in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unwanted, None)
        types = (*_BODIES.values(), *_ANSWERS.values())
        _, own = msgspec.json.schema_components(types, ref_template=_TEMPLATE)
        schemas |= own
        schemas |= {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
        schemas["MessageItem"]["required"].remove("type")  # it is what an item without one is
        _narrow(schemas, state)
        config = state.config
        document["x-metainfer-limits"] = config.bounds.document(
            config.max_body_bytes, config.max_headers
        )
        components["securitySchemes"] = {
            name: {"type": "http", "scheme": "bearer"} for name in ("key", "adminKey")
        }
        return document

    app.openapi = build


def _drop_default_errors(document: dict[str, Any]) -> None:
    for methods in document["paths"].values():
        for described in methods.values():
            described["responses"].pop("422", None)


def _narrow(schemas: dict[str, Any], state: ServerState) -> None:
    """Put in what only the running server knows: model names, context."""
    names = list(state.config.served)
    for kind in _BODIES.values():
        properties = schemas[kind.__name__]["properties"]
        state.config.bounds.narrow(properties)
        named = {"type": "string", "enum": names}
        optional = "anyOf" in properties["model"]
        properties["model"] = {"anyOf": [named, {"type": "null"}]} if optional else named
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if state.info is not None and field in properties:
                for option in properties[field].get("anyOf", ()):
                    if option["type"] == "integer":
                        option["maximum"] = state.info.max_context
