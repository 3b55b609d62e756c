"""``metainfer convert``: checkpoints in another low-precision format, random ones to files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from metainfer.cli.flags import Json
from metainfer.cli.output import Result
from metainfer.core.errors import ModelError, UsageError


def convert(
    source: Annotated[
        str, Parameter(help="folder of a DeepSeek-V4 checkpoint, or random:<family>[?layers=N]")
    ],
    target: Annotated[Path, Parameter(help="new folder")],
    /,
    *,
    to: Annotated[
        Literal["fp8", "mxfp4", "nvfp4", "official"],
        Parameter(help="format of the experts; official: a random model in its publisher's files"),
    ],
    lossless: Annotated[
        bool, Parameter(negative="", help="change no value, or refuse naming each tensor")
    ] = False,
    as_json: Json = False,
) -> Result:
    """Write a copy of a checkpoint whose routed experts are in another format.

    Example: metainfer convert DeepSeek-V4-Flash V4-NVFP4 --to nvfp4 --lossless

    With a random model and --to official, write that model as its publisher would store it: the
    same bytes for the same seed, readable by other engines. The same command goes on after an
    interruption.

    Example: metainfer convert "random:deepseek-v4-flash?layers=12" V4-12 --to official
    """
    if source.startswith("random:") != (to == "official"):
        raise UsageError(
            f"{source} cannot be converted to {to}.",
            "A random: model goes to official; a folder goes to fp8, mxfp4 or nvfp4.",
        )
    if to == "official":
        return _export(source, target)
    folder = Path(source)
    if not folder.is_dir():
        raise ModelError(
            f"There is no folder {source!r}.",
            "Pass the checkpoint's folder.",
            code="model_not_found",
        )
    from metainfer.formats.convert import convert as run

    report = run(folder, target, to, lossless=lossless, progress=_shown("tensors"))
    document = {**report.to_json(), "source": source, "target": str(target)}
    text = (
        f"{target}: {report.converted} expert matrices to {to}, "
        f"{report.converted - len(report.rounded)} of them exact, {report.kept} tensors copied; "
        f"{report.bytes_before / 1e9:.2f} GB before, {report.bytes_after / 1e9:.2f} GB after"
    )
    return Result(document, text)


def _export(reference: str, target: Path) -> Result:
    from metainfer.planner.opening import open_model

    model = open_model(reference)
    from metainfer.formats.export import export
    from metainfer.formats.random_source import RandomSource, undrawn

    if schemes := undrawn(model.draws):
        raise ModelError(
            f"{reference} cannot be written: no numbers are drawn as {', '.join(schemes)}.",
            "Write another random model; plan reads this one without files.",
        )
    assert model.source.random is not None
    # Spelled out, so that two references to one model give the same bytes.
    family, layers = model.source.random.family, model.arch.layers
    began = time.monotonic()
    done = export(
        f"random:{family}?layers={layers}&seed={model.seed}",
        model.source.config,
        RandomSource(model.draws, model.seed),
        target,
        progress=_shown("bytes"),
    )
    seconds = time.monotonic() - began
    speed = (done.nbytes - done.kept) / max(seconds, 1e-9)
    document = {
        "source": reference, "target": str(target), "to": "official", "tensors": done.tensors,
        "bytes": done.nbytes, "bytes_kept": done.kept, "seconds": seconds,
        "bytes_per_s": speed,
    }  # fmt: skip
    text = (
        f"{target}: {done.tensors} tensors, {done.nbytes / 1e9:.2f} GB, "
        f"{done.kept / 1e9:.2f} GB of them from an earlier run; {speed / 1e6:.0f} MB/s"
    )
    return Result(document, text)


def _shown(unit: str) -> Callable[[int, int], None]:
    """Progress on stderr, in tenths."""
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if done * 10 // total > shown:
            shown = done * 10 // total
            size, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
            told = f"{done / size:.1f} of {total / size:.1f} {name}"
            text = told if unit == "bytes" else f"{done} of {total} {unit}"
            print(text, file=sys.stderr, flush=True)

    return progress
