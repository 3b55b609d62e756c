"""The live page at ``/``: static files of the package, and the JSON that they ask for.

The files hold no secret and are public; what they show needs the key, which the browser's tab
keeps. The policy allows this server's files only: no inline script, nobody else's address.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import msgspec

from metainfer.server import openapi
from metainfer.server.state import ServerState
from metainfer.server.status import page_status

POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
#: path -> package, file in it, media type. Colours and tables are those of the doctor's page.
FILES = {
    "/": ("metainfer.server", "page/index.html", "text/html; charset=utf-8"),
    "/page/house.css": ("metainfer.doctor", "data/page.css", "text/css; charset=utf-8"),
    "/page/page.css": ("metainfer.server", "page/page.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("metainfer.server", "page/icon.svg", "image/svg+xml"),
    **{
        f"/page/{name}.js": ("metainfer.server", f"page/{name}.js", "text/javascript")
        for name in ("page", "api", "dom", "charts", "now", "plan", "chat", "events")
    },
}


def add_page(app: Any, state: ServerState) -> None:
    """Add the page's routes to a FastAPI application."""
    for path in FILES:
        app.add_api_route(path, _file(path), methods=["GET"], include_in_schema=False)

    async def status(since: float = 0.0) -> Any:
        from starlette.responses import Response

        body = msgspec.json.encode(page_status(state, since))
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    app.add_api_route("/page/status", status, methods=["GET"], **openapi.operation("/page/status"))


def _file(path: str) -> Any:
    package, name, media = FILES[path]
    content = (resources.files(package) / name).read_bytes()

    async def answer() -> Any:
        from starlette.responses import Response

        return Response(content, headers=HEADERS, media_type=media)

    return answer
