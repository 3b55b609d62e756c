"""What the user wrote. Few fields, each optional; the resolver decides the rest.

`None` means "you decide". `origins` says where each given value came from, so that a plan can
tell a user's word from ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields

from metainfer.core.ledger import Origin

MAX_PENDING = 1024
"""Requests that may be queued or running, where nobody says otherwise."""

GOALS = ("throughput", "latency", "ttft", "context")

DECISIONS: Mapping[str, str] = {
    "model": "model",
    "platform": "platform",
    "goal": "goal_layout",
    "dtype": "model.dtype",
    "context": "limits.max_context",
    "concurrency": "limits.max_running",
    "max_waiting": "limits.max_waiting",
    "kv_bytes": "kv_tokens",
    "memory_share": "kv_tokens",
    "page_tokens": "kv_groups",
    "chunk_tokens": "limits.step_tokens",
    "mixed_tokens": "limits.mixed_prefill_tokens",
    "threads": "threads",
    "prefix_cache": "prefix_cache",
    "graphs": "graph_buckets",
    "overlap": "overlap",
    "halves": "halves",
    "sum_pieces": "sum_pieces",
    "gathers_beside": "gathers_beside",
    "shared_beside": "shared_beside",
    "rounded_from": "rounded_from",
    "prefill_from": "prefill_from",
    "grammar": "grammar",
    "draft": "draft",
    "model_options": "model",
    "ops": "ops",
    "layouts": "bundle",
    "parallel": "layouts",
    "collectives": "collectives",
    "one_card": "layouts",
    "rank_of": "emulated",
    "of_machine": "emulated",
    "allow_fallback": "ops",
    "adapters": "adapters",
}
"""Field of an intent -> the decision of the plan that it bears on (``ops``: all of ``ops.*``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A user's wishes for one engine.

    `model`: a model reference. `platform`: ``auto`` or a platform's name. `dtype`: activation
    type (``float32``, ``bfloat16`` ...). `context`: tokens one sequence must be able to hold.
    `concurrency`: sequences running at once. `max_waiting`: requests that may wait beside them.
    `kv_bytes`: device memory for the cache. `memory_share`: the part of the device's memory
    that may be used, above 0 up to 1. `chunk_tokens`: most tokens in a step, `mixed_tokens`: of
    prompts in it while answers run. `threads`: CPU threads. `ops`: op or site -> implementation.
    `layouts`: role -> layout id. `allow_fallback`: ops that may take a reference path.
    `parallel`: how cards share the model (``single``, ``tp8``, ``ep8`` ...), by name.
    `collectives`: the backend behind them (``auto``, ``ipc``, ``host``, ``nccl``). `one_card`: all
    ranks on the first card, to prove a layout. `rank_of`, `of_machine`: run one rank of so many of
    a named machine, its peers emulated.
    `adapters`: name -> folder of a LoRA adapter.
    `prefix_cache`: reuse of cached prefixes. `graphs`: steps may be captured. `overlap`: these may
    be launched before the one ahead was read. `halves`: from so many tokens on, chunks are computed
    as two halves in turns; `sum_pieces`: from so many on, others sum products piece by piece;
    `gathers_beside`: from so many on, ranks that share a chunk's rows gather beside computing;
    `shared_beside`: up to so many, the shared expert beside the routed ones; `rounded_from`: from
    so many rows on, what is sent to experts that ranks share is rounded first; 0: never.
    `prefill_from`: steps of fewer prompt tokens are computed as decodes are, where prompts have a
    layout of their own; 0: none.
    `draft`: speculation, ``off``, ``ngram:N`` or ``mtp:N``. `grammar`: the grammar library.
    `model_options`: switches of the model's family, where its published code and its deployments
    differ. `said`: field -> where its value came from, in words, where it was not simply a flag.
    """

    model: str
    platform: str = "auto"
    goal: str = "throughput"
    dtype: str | None = None
    context: int | None = None
    concurrency: int | None = None
    max_waiting: int | None = None
    kv_bytes: int | None = None
    memory_share: float | None = None
    page_tokens: int | None = None
    chunk_tokens: int | None = None
    mixed_tokens: int | None = None
    threads: int | None = None
    prefix_cache: bool = True
    graphs: bool = True
    overlap: bool = True
    halves: int | None = None
    sum_pieces: int | None = None
    gathers_beside: int | None = None
    shared_beside: int | None = None
    rounded_from: int | None = None
    prefill_from: int | None = None
    draft: str | None = None
    grammar: str | None = None
    model_options: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    parallel: str | None = None
    collectives: str | None = None
    one_card: bool = False
    rank_of: int | None = None
    of_machine: str | None = None
    allow_fallback: tuple[str, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, Origin] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> Origin:
        """Who set field `name`: as given, else a flag when it differs from the default."""
        if name in self.origins:
            return self.origins[name]
        declared = next(f for f in fields(self) if f.name == name)
        made = declared.default_factory
        default = declared.default if made is MISSING else made()
        return Origin.DEFAULT if getattr(self, name) == default else Origin.FLAG
