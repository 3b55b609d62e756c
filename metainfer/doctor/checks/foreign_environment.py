"""Variables of NCCL, CUDA, torch, Triton and other engines that remove or require a path.

The table is ``data/environment.toml``, each row with its origin. A name of those families that
is not in the table is listed too: what it does is unknown, which is not "nothing".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from metainfer.core import env
from metainfer.doctor.data_files import rows
from metainfer.doctor.finding import Finding, Severity, information, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA

PREFIXES = ("NCCL_", "CUDA_", "TORCH", "PYTORCH_", "TRITON_", "NVIDIA_", "VLLM_", "SGLANG_")
KINDS = ("switch", "enable", "value", "harmless")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One row; the fields are those of the table."""

    name: str
    kind: str
    origin: str
    severity: str = "information"
    on: str = ""
    off: str = ""
    values: tuple[str, ...] = ()
    anywhere: bool = False
    engine: str = ""


@cache
def table() -> Mapping[str, Variable]:
    """Name -> row."""
    found = {}
    for row in rows("environment.toml", "variable"):
        variable = Variable(**{**row, "values": tuple(row.get("values", ()))})
        assert variable.kind in KINDS
        found[variable.name] = variable
    return found


def effect(variable: Variable, value: str) -> str:
    """What `value` does, in words; "" when it does nothing."""
    off = env.is_off(value)
    if variable.kind == "switch":
        return "" if off else variable.on
    if variable.kind == "enable":
        return variable.off if off else variable.on
    if variable.kind == "value":
        acts = bool(value.strip()) and (not variable.values or value.strip() in variable.values)
        return variable.on if acts else ""
    return ""


def check(inputs: Inputs) -> list[Finding]:
    if inputs.local is None:
        return []
    cuda = inputs.facts.device.kind == CUDA
    found, unlisted = [], []
    for name, value in sorted(inputs.local.environ.items()):
        variable = table().get(name)
        if variable is None:
            if cuda and name.startswith(PREFIXES) and value:
                unlisted.append(f"{name}={value}")
            continue
        what = effect(variable, value)
        if what and (cuda or variable.anywhere):
            found.append(_finding(variable, value, what))
    if unlisted:
        names = ", ".join(entry.partition("=")[0] for entry in unlisted)
        what = f"what these variables do to our paths: {names}"
        remedy = f"unset {names.replace(',', '')}, if nothing else needs them."
        found.append(unknown("env.unlisted", names, what, remedy, "; ".join(unlisted)))
    return found


def _finding(variable: Variable, value: str, what: str) -> Finding:
    proof = f"{variable.name}={value}"
    remedy = f"unset {variable.name}"
    risk = "whoever set it may have had a reason: a link that hangs or a card to leave out"
    if variable.engine:
        what = f"{what}. Only {variable.engine} reads it; nothing changes here"
        return information("env.engine", variable.name, f"{what}.", remedy, proof, risk)
    grade = Severity(variable.severity)
    return Finding("env.foreign", grade, variable.name, f"{what}.", remedy, proof, risk)
