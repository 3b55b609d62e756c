"""``metainfer kernels``: what implementations there are, and whether they compile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from metainfer.cli.flags import Json
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError

if TYPE_CHECKING:
    from metainfer.kernels.audit import Build


def app() -> App:
    """The group of verbs."""
    group = App(name="kernels", help="List implementations, or compile them for a target.")
    group.command(list_kernels, name="list")
    group.command(compile_kernels, name="compile")
    return group


def list_kernels(*, as_json: Json = False) -> Result:
    """Every op's implementations with their conditions and evidence on this machine.

    Example: metainfer kernels list --json
    """
    from metainfer.engine.machine import open_machine
    from metainfer.kernels import audit

    machine = open_machine()
    rows = audit.list_kernels(machine.registry, machine.facts, tuple(machine.qualified.values()))
    text = "\n".join(
        f"{row['kernel']:<32} {row['provider']:<10} {row['evidence']:<20} {_here(row)}"
        for row in rows
    )
    return Result({"kernels": rows}, text)


def _here(row: dict[str, Any]) -> str:
    if row["runs_here"]:
        return "runs here"
    return "; ".join(reason["message"] for reason in row["conditions"])


def compile_kernels(
    *,
    target: Annotated[
        tuple[str, ...],
        Parameter(negative="", help="sm_80, sm_90a, ... (repeatable or separated by commas)"),
    ] = (),
    plan: Annotated[Path | None, Parameter(help="compile only what this plan chose")] = None,
    as_json: Json = False,
) -> Result:
    """Compile kernels ahead of time, also for cards that are not here.

    Example: metainfer kernels compile --target sm_120a
    """
    import json

    from metainfer.kernels import audit
    from metainfer.ops.catalog import all_variants, builtin_registry

    targets = [name for item in target for name in item.split(",") if name]
    variants = all_variants()
    if plan is not None:
        try:
            ops = json.loads(plan.read_text())["plan"]["ops"]
            chosen = {choice["impl"] for choice in ops.values()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{plan} holds no plan: {error!r}.", "Pass what `metainfer plan --json` printed."
            ) from error
        variants = tuple(variant for variant in variants if variant.impl in chosen)
    builds = audit.compile_all(
        targets or audit.DEFAULT_TARGETS, registry=builtin_registry(), variants=variants
    )
    text = "\n".join(f"{build.kernel:<40} {build.target:<8} {_outcome(build)}" for build in builds)
    failed = any(not build.ok and not build.refused for build in builds)
    return Result({"kernels": [build.to_json() for build in builds]}, text, int(failed))


def _outcome(build: Build) -> str:
    if build.ok:
        return f"ok, {build.shared_bytes} B shared, {build.registers} registers"
    return f"{'refused' if build.refused else 'failed'}: {'; '.join(build.reasons)}"
