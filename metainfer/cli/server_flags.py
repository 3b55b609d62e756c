"""Flags that describe a server: where it listens, who may call it, what a request may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from metainfer.cli.flags import parse_pairs, parse_size
from metainfer.core import env
from metainfer.core.errors import UsageError
from metainfer.core.intent import MAX_PENDING

if TYPE_CHECKING:
    import socket

    from metainfer.engine.protocol import Guards
    from metainfer.server.state import ServerConfig

ADDRESS = Group("Address", sort_key=1)
ACCESS = Group("Access", sort_key=1)
LIMITS = Group("Limits of requests", sort_key=1)
WATCH = Group("When the engine breaks", sort_key=1)
ANSWERS = Group("Names, answers, metrics", sort_key=1)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def _flag(name: str, group: Group, text: str) -> Parameter:
    return Parameter(name=name, help=text, group=group, negative="")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """One server. Sizes in bytes, times in seconds."""

    host: Annotated[str, _flag("--host", ADDRESS, "address to listen on")] = "127.0.0.1"
    port: Annotated[int, _flag("--port", ADDRESS, "port; 0 = any free one")] = 8000
    uds: Annotated[
        Path | None, _flag("--uds", ADDRESS, "listen on this Unix socket instead of a port")
    ] = None
    root_path: Annotated[
        str, _flag("--root-path", ADDRESS, "path under which a proxy shows the server, like /llm")
    ] = ""
    ssl_certfile: Annotated[
        Path | None, _flag("--ssl-certfile", ADDRESS, "certificate (PEM): serve HTTPS")
    ] = None
    ssl_keyfile: Annotated[
        Path | None, _flag("--ssl-keyfile", ADDRESS, "its key (PEM), if not in the same file")
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        _flag(
            "--api-key",
            ACCESS,
            "key a request must present (repeatable); better: METAINFER_API_KEY, --api-key-file",
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None, _flag("--api-key-file", ACCESS, "file with one key a line; # is a comment")
    ] = None
    admin_key: Annotated[
        tuple[str, ...],
        _flag("--admin-key", ACCESS, "key of the admin routes (repeatable); none = they are shut"),
    ] = ()
    cors_origin: Annotated[
        tuple[str, ...],
        _flag(
            "--cors-origin",
            ACCESS,
            "web page that may call, like https://a.example (repeatable or by commas); * = any",
        ),
    ] = ()
    max_pending: Annotated[
        int, _flag("--max-pending", LIMITS, "generations queued or running; beyond it 429")
    ] = MAX_PENDING
    max_body: Annotated[str, _flag("--max-body", LIMITS, "largest request body")] = "4MiB"
    max_headers: Annotated[int, _flag("--max-headers", LIMITS, "most headers of a request")] = 256
    limit: Annotated[
        tuple[str, ...],
        _flag("--limit", LIMITS, "NAME=N: another bound of a request (repeatable); docs/api.md"),
    ] = ()
    request_timeout: Annotated[
        float | None,
        _flag("--request-timeout", LIMITS, "most seconds for a request; it may ask for less"),
    ] = None
    body_timeout: Annotated[
        float, _flag("--body-timeout", LIMITS, "seconds in which a body must be sent")
    ] = 60.0
    priority_order: Annotated[
        Literal["lower-first", "higher-first"],
        _flag("--priority-order", LIMITS, "which `priority` of requests runs first"),
    ] = "lower-first"
    drain_grace: Annotated[
        float, _flag("--drain-grace", LIMITS, "seconds for running requests at stop")
    ] = 30.0
    keep_alive: Annotated[
        float, _flag("--keep-alive", LIMITS, "seconds until an idle stream gets a comment")
    ] = 15.0
    nan_guard: Annotated[
        Literal["off", "logits", "layers"],
        _flag("--nan-guard", WATCH, "where NaN is looked for; layers: behind every op, slow"),
    ] = "logits"
    hang_after: Annotated[
        float,
        _flag("--hang-after", WATCH, "seconds after which a step hangs; 0 = none does"),
    ] = 120.0
    try_limit: Annotated[
        bool,
        _flag("--try-limit", WATCH, "before ready, serve one prompt as long as the plan promises"),
    ] = False
    max_restarts: Annotated[
        int, _flag("--max-restarts", WATCH, "restarts of a dead engine within ten minutes")
    ] = 3
    served_model_name: Annotated[
        tuple[str, ...],
        _flag("--served-model-name", ANSWERS, "name(s) clients use instead of MODEL (repeatable)"),
    ] = ()
    chat_template: Annotated[
        Path | None,
        _flag("--chat-template", ANSWERS, "Jinja file instead of the model's template"),
    ] = None
    metrics_compat: Annotated[
        Literal["vllm"] | None,
        _flag("--metrics-compat", ANSWERS, "also give metrics under the names of: vllm"),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        _flag("--otlp-endpoint", ANSWERS, "URL of a collector of traces (extra otel)"),
    ] = None

    def config(self, model: str) -> ServerConfig:
        """The server's configuration.

        Raises:
            UsageError: a value is out of range or a file cannot be read.
        """
        from metainfer.server.bounds import Bounds
        from metainfer.server.state import ServerConfig

        self._check()
        return ServerConfig(
            model_names=self.served_model_name or (model,),
            api_keys=self._api_keys(),
            admin_keys=self.admin_key or _from_environment("METAINFER_ADMIN_KEY"),
            cors_origins=tuple(
                origin for item in self.cors_origin for origin in item.split(",") if origin
            ),
            root_path=self.root_path.rstrip("/"),
            max_body_bytes=parse_size(self.max_body, "--max-body"),
            max_headers=self.max_headers,
            max_pending=self.max_pending,
            bounds=Bounds(
                {name: _whole(name, n) for name, n in parse_pairs(self.limit, "--limit").items()}
            ),
            body_s=self.body_timeout,
            request_timeout_s=self.request_timeout,
            higher_first=self.priority_order == "higher-first",
            keep_alive_s=self.keep_alive,
            drain_grace_s=self.drain_grace,
            vllm_metrics=self.metrics_compat == "vllm",
            otlp_endpoint=self.otlp_endpoint,
            # The step that hangs is named first; silence alone comes after it.
            stall_s=1.5 * self.hang_after or float("inf"),
            max_restarts=self.max_restarts,
        )

    def guards(self) -> Guards:
        """How closely the engine is watched."""
        from metainfer.engine.protocol import Guards
        from metainfer.executor.protocol import NanGuard

        return Guards(NanGuard(self.nan_guard), self.hang_after, self.try_limit)

    def _check(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port {self.port} is no port.", "Pass 0 to 65535.")
        positive = {
            "--max-pending": self.max_pending,
            "--max-headers": self.max_headers,
            "--keep-alive": self.keep_alive,
            "--body-timeout": self.body_timeout,
            "--request-timeout": 1 if self.request_timeout is None else self.request_timeout,
        }
        for flag, value in positive.items():
            if not value > 0:
                raise UsageError(f"{flag} is {value:g}.", "Pass a positive number.")
        not_negative = {
            "--drain-grace": self.drain_grace,
            "--hang-after": self.hang_after,
            "--max-restarts": self.max_restarts,
        }
        for flag, value in not_negative.items():
            if not value >= 0:
                raise UsageError(f"{flag} is {value:g}.", "Pass 0 or more.")
        if self.root_path and not self.root_path.startswith("/"):
            raise UsageError(f"--root-path is {self.root_path!r}.", "Begin it with /.")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("--ssl-keyfile is given without --ssl-certfile.", "Give both.")

    def _api_keys(self) -> tuple[str, ...]:
        keys = self.api_key
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"--api-key-file {self.api_key_file} cannot be read: {error}.",
                    "Check its name.",
                ) from error
            named = [line.strip() for line in lines]
            keys += tuple(line for line in named if line and not line.startswith("#"))
            if not keys:  # an empty file must not open the server
                raise UsageError(f"--api-key-file {self.api_key_file} holds no key.", "Add one.")
        return keys or _from_environment("METAINFER_API_KEY")

    def bind(self) -> socket.socket:
        """The listening socket.

        Raises:
            UserError: it cannot be had.
        """
        from metainfer.server.run import bind, bind_unix

        return bind(self.host, self.port) if self.uds is None else bind_unix(self.uds)

    @property
    def exposed(self) -> bool:
        """Whether other machines reach the address."""
        return self.uds is None and self.host not in LOOPBACK


def _from_environment(variable: str) -> tuple[str, ...]:
    value = env.get(variable)
    return (value,) if value else ()


def _whole(name: str, text: str) -> int:
    if not text.isdigit():
        raise UsageError(f"--limit {name}={text} is no number.", "Write a whole number.")
    return int(text)


NO_SERVER_FLAGS = ServerFlags()
