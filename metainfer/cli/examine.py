"""``metainfer plan`` and ``version``: thin callers of the rooms that know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from metainfer.cli.flags import NO_FLAGS, Adapters, EngineFlags, Json
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError

Model = Annotated[str | None, Parameter(name=("--model", "-m"), help="model reference")]
MachineName = Annotated[
    str | None, Parameter(name="--machine", help="machine name or FILE.toml; default: this one")
]


def app() -> App:
    """``plan`` with its verb ``diff``."""
    group = App(name="plan")
    group.default(plan)
    group.command(diff, name="diff")
    return group


def plan(
    model: Model = None,
    *,
    machine: MachineName = None,
    explain: Annotated[
        str | None, Parameter(name="--explain", help="one decision: who set it, why, what lost")
    ] = None,
    engine: EngineFlags = NO_FLAGS,
    adapter: Adapters = (),
    as_json: Json = False,
) -> Result:
    """The decision: pages, memory ledger, layouts, and why each alternative lost.

    Example: metainfer plan --model smollm2-135m --context 4096
    """
    from metainfer.engine.elsewhere import describe
    from metainfer.engine.machine import open_machine
    from metainfer.planner.opening import open_model
    from metainfer.planner.report import plan_document

    if model is None:
        raise UsageError("No model is given.", "Pass --model MODEL.")
    emulated = machine if engine.rank_of is not None else None
    intent = engine.intent(model, adapter, emulated)
    if machine is not None and emulated is None:
        there = describe(machine, intent)
        document = plan_document(there.resolve(open_model(model, adapters=intent.adapters), intent))
        return _shown(document, explain)
    opened, here = open_model(model, adapters=intent.adapters), open_machine(intent.platform)
    here.recall(here.resolve(opened, intent).plan.model.dtype)
    return _shown(plan_document(here.resolve(opened, intent)), explain)


def _shown(document: dict[str, Any], explain: str | None) -> Result:
    from metainfer.planner.explain import explain_lines, explained

    if explain is None:
        return Result(document, plan_text(document))
    found = explained(document, explain)
    return Result({"explained": found}, "\n".join(explain_lines(found)))


def diff(
    before: Annotated[Path, Parameter(help="what plan --json printed")],
    after: Annotated[Path, Parameter(help="what it printed another time")],
    /,
    *,
    as_json: Json = False,
) -> Result:
    """What two plans decide otherwise, and what weighs more. Exit 1 when they differ.

    Example: metainfer plan diff yesterday.json today.json
    """
    from metainfer.planner.diff import plan_diff

    found = plan_diff(_read(before), _read(after))
    lines = []
    for part in ("values", "ledger", "capacity", "layouts"):
        for row in found[part]:
            more = f" ({row['bytes'] / 2**20:+,.1f} MiB)" if "bytes" in row else ""
            lines.append(f"{part} {row['key']}: {row['before']} -> {row['after']}{more}")
            lines += [f"    {why}" for why in dict.fromkeys(row.get("why", ())) if why]
    return Result(found, "\n".join(lines) or "the same plan", code=0 if found["same"] else 1)


def _read(path: Path) -> dict[str, Any]:
    """A plan document from a file.

    Raises:
        UsageError: it cannot be read, or is something else.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", "Write it with plan --json.") from None
    wanted = {"plan", "ledger", "capacity", "layouts", "decisions"}
    if not isinstance(document, dict) or not wanted <= document.keys():
        raise UsageError(f"{path} holds no plan.", "Write it with plan --json.")
    return document


MOST_LOSERS = 12
"""Losers of a decision that people are shown unasked."""


def plan_text(document: dict[str, Any]) -> str:
    """The plan for people: capacity, memory ledger, decisions, operations joined over phases.

    Long lists of reasons are cut, and say so; the document has all of them.
    """
    capacity = document["capacity"]
    lines = [f"{key}: {value}" for key, value in capacity.items() if key != "pairs"]
    held = ", ".join(f"{p['concurrency']} of {p['context']:,}" for p in capacity["pairs"])
    lines += [f"sequences at once, by tokens: {held or 'none'}"]
    lines += [
        f"  {row['kind']:<13} {row['bytes'] / 2**20:>10.1f} MiB  {row['item']}"
        + (f" ({row['share']})" if "/" in row["share"] else "")
        + (f" in {row['memory']} memory" if row["memory"] != "device" else "")
        for row in document["ledger"]
    ]
    lines += _layout_lines(document["layouts"])
    lines += _price_lines(document["layouts"][0]["prediction"])
    for row in document["decisions"]:
        if not row["key"].startswith("ops."):
            lines.append(f"{row['key']} = {row['value']}  ({row['origin']}) {row['why']}")
            losers = row["losers"]
            lines += [f"    not {loser['value']}: {_cut(loser)}" for loser in losers[:MOST_LOSERS]]
            if len(losers) > MOST_LOSERS:
                more = len(losers) - MOST_LOSERS
                lines.append(f"    nor {more} more (--explain {row['key']})")
    phases: dict[tuple[str, str, str], list[str]] = {}
    for name, choice in document["plan"]["ops"].items():
        site, _, phase = name.partition("@")
        phases.setdefault((site, choice["impl"], choice["quality"]), []).append(phase)
    lines += [
        f"  {site:<20} {impl:<28} {quality:<10} {', '.join(found)}"
        for (site, impl, quality), found in phases.items()
    ]
    return "\n".join(lines)


def _layout_lines(layouts: list[dict[str, Any]]) -> list[str]:
    """One line a layout; nothing where the machine has one device."""
    if len(layouts) == 1:
        return []
    wide = max(10, *(len(row["name"]) for row in layouts))
    lines = [
        f"  {'layout':<{wide}} {'cached tokens':>14} {'max context':>12} {'prefill':>9} "
        f"{'decode':>8}   tok/s, predicted"
    ]
    for row in layouts:
        shown = f"  {row['name']:<{wide}} "
        if row["feasible"]:
            speeds = (row["prefill_tok_s"], row["decode_tok_s"])
            prefill, decode = ("-" if speed is None else f"{speed:,.0f}" for speed in speeds)
            shown += f"{row['kv_tokens']:>14,} {row['max_context']:>12,} {prefill:>9} {decode:>8}"
            shown += "" if row["built"] else "   planned only"
        else:
            shown += f"no: {_cut(row)}"
        lines.append(shown)
    return lines


def _price_lines(prediction: dict[str, Any] | None) -> list[str]:
    """What tokens cost on a machine whose file says its price."""
    each = {} if prediction is None else prediction
    prices = [
        f"{what} {each[key]:,.4g}"
        for what, key in (("of prompts", "prompt_price"), ("of answers", "answer_price"))
        if each.get(key) is not None
    ]
    return [f"a million tokens cost, predicted: {', '.join(prices)}"] if prices else []


def _cut(loser: dict[str, Any], limit: int = 160) -> str:
    first = str(loser["reasons"][0]["message"]) if loser["reasons"] else "no reason given"
    more = len(loser["reasons"]) - 1
    shown = first if len(first) <= limit else first[:limit].rstrip() + " ..."
    return shown + (" (all reasons: --json)" if more > 0 or shown != first else "")


_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "fastapi", "uvicorn", "pyzmq")


def version(*, as_json: Json = False) -> Result:
    """The version of this program and of what it stands on.

    Example: metainfer version --json
    """
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
