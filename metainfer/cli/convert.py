"""``metainfer convert``: a checkpoint with its experts in another low-precision format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from metainfer.cli.flags import Json
from metainfer.cli.output import Result
from metainfer.core.errors import ModelError


def convert(
    source: Annotated[Path, Parameter(help="folder of a DeepSeek-V4 checkpoint")],
    target: Annotated[Path, Parameter(help="new folder")],
    /,
    *,
    to: Annotated[Literal["fp8", "mxfp4", "nvfp4"], Parameter(help="format of the experts")],
    lossless: Annotated[
        bool, Parameter(negative="", help="change no value, or refuse naming each tensor")
    ] = False,
    as_json: Json = False,
) -> Result:
    """Write a copy of a checkpoint whose routed experts are in another format.

    Example: metainfer convert DeepSeek-V4-Flash V4-NVFP4 --to nvfp4 --lossless
    """
    if not source.is_dir():
        raise ModelError(
            f"There is no folder {str(source)!r}.",
            "Pass the checkpoint's folder.",
            code="model_not_found",
        )
    from metainfer.formats.convert import convert as run

    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if done * 10 // total > shown:
            shown = done * 10 // total
            print(f"{done} of {total} tensors", file=sys.stderr, flush=True)

    report = run(source, target, to, lossless=lossless, progress=progress)
    document = {**report.to_json(), "source": str(source), "target": str(target)}
    text = (
        f"{target}: {report.converted} expert matrices to {to}, "
        f"{report.converted - len(report.rounded)} of them exact, {report.kept} tensors copied; "
        f"{report.bytes_before / 1e9:.2f} GB before, {report.bytes_after / 1e9:.2f} GB after"
    )
    return Result(document, text)
