"""``metainfer tune``: what is measured on this machine and kept, so that plans here are its own."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from cyclopts import App, Parameter

from metainfer.cli.flags import NO_FLAGS, EngineFlags, Json
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError


def app() -> App:
    """``tune`` with its verbs."""
    group = App(name="tune", help="Measure this machine and keep what plans here follow.")
    group.command(capacity, name="capacity")
    group.command(kernels, name="kernels")
    group.command(comm, name="comm")
    return group


def capacity(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    seconds: Annotated[
        float, Parameter(name="--seconds", help="how long the prompt at the limit may run")
    ] = 120.0,
    seed: Annotated[int, Parameter(name="--seed", help="of the prompts")] = 0,
    dry_run: Annotated[
        bool, Parameter(name="--dry-run", negative=(), help="measure, and keep no record")
    ] = False,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """What steps need beside weights and cache, up to the promised context: plans split by it.

    Example: metainfer tune capacity smollm2-135m --context 8192
    """
    from metainfer.bench.capacity import CapacityOptions, run

    if not seconds > 0:
        raise UsageError(f"--seconds is {seconds:g}.", "Pass a number above zero.")
    options = CapacityOptions(seconds=seconds, seed=seed, keep=not dry_run)
    document = run(engine.intent(model), options, _log)
    return Result(document, capacity_text(document))


def kernels(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    only: Annotated[
        tuple[str, ...],
        Parameter(name="--only", negative=(), help="an op; may be repeated. Default: all"),
    ] = (),
    rounds: Annotated[int, Parameter(name="--rounds", help="samples of each candidate")] = 15,
    seed: Annotated[int, Parameter(name="--seed", help="of inputs, and of the order")] = 0,
    dry_run: Annotated[
        bool, Parameter(name="--dry-run", negative=(), help="measure, and keep no record")
    ] = False,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """How the plan's kernels are launched best on this class of cards: plans here follow it.

    Example: metainfer tune kernels smollm2-135m --only rmsnorm
    """
    from metainfer.bench.kernels import KernelOptions, run

    if rounds < 3:
        raise UsageError(f"--rounds is {rounds}.", "Pass at least 3: a median needs a spread.")
    options = KernelOptions(rounds=rounds, seed=seed, keep=not dry_run, ops=only)
    document = run(engine.intent(model), options, _log)
    return Result(document, kernels_text(document))


def kernels_text(document: dict[str, Any]) -> str:
    """What each kernel is launched with, and how many settings were timed or refused."""
    lines = []
    for row in document["tuned"]:
        timed = sum("median" in each for each in row["candidates"])
        refused = len(row["candidates"]) - timed
        for kept in row["kept"]:
            setting = " ".join(f"{name}={value}" for name, value in kept["setting"].items())
            lines.append(
                f"{row['site']} in {row['phase']}: {kept['impl']} {setting}, "
                f"{kept['seconds'] * 1e6:,.1f} µs; {timed} timed, {refused} refused"
            )
    lines += [
        f"{row['site']} in {row['phase']}: not tuned, {row['reason']}"
        for row in document["skipped"]
    ]
    return "\n".join(lines) or "no kernel of this plan has a setting to tune"


def capacity_text(document: dict[str, Any]) -> str:
    """Planned beside measured bytes of each item, and how far the measurement went."""
    lines = [f"{'item':<14} {'planned':>12} {'measured':>12}  difference"]
    for row in document["items"]:
        measured, off = row["measured_bytes"], row["difference"]
        told = "not told here" if measured is None else f"{measured / 2**20:,.1f} MiB"
        lines.append(
            f"{row['item']:<14} {row['planned_bytes'] / 2**20:>8,.1f} MiB {told:>12}"
            + (f"  {off:+.1%}" if off is not None else "")
        )
    device = document["device"]
    if device["unexplained"] is not None:
        used, planned = (device[key] / 2**20 for key in ("used", "planned"))
        share = f"{device['unexplained']:+.1%} of the card"
        lines.append(f"{'in use':<14} {planned:>8,.1f} MiB {used:>8,.1f} MiB  {share}")
    reached, promised = document["reached"], document["promised"]
    rest = "" if reached >= promised else "; what is beyond is bounded by a fit"
    lines.append(f"contexts up to {reached:,} of {promised:,} tokens ran{rest}")
    return "\n".join(lines)


def comm(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    seconds: Annotated[
        float, Parameter(name="--seconds", help="how long to measure, beside the least samples")
    ] = 20.0,
    dry_run: Annotated[
        bool, Parameter(name="--dry-run", negative=(), help="measure, and keep no file")
    ] = False,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """Which collective carries which message between the ranks of --parallel; a file to pin.

    Example: metainfer tune comm smollm2-135m --parallel tp2
    """
    from metainfer.bench.collectives import CollectivesOptions, run

    if not seconds > 0:
        raise UsageError(f"--seconds is {seconds:g}.", "Pass a number above zero.")
    options = CollectivesOptions(seconds=seconds, keep=not dry_run)
    document = run(engine.intent(model), options, _log)
    return Result(document, comm_text(document))


def comm_text(document: dict[str, Any]) -> str:
    """The tiers, what was refused, and where they are kept."""
    lines = [
        f"{row['op']:<12} {row['world']} ranks from {row['bytes_from']:>12,} B  {row['method']:<16}"
        + (f" {row['us']:>9.1f} us" if row["us"] is not None else "")
        + ("  pinned" if row["pinned"] else "")
        for row in document["tiers"]
    ]
    lines += [f"refused {name}: {why}" for name, why in document["refused"].items()]
    lines.append(f"kept in {document['file']}" if document["kept"] else "not kept: --dry-run")
    return "\n".join(lines)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
