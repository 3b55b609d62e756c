"""``metainfer doctor``: what a machine and a model meet. A thin caller of the doctor's room."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from metainfer.cli.examine import MachineName, Model
from metainfer.cli.flags import NO_FLAGS, EngineFlags, Json
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError, UserError

SaveMachine = Annotated[
    str | None, Parameter(name="--save-machine", help="also write this machine to FILE.toml")
]
HostFile = Annotated[
    str | None, Parameter(name="--host-text", help="examine the host that this file describes")
]
SaveHost = Annotated[
    str | None,
    Parameter(name="--save-host-text", help="also write what this host printed to FILE"),
]
Engine = Annotated[
    Literal["sglang", "vllm"] | None,
    Parameter(name="--engine", help="audit this stock engine's command line too"),
]
EngineArgs = Annotated[
    str,
    Parameter(name="--engine-args", allow_leading_hyphen=True, help="that command line, in quotes"),
]
Deep = Annotated[
    bool,
    Parameter(name="--deep", negative="", help="prove peer access by bytes; GPUs are busy"),
]
Html = Annotated[str | None, Parameter(name="--html", help="also write the report as a page")]


def doctor(
    model: Model = None,
    *,
    machine: MachineName = None,
    save_machine: SaveMachine = None,
    deep: Deep = False,
    html: Html = None,
    host_text: HostFile = None,
    save_host_text: SaveHost = None,
    engine: Engine = None,
    engine_args: EngineArgs = "",
    flags: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """What this machine and this model meet: chosen kernels, refused ones with all reasons.

    Example: metainfer doctor --machine 8x-l20 --engine sglang --engine-args "--model-path M --tp 8"
    """
    from metainfer.doctor import elsewhere, report
    from metainfer.doctor.page import page
    from metainfer.doctor.stock.audit import StockRequest
    from metainfer.doctor.text_report import text
    from metainfer.platform import host_text as texts

    if engine is None and engine_args:
        raise UsageError("--engine-args belongs to no engine.", "Say --engine sglang or vllm.")
    stock = None if engine is None else StockRequest(engine, engine_args, model or "")
    intent = None if model is None else flags.intent(model)
    if save_machine is not None:
        elsewhere.save(machine, save_machine, flags.platform)
    if save_host_text is not None:
        if machine is not None or host_text is not None:
            raise UsageError(
                "--save-host-text writes what this host prints.",
                "Leave out --machine and --host-text.",
            )
        _write(save_host_text, texts.render(texts.read_host_text(software=_software())))
    read = None if host_text is None else texts.read_file(Path(host_text))
    document = report.doctor(intent, machine, printed=read, deep=deep, stock=stock)
    shown = text(document)
    if html is not None:
        _write(html, page(document))
    for key, name, file in (
        ("saved", "machine file", save_machine),
        ("host_text", "host text", save_host_text),
        ("html", "page", html),
    ):
        if file is not None:
            document[key] = file
            shown += f"\n{name}: {file}"
    return Result(document, shown, report.exit_status(document))


def _software() -> dict[str, str | None]:
    from metainfer.platform.software import versions

    return versions()


def _write(file: str, body: str) -> None:
    try:
        Path(file).write_text(body, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror or error}.",
            "Choose a folder that can be written.",
            code="not_writable",
        ) from error
