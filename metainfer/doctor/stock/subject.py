"""Machine, model and flags as one set of named facts, None for unknown, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from metainfer.doctor.data_files import rows
from metainfer.doctor.evidence import origin_of
from metainfer.doctor.stock.chunks import advised_chunk, effective_rows
from metainfer.doctor.stock.command_line import StockLine, defaults, table
from metainfer.doctor.stock.conditions import holds
from metainfer.doctor.stock.models import ModelTraits
from metainfer.platform.facts import CUDA, Facts

#: Chips of these capabilities have no NVLink at all (vendor's sheets: 8.9 and 12.x cards).
WITHOUT_NVLINK = ((8, 9), (12, 0), (12, 1))
#: Bytes of a bfloat16 activation.
WIDE = 2
FLOAT32 = 4
MODEL_FACTS = (
    "family", "sparse", "pooled", "index_sharing", "hidden", "heads", "experts",
    "moe_intermediate", "index_topk", "index_ratio", "row", "weights",
)  # fmt: skip
RESOLVED = ("kv", "dsa_prefill", "dsa_decode")


@dataclass(frozen=True, slots=True)
class Subject:
    """`facts` by name and `origins` likewise."""

    facts: Mapping[str, Any]
    origins: Mapping[str, str]

    def evidence(self, names: list[str]) -> str:
        """The named facts with their origins."""
        shown = dict.fromkeys(names)
        return "; ".join(f"{name} = {self.facts[name]} ({self.origins[name]})" for name in shown)


def subject(machine: Facts, line: StockLine, model: ModelTraits) -> Subject:
    """Everything that a condition of the engine's tables may look at."""
    facts: dict[str, Any] = {}
    origins: dict[str, str] = {}
    _machine(machine, facts, origins)
    for name in MODEL_FACTS:
        facts[name], origins[name] = model.facts.get(name), model.source
    usual = defaults(line.engine)
    for row in rows(table(line.engine), "flag"):
        key = row["key"]
        if not key or key in facts:
            continue
        if key in line.given:
            facts[key], origins[key] = line.given[key], f"given: {row['names'][0]}"
        else:
            facts[key], origins[key] = usual.get(key), "not given"
    _derived(line.engine, facts, origins)
    _resolve(line, facts, origins)
    return Subject(facts, origins)


def _machine(machine: Facts, facts: dict[str, Any], origins: dict[str, str]) -> None:
    device = machine.device
    pair = device.capability if device.kind == CUDA else None
    facts["capability"] = None if pair is None else f"{pair[0]}.{pair[1]}"
    facts["major"] = None if pair is None else pair[0]
    facts["shared"] = device.shared_bytes_per_block if device.kind == CUDA else None
    origins["shared"] = origin_of(machine, "devices.0.shared_bytes_per_block")
    facts["gpus"] = len(machine.devices) if device.kind == CUDA else 0
    facts["device_name"] = device.name
    for name in ("capability", "major"):
        origins[name] = origin_of(machine, "devices.0.capability")
    origins["device_name"] = origin_of(machine, "devices.0.name")
    origins["gpus"] = "the machine's devices"
    peers = [link for link in machine.links if link.source >= 0]
    kinds = {link.kind for link in peers}
    first = next((n for n, link in enumerate(machine.links) if link.source >= 0), 0)
    facts["nvlink"] = None
    origins["nvlink"] = origin_of(machine, f"links.{first}.kind")
    if pair in WITHOUT_NVLINK:
        facts["nvlink"] = False
        origins["nvlink"] = "derived: chips of this capability have no NVLink"
    elif kinds and None not in kinds:
        facts["nvlink"] = kinds == {"nvlink"}
    claims = [(link.peer_read, link.peer_write) for link in peers]
    refused = any(False in claim for claim in claims)
    proven = bool(claims) and all(claim == (True, True) for claim in claims)
    facts["peer"] = False if refused else True if proven else None
    origins["peer"] = origin_of(machine, f"links.{first}.peer_read")


def _derived(engine: str, facts: dict[str, Any], origins: dict[str, str]) -> None:
    def put(name: str, value: Any, how: str) -> None:
        facts[name], origins[name] = value, f"derived: {how}"

    tp, dp = int(facts.get("tp") or 1), int(facts.get("dp") or 1)
    chunk: int | None = facts.get("chunk")
    hidden: int | None = facts.get("hidden")
    divided = engine == "sglang" and bool(facts.get("dp_attention"))
    each = None if chunk is None else effective_rows(chunk, dp) if divided else chunk
    put("chunk_per_rank", each, "chunk over data-parallel ranks")
    payload = None if each is None or hidden is None else each * hidden * WIDE
    put("prefill_payload", payload, "rows x hidden x 2 bytes")
    context, ratio = facts.get("context"), facts.get("index_ratio")
    scores = each * context // ratio * FLOAT32 if each and context and ratio else None
    if facts.get("sparse") is False:
        scores = 0
    put("indexer_bytes", scores, "rows x context / tokens a key x 4 bytes")
    put("advised_chunk", advised_chunk(dp), "threshold x data-parallel ranks")
    ranks = tp if engine == "sglang" else tp * dp
    put("ranks", ranks, "the layout's product")
    put("ranks_over", ranks > facts["gpus"], "ranks against GPUs")
    put("any_overlap", bool(facts.get("tbo")) or bool(facts.get("sbo")), "overlap switches")


def _resolve(line: StockLine, facts: dict[str, Any], origins: dict[str, str]) -> None:
    """Values that the engine chooses itself, in its own order; unknown ends the search."""
    if line.engine != "sglang":
        return
    for key in RESOLVED:
        if key in line.given:
            continue
        facts[key], origins[key] = None, "the engine's choice is not known"
        for row in rows(table(line.engine), "resolve"):
            if row["key"] != key:
                continue
            verdict = holds(row["when"], facts)
            if verdict is None:
                break
            if verdict:
                facts[key], origins[key] = row["value"], f"the engine's choice: {row['origin']}"
                break
