"""``metainfer doctor``, ``plan`` and ``version``: thin callers of the rooms that know."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from metainfer.cli.flags import NO_FLAGS, EngineFlags, Json
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError

Model = Annotated[str | None, Parameter(name=("--model", "-m"), help="model reference")]
MachineName = Annotated[
    str | None, Parameter(name="--machine", help="machine name or FILE.toml; default: this one")
]


def doctor(
    model: Model = None,
    *,
    machine: MachineName = None,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """What this machine and this model meet: chosen kernels, refused ones with all reasons.

    Example: metainfer doctor --model smollm2-135m
    """
    from metainfer.doctor import report

    document = report.doctor(None if model is None else engine.intent(model), machine)
    return Result(document, report.text(document), int(report.blocked(document)))


def plan(
    model: Model = None,
    *,
    machine: MachineName = None,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """The decision: pages, memory ledger, layouts, and why each alternative lost.

    Example: metainfer plan --model smollm2-135m --context 4096
    """
    from metainfer.engine.engine import resolve_on
    from metainfer.engine.machine import open_machine
    from metainfer.planner.opening import open_model
    from metainfer.planner.report import plan_document

    if model is None:
        raise UsageError("No model is given.", "Pass --model MODEL.")
    if machine is not None:
        raise UsageError(
            f"Machine {machine!r} is not known.",
            "Leave --machine out: only this machine can be planned for yet.",
            code="unknown_machine",
        )
    intent = engine.intent(model)
    document = plan_document(resolve_on(open_machine(intent.platform), open_model(model), intent))
    return Result(document, plan_text(document))


def plan_text(document: dict[str, object]) -> str:
    """The plan for people: capacity, ledger, decisions that were not defaults."""
    lines = [f"{key}: {value}" for key, value in _rows(document.get("capacity")).items()]
    ledger = document.get("ledger")
    for row in ledger if isinstance(ledger, list) else ():
        lines.append(f"  {row['kind']:<12} {int(row['bytes']) / 2**20:>12.1f} MiB  {row['item']}")
    decisions = document.get("decisions")
    for row in decisions if isinstance(decisions, list) else ():
        lines.append(f"{row['key']} = {row['value']}  ({row['origin']}) {row['why']}")
        for loser in row["losers"]:
            reasons = "; ".join(reason["message"] for reason in loser["reasons"])
            lines.append(f"    not {loser['value']}: {reasons}")
    return "\n".join(lines)


def _rows(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "fastapi", "uvicorn", "pyzmq")


def version(*, as_json: Json = False) -> Result:
    """The version of this program and of what it stands on."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    import metainfer

    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = installed(name)
        except PackageNotFoundError:
            packages[name] = None
    document = {
        "version": metainfer.__version__,
        "python": platform.python_version(),
        "packages": packages,
    }
    shown = ", ".join(f"{name} {number}" for name, number in packages.items() if number)
    text = f"metainfer {metainfer.__version__} (Python {platform.python_version()}; {shown})"
    return Result(document, text)
