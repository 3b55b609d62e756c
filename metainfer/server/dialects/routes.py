"""Routes of the dialects over the chat request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from starlette.requests import Request

from metainfer.server.bodies import Rules
from metainfer.server.dialects import messages, messages_body, responses, responses_body
from metainfer.server.state import ServerState

Reader = Callable[[Request, Any, Rules], Awaitable[Any]]


def routes(state: ServerState, body_of: Reader) -> tuple[tuple[str, Any], ...]:
    """(path, handler of POST); `body_of` reads and checks a body of a kind."""

    async def response(request: Request) -> Any:
        arrived = perf_counter()
        body = await body_of(request, responses_body.ResponsesRequest, responses_body.RULES)
        return await responses.respond(state, body, arrived)

    async def message(request: Request) -> Any:
        arrived = perf_counter()
        body = await body_of(request, messages_body.MessagesRequest, messages_body.RULES)
        return await messages.respond(state, body, arrived)

    async def count(request: Request) -> Any:
        body = await body_of(request, messages_body.CountTokensRequest, messages_body.RULES)
        return await messages.count_tokens(state, body)

    return (
        ("/v1/responses", response),
        ("/v1/messages", message),
        ("/v1/messages/count_tokens", count),
    )
