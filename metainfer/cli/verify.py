"""``metainfer verify``: proof that a plan computes what its references compute, on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from metainfer.cli.flags import NO_FLAGS, EngineFlags, Json
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError

VERIFY = Group("Verification", sort_key=1)


def _flag(name: str, text: str) -> Parameter:
    return Parameter(name=name, help=text, group=VERIFY, negative="")


def verify(
    model: Annotated[
        str | None, Parameter(help="folder, .gguf file, cached name, or catalogue name")
    ] = None,
    /,
    *,
    seed: Annotated[
        int | None, _flag("--seed", "of all random inputs; default: drawn, and printed")
    ] = None,
    bringup: Annotated[
        bool, _flag("--bringup", "prove every kernel that could run on this card, without a model")
    ] = False,
    report: Annotated[
        Path | None, _flag("--report", "file of --bringup; default: metainfer-bringup.json")
    ] = None,
    time_limit: Annotated[
        float, _flag("--time-limit", "seconds that one kernel of --bringup may take")
    ] = 120.0,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """Compare what runs here with references. Exit 1 on a mismatch, which is named.

    Example: metainfer verify smollm2-135m
    """

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if bringup:
        from metainfer.verifier.bringup import bring_up

        if model is not None:
            raise UsageError("--bringup takes no model.", "Run it first, then verify MODEL.")
        if time_limit <= 0:
            raise UsageError(f"--time-limit is {time_limit:g}.", "Pass a positive number.")
        intent = engine.intent("")
        target = report or Path("metainfer-bringup.json")
        document = bring_up(intent, target, say, time_limit_s=time_limit)
        return Result(document, str(document["text"]), 1 if document["failed"] else 0)
    if model is None:
        raise UsageError("No model is given.", "Pass MODEL, or --bringup.")
    if report is not None:
        raise UsageError("--report belongs to --bringup.", "Leave it out; --json prints the rows.")
    from metainfer.verifier.run import verify as run

    document = run(engine.intent(model), say, seed=seed)
    return Result(document, shown(document), 0 if document["verdict"] == "passed" else 1)


def shown(document: dict[str, Any]) -> str:
    """The rows and the verdict for people."""
    from metainfer.verifier.rows import listing

    lines = [listing(document["checks"]), ""]
    for fault in document["named"]:
        lines.append(f"fault: {fault['fault']}: {', '.join(fault['where'][:4])}")
    counts = dict.fromkeys(("passed", "failed", "not applicable"), 0)
    for row in document["checks"]:
        counts[row["verdict"]] += 1
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines.append(
        f"{document['verdict']}: {told} in {document['seconds']:.0f} s; plan {document['plan']}, "
        f"seed {document['seed']}; kept with this machine's records"
    )
    return "\n".join(lines)
