"""``metainfer simulate``: what a plan would serve, on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from metainfer.cli.examine import MachineName, Model
from metainfer.cli.flags import NO_FLAGS, EngineFlags, Json
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError

CONDITIONS = ("machine", "plan", "threads", "text_class", "load_average", "time")
"""Without which a measurement is not comparable (B-36)."""
TOLERANCE = 0.15
"""Relative error that is no mismatch, or twice the measured spread if that is more."""


def _flag(name: str, text: str) -> Parameter:
    return Parameter(name=name, help=text, negative="")


def simulate(
    model: Model = None,
    *,
    machine: MachineName = None,
    workload: Annotated[
        str | None, _flag("--workload", "closed:..., poisson:..., shared:..., agentic:..., file:P")
    ] = None,
    curve: Annotated[
        tuple[int, ...], _flag("--curve", "concurrency of a closed loop (repeatable): a row each")
    ] = (),
    seed: Annotated[int, _flag("--seed", "of the drawn requests")] = 0,
    acceptance: Annotated[
        float, _flag("--acceptance", "chance that a draft is accepted, with --draft")
    ] = 0.0,
    compare: Annotated[
        Path | None, _flag("--compare", "what bench serve --json printed: state the error")
    ] = None,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """First tokens, gaps and throughput under a load, without running the model.

    Example: metainfer simulate --model smollm2-135m --workload closed:concurrency=4,output=64
    """
    from metainfer.simulator.run import simulate as serve
    from metainfer.simulator.workload import draw

    if not 0.0 <= acceptance < 1.0:
        raise UsageError(f"--acceptance is {acceptance:g}.", "Pass a part below 1, like 0.6.")
    record = _record(compare) if compare is not None else {}
    if record:
        if workload is not None or curve:
            raise UsageError("--compare brings its own workload.", "Leave the other out.")
        workload, seed = str(record["workload"]), _seeds(record)[0]
    spec = workload or "closed:concurrency=8"
    world, told = _world(model, machine, engine)
    vocab = world.cost.work.vocab
    if curve:
        rows = []
        for concurrency in curve:
            each = _with_concurrency(spec, concurrency)
            found = serve(world, draw(each, vocab, seed), acceptance=acceptance, seed=seed)
            rows.append({"concurrency": concurrency, "workload": each, **found.to_json()})
        return Result({**told, "curve": rows}, "\n".join(_line(row) for row in rows))
    seeds = _seeds(record) if record else [seed]
    runs = [
        serve(world, draw(spec, vocab, each), acceptance=acceptance, seed=each).to_json()
        for each in seeds
    ]
    document: dict[str, Any] = {**told, "workload": spec, "seed": seed, **runs[0]}
    if not record:
        return Result(document, _text(document))
    return _compared(document | {"seeds": seeds}, runs, record)


def _world(model: str | None, machine: str | None, engine: EngineFlags) -> Any:
    """The world, and what the document says of it."""
    from metainfer.engine.elsewhere import describe
    from metainfer.engine.machine import open_machine
    from metainfer.planner.opening import open_model
    from metainfer.simulator.world import world_of

    if model is None:
        raise UsageError("No model is given.", "Pass --model MODEL.")
    intent = engine.intent(model)
    opened = open_model(model)
    if machine is not None:
        there = describe(machine, intent)
        facts, resolved = there.facts, there.resolve(opened, intent)
    else:
        here = open_machine(intent.platform)
        here.recall(here.resolve(opened, intent).plan.model.dtype)
        facts, resolved = here.facts, here.resolve(opened, intent)
    world = world_of(resolved, facts)
    plan, prediction = resolved.plan, resolved.chosen.prediction
    speed = next(each for each in plan.decisions if each.key == "speed")
    return world, {
        "model": plan.model.reference,
        "machine": plan.machine,
        "plan": plan.fingerprint,
        "layout": resolved.chosen.layout.name,
        "calibrated": bool(prediction and prediction.calibrated),
        "band": None if prediction is None else list(prediction.band),
        "speed": f"{speed.value}: {speed.why}",
    }


def _with_concurrency(spec: str, concurrency: int) -> str:
    name, _, text = spec.partition(":")
    if name not in ("closed", "shared"):
        raise UsageError(f"--curve needs a closed loop, not {name!r}.", "Use closed or shared.")
    kept = [item for item in text.split(",") if item and not item.startswith("concurrency=")]
    return f"{name}:{','.join([f'concurrency={concurrency}', *kept])}"


def _record(path: Path) -> dict[str, Any]:
    """What ``bench serve --json`` printed.

    Raises:
        UsageError: the file cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}.", "Write it with bench serve --json."
        ) from None
    if (
        not isinstance(found, dict)
        or not {"workload", "seed", "measured", "spread"} <= found.keys()
    ):
        raise UsageError(f"{path} is no measurement.", "Write it with bench serve --json.")
    return found


def _seeds(record: dict[str, Any]) -> list[int]:
    """Of the clean repeats: each was drawn anew, and its requests are simulated, no others."""
    runs = record.get("runs") or ()
    return [int(run["seed"]) for run in runs if not run["contaminated"]] or [int(record["seed"])]


def _compared(
    document: dict[str, Any], runs: Sequence[dict[str, Any]], record: dict[str, Any]
) -> Result:
    """Error of each figure that both have, medians over the same draws; exit 1 when one is off."""
    from metainfer.bench.serve import medians
    from metainfer.simulator.outcome import compared

    errors: dict[str, Any] = compared(medians(runs)["measured"], record["measured"])
    off = []
    for key, row in errors.items():
        row["allowed"] = max(TOLERANCE, 2 * float(record["spread"].get(key) or 0.0))
        row["ok"] = abs(row["error"]) <= row["allowed"]
        off += [] if row["ok"] else [key]
    told = record.get("conditions")
    lacking = [key for key in CONDITIONS if not isinstance(told, dict) or told.get(key) is None]
    document |= {"comparison": errors, "lacking": lacking, "ok": not off and not lacking}
    lines = [
        f"{key:<14} simulated {row['simulated']:>10.4g}  measured {row['measured']:>10.4g}  "
        f"{row['error']:+.1%} (allowed {row['allowed']:.0%}){'' if row['ok'] else '  OFF'}"
        for key, row in errors.items()
    ]
    if lacking:
        lines.append(f"not comparable: the measurement does not say {', '.join(lacking)}")
    text = "\n".join([document["speed"], *lines])
    return Result(document, text, code=0 if document["ok"] else 1)


def _text(document: dict[str, Any]) -> str:
    lines = [
        f"{key}: {document[key]}" for key in ("model", "machine", "layout", "speed", "workload")
    ]
    lines.append(_line(document))
    for name in ("ttft_s", "itl_s", "e2e_s"):
        found = document[name]
        shown = ", ".join(f"{key} {value:.4g}" for key, value in found.items() if value is not None)
        lines.append(f"{name}: {shown}")
    hits = document["hit_rate"]
    lines.append(
        f"cache: {document['kv_used_max']:.0%} used at most, hit rate "
        f"{'-' if hits is None else f'{hits:.0%}'}, {document['preemptions']} preemptions"
    )
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    head = f"C{row['concurrency']:<5} " if "concurrency" in row else ""
    if not row["requests"]:
        return f"{head}nothing was served"
    return (
        f"{head}{row['requests']} requests in {row['duration_s']:.4g} s: "
        f"{row['input_tok_s']:,.0f} tok/s in, {row['output_tok_s']:,.1f} tok/s out, "
        f"first token p50 {row['ttft_s']['p50']:.4g} s p95 {row['ttft_s']['p95']:.4g} s"
    )
