"""``metainfer kernels``: what implementations there are, and whether they compile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from metainfer.cli.flags import Json
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError


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

    machine = open_machine()
    rows: list[dict[str, object]] = []
    for impl in machine.registry.impls():
        evidence = machine.evidence.get(impl.id)
        rows.append(
            {
                "op": impl.op,
                "impl": impl.id,
                "provider": impl.provider,
                "dtypes": sorted(impl.dtypes),
                "phases": sorted(phase.value for phase in impl.phases),
                "requires_layout": dict(impl.requires_layout),
                "conditions": [_name(condition) for condition in impl.conditions],
                "native_when": [_name(condition) for condition in impl.native_when],
                "evidence": None if evidence is None else evidence.value,
            }
        )
    text = "\n".join(
        f"{row['impl']:<32} {row['provider']:<10} {row['evidence'] or 'no evidence'}"
        for row in rows
    )
    return Result({"kernels": rows}, text)


def _name(condition: object) -> str:
    return str(getattr(condition, "describe", None) or getattr(condition, "__name__", condition))


def compile_kernels(
    *,
    target: Annotated[
        tuple[str, ...], Parameter(help="sm_80, sm_90a, ... (repeatable or separated by commas)")
    ] = (),
    plan: Annotated[Path | None, Parameter(help="compile only what this plan chose")] = None,
    as_json: Json = False,
) -> Result:
    """Compile kernels ahead of time, also for cards that are not here.

    Example: metainfer kernels compile --target sm_120a
    """
    from importlib.util import find_spec

    targets = [name for item in target for name in item.split(",") if name]
    if find_spec("metainfer.kernels.compile") is None:
        raise UsageError(
            "There are no kernels to compile ahead of time in this version.",
            "See `metainfer kernels list`.",
            code="nothing_to_compile",
        )
    from metainfer.kernels.compile import compile_all

    document = compile_all(targets, plan)
    rows = document["kernels"]
    text = "\n".join(
        f"{row['kernel']:<32} {row['target']:<8} {'ok' if row['ok'] else 'failed'}" for row in rows
    )
    return Result(document, text, int(not all(row["ok"] for row in rows)))
