"""Every error of the server in the form of its path, with ``Retry-After`` where waiting helps.

Under ``/v1/messages`` that is Anthropic's, everywhere else OpenAI's.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec

from metainfer.core.errors import RequestError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_log = logging.getLogger("metainfer.server")

_STATUS = {
    404: ("not_found_error", "not_found", "There is no such path.", "See /openapi.json."),
    405: ("invalid_request_error", "method_not_allowed", "The path has no such method.", ""),
}


_ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def speaks_anthropic(path: str) -> bool:
    """Whether clients of `path` expect Anthropic's forms."""
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def anthropic_body(error: RequestError) -> dict[str, object]:
    """`error` in Anthropic's form; its types follow the status."""
    kind = _ANTHROPIC_TYPES.get(
        error.status, "invalid_request_error" if error.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def error_response(error: RequestError, path: str = "") -> Response:
    """The HTTP answer that says `error` to who asked for `path`."""
    from starlette.responses import Response

    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 408:
        headers["connection"] = "close"  # the rest of the body is not waited for
    if error.status == 504:
        headers["x-should-retry"] = "false"  # OpenAI's clients would send it again, in vain
    body = anthropic_body(error) if speaks_anthropic(path) else error.openai_body()
    return Response(
        msgspec.json.encode(body),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


def error_event(error: RequestError) -> bytes:
    """The server-sent event that says `error` in the middle of a stream."""
    return b"data: " + msgspec.json.encode(error.openai_body()) + b"\n\n"


def internal(error: BaseException, request_id: str = "") -> RequestError:
    """Our own fault: logged with its traceback, answered without it."""
    _log.error("internal error, request %s", request_id or "unknown", exc_info=error)
    return RequestError(
        "An internal error occurred.",
        "The server's log has the details under this request's id.",
        status=500,
        error_type="server_error",
        code="internal_error",
    )


async def on_request_error(request: Request, error: Exception) -> Response:
    """Handler of `RequestError`."""
    assert isinstance(error, RequestError)
    return error_response(error, request.scope["path"])


async def on_http_error(request: Request, error: Any) -> Response:
    """Handler of Starlette's own 404 and 405."""
    kind, code, cause, remedy = _STATUS.get(
        error.status_code, ("invalid_request_error", "http_error", str(error.detail), "")
    )
    answer = error_response(
        RequestError(cause, remedy, status=error.status_code, error_type=kind, code=code),
        request.scope["path"],
    )
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Handler of FastAPI's 422, which is a 400 here."""
    return error_response(
        RequestError(f"The request is malformed: {error}."), request.scope["path"]
    )


async def on_exception(request: Request, error: Exception) -> Response:
    """Handler of everything else. Starlette raises `error` again and `Gate` logs it."""
    return error_response(
        RequestError(
            "An internal error occurred.",
            "The server's log has the details under this request's id.",
            status=500,
            error_type="server_error",
            code="internal_error",
        ),
        request.scope["path"],
    )
