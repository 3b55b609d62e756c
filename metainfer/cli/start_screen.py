"""What an operator reads when a server starts: what was asked, and once it is ready what it is.

Everything is read off the plan's document, so the same lines follow from ``/plan``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import metainfer
from metainfer.cli.settings import Settings
from metainfer.engine.protocol import EngineInfo

_SHOWN = 4  # implementations that are not native, by name


def opening(model: str, made: Settings) -> list[str]:
    """Version, model, and every setting that is not a default with who set it."""
    lines = [f"metainfer {metainfer.__version__}: serve {model}"]
    for setting in made.given.values():
        lines.append(f"  {setting.flag} {setting.shown}  ({setting.said})")
    return lines


def summary(info: EngineInfo, url: str, names: tuple[str, ...]) -> list[str]:
    """What requests meet: address, sizes, layout, kernels, verification."""
    typical = min(info.max_context, 4096)
    at_once = max(1, min(info.max_running, info.kv_tokens // typical))
    total = sum(seconds for _, seconds in info.start_phases)
    lines = [
        f"Ready after {total:.1f} s: {url}/v1  (model {', '.join(names)})",
        f"  page {url}/, health {url}/health, metrics {url}/metrics, plan {url}/plan",
        f"  context {info.max_context} tokens, cache {info.kv_tokens} tokens: "
        f"about {at_once} concurrent requests of {typical} tokens",
    ]
    document = info.plan
    plan = document.get("plan")
    if isinstance(plan, dict):
        if said := plan.get("emulated"):
            whose = "rank {rank} of {ranks} of {machine}".format(**said)
            lines.append(f"  EMULATED: {whose}; its peers are a stand-in, answers mean nothing")
        lines += [f"  {line}" for line in _machine(plan, _decisions(document))]
        lines += [f"  {line}" for line in _kernels(plan.get("ops"))]
    if changed := document.get("drift"):
        lines.append(f"  changed since the last start here: {'; '.join(changed)}")
    verdict = document.get("verification", {}).get("text")
    lines.append(f"  {verdict or 'verification: none on record; metainfer verify MODEL makes one'}")
    return lines


def _decisions(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in document.get("decisions", ())}


def _machine(plan: dict[str, Any], decided: dict[str, dict[str, Any]]) -> Iterator[str]:
    if "device" in plan:
        yield (
            f"device {plan['device']} ({plan['platform']}), {plan['threads']} threads, "
            f"{plan['model']['dtype']}, plan {plan['fingerprint']}"
        )
    layouts = [layout["name"] for layout in plan.get("layouts", ())]
    if layouts:
        found = {key: row["value"] for key, row in decided.items() if key.startswith("collective")}
        said = ", ".join(f"{key}: {value}" for key, value in found.items())
        alone = layouts == ["single"]
        yield f"layout {', '.join(layouts)}; {said or _no_collectives(alone)}"


def _no_collectives(alone: bool) -> str:
    return "one card, no collectives" if alone else "collectives: see the plan"


def _kernels(ops: Any) -> Iterator[str]:
    if not isinstance(ops, dict):
        return
    chosen = dict.fromkeys(str(choice["impl"]) for choice in ops.values())
    yield f"ops: {', '.join(chosen)}"
    slow = {
        f"{site.partition('@')[0]} {choice['impl']} ({choice['quality']})": None
        for site, choice in ops.items()
        if choice["quality"] != "native"
    }
    if slow:
        shown = "; ".join(list(slow)[:_SHOWN])
        more = f" and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
        yield f"not native: {shown}{more}; why: metainfer doctor"
