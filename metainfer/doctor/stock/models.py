"""What the audit must know of a model: from its config.json, else from its name, and says which."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metainfer.doctor.data_files import rows

DATA = "stock-models.toml"
#: Facts of a row, and the config key that overrules each.
KEYS = {
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "experts": "n_routed_experts",
    "moe_intermediate": "moe_intermediate_size",
    "index_topk": "index_topk",
}
FLAGS = ("sparse", "pooled", "index_sharing")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """`facts`: by name, without those that are unknown. `how`: what they were taken from, in full;
    `source`: in a word or two, for evidence."""

    reference: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    how: str = "not recognised"
    source: str = "the model is not recognised"


def recognise(reference: str) -> ModelTraits:
    """The model of a folder with config.json, or of a name. Never raises."""
    if not reference:
        return ModelTraits(reference="", how="no model was given")
    config = _config(Path(reference))
    found = None
    if config is not None:
        names = set(config.get("architectures") or ())
        listed = [row for row in rows(DATA, "model") if names & set(row["architectures"])]
        shares = any("shared" in str(kind) for kind in config.get("indexer_types") or ())
        found = next((row for row in listed if bool(row.get("index_sharing")) == shares), None)
        found = found or next(iter(listed), None)
        how = f"{Path(reference) / 'config.json'}: {', '.join(sorted(names)) or 'no architectures'}"
    else:
        how = f"recognised by its name, {reference}; nothing of it was read"
        found = next(
            (row for row in rows(DATA, "model") if re.search(row["name"], reference, re.I)), None
        )
    if found is None:
        return ModelTraits(reference=reference, how=f"not recognised: {how}")
    facts = {key: found[key] for key in ("family", "row", "index_ratio", *KEYS) if key in found}
    facts |= {flag: bool(found.get(flag)) for flag in FLAGS}
    for key, name in KEYS.items():
        text = (config or {}).get("text_config", config or {})
        if isinstance(text.get(name), int):
            facts[key] = text[name]
    weights = _weights(config, reference) or found["weights"]
    if weights:
        facts["weights"] = weights
    return ModelTraits(
        reference=reference,
        facts=facts,
        how=f"{how} ({found['origin']})",
        source="the model's name" if config is None else "config.json",
    )


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        body = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def _weights(config: dict[str, Any] | None, reference: str) -> str:
    """How the experts are stored, as far as the checkpoint or its name says it."""
    quantized = (config or {}).get("quantization_config")
    said = json.dumps(quantized) if quantized else reference
    for mark in ("nvfp4", "mxfp4", "fp8", "int8", "int4", "bf16"):
        if mark in said.lower():
            return mark
    if config is not None and (config.get("expert_dtype") == "fp4"):
        return "mxfp4"
    return "" if config is None or quantized else "bf16"
