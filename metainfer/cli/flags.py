"""Flags that describe an engine, and the `Intent` they become."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from metainfer.cli import settings
from metainfer.core import env
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin

SIZES = Group("Sizes", sort_key=2)
CHOICES = Group("Choices of the plan", sort_key=3)
SOURCES = Group("Where values come from", sort_key=4)
OUTPUT = Group("Output", sort_key=9)

Json = Annotated[
    bool,
    Parameter(name="--json", negative="", help="print one JSON document", group=OUTPUT),
]
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str, flag: str) -> int:
    """Bytes of ``4G``, ``512MiB``, ``1.5GB``, ``1000``. K, M, G, T count in 1024s.

    Raises:
        UsageError: not a size, or zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * 1024 ** _POWER[match[2].lower()]) if match else 0
    if size <= 0:
        raise UsageError(f"{flag} {text!r} is no size.", "Write it like 512MiB or 24GiB.")
    return size


def parse_pairs(items: Sequence[str], flag: str) -> dict[str, str]:
    """``["a=b"]`` as a mapping.

    Raises:
        UsageError: no ``=``, an empty side, or a key given twice.
    """
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not (equals and key and value):
            raise UsageError(
                f"{flag} {item!r} is not of the form KEY=VALUE.", f"Write {flag} NAME=VALUE."
            )
        if key in pairs:
            raise UsageError(f"{flag} gives {key!r} twice.", "Keep one of them.")
        pairs[key] = value
    return pairs


Positive = Annotated[int | None, Parameter(validator=lambda kind, value: _positive(value))]


def _positive(value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError("must be at least 1")


INTENT_FIELDS = {
    "--context": "context",
    "--concurrency": "concurrency",
    "--max-pending": "max_waiting",
    "--kv-memory": "kv_bytes",
    "--memory-share": "memory_share",
    "--chunk-tokens": "chunk_tokens",
    "--mixed-prefill-tokens": "mixed_tokens",
    "--page-tokens": "page_tokens",
    "--threads": "threads",
    "--goal": "goal",
    "--dtype": "dtype",
    "--platform": "platform",
    "--op": "ops",
    "--layout": "layouts",
    "--parallel": "parallel",
    "--collectives": "collectives",
    "--one-card": "one_card",
    "--rank-of": "rank_of",
    "--allow-fallback": "allow_fallback",
    "--adapter": "adapters",
    "--no-prefix-cache": "prefix_cache",
    "--no-graphs": "graphs",
    "--no-overlap": "overlap",
    "--halves": "halves",
    "--sum-pieces": "sum_pieces",
    "--gathers-beside": "gathers_beside",
    "--shared-beside": "shared_beside",
    "--rounded-from": "rounded_from",
    "--prefill-from": "prefill_from",
    "--draft": "draft",
    "--grammar-backend": "grammar",
    "--model-option": "model_options",
}
"""Flag -> the field of the `Intent` that it sets."""


def _flag(*names: str, text: str, group: Group = CHOICES) -> Parameter:
    return Parameter(name=names, help=text, group=group, negative="")


def _size(*names: str, text: str) -> Parameter:
    return _flag(*names, text=text, group=SIZES)


Adapters = Annotated[
    tuple[str, ...],
    _flag("--adapter", text="NAME=FOLDER: a LoRA adapter as PEFT saves it (repeatable)"),
]
"""Of the verbs that can answer with adapters."""

RankMachine = Annotated[
    str | None,
    _flag("--machine", text="of --rank-of: the machine whose rank it is, a name or FILE.toml"),
]
"""Of the verbs that run one rank of several."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Wishes; each that is left out is decided by the planner, which says why."""

    context: Annotated[Positive, _size("--context", text="tokens one sequence may hold")] = None
    concurrency: Annotated[Positive, _size("--concurrency", text="sequences running at once")] = (
        None
    )
    kv_memory: Annotated[
        str | None, _size("--kv-memory", text="memory for the cache, like 512MiB or 24GiB")
    ] = None
    memory_share: Annotated[
        float | None,
        _size("--memory-share", text="part of the device's memory that may be used, like 0.9"),
    ] = None
    chunk_tokens: Annotated[Positive, _size("--chunk-tokens", text="most tokens in one step")] = (
        None
    )
    mixed_prefill_tokens: Annotated[
        Positive,
        _size("--mixed-prefill-tokens", text="most prompt tokens in a step while answers run"),
    ] = None
    page_tokens: Annotated[Positive, _size("--page-tokens", text="tokens in one cache page")] = None
    threads: Annotated[Positive, _size("--threads", text="CPU threads")] = None
    goal: Annotated[
        Literal["throughput", "latency", "ttft", "context"],
        _flag("--goal", text="what the plan is made for"),
    ] = "throughput"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        _flag("--dtype", text="type of activations"),
    ] = None
    platform: Annotated[
        str | None, _flag("--platform", text="auto, or the name of a platform; fatal if it fails")
    ] = None
    op: Annotated[
        tuple[str, ...],
        _flag("--op", text="OP=IMPL or OP@PHASE=IMPL: use exactly this (repeatable)"),
    ] = ()
    layout: Annotated[
        tuple[str, ...], _flag("--layout", text="ROLE=ID: use exactly this layout (repeatable)")
    ] = ()
    parallel: Annotated[
        str | None, _flag("--parallel", text="layout over cards: single, tp8, ep8, 2xtp4 ...")
    ] = None
    collectives: Annotated[
        Literal["auto", "ipc", "host", "nccl"] | None,
        _flag("--collectives", text="what carries them between cards"),
    ] = None
    one_card: Annotated[
        bool, _flag("--one-card", text="all ranks on the first card: proves a layout, slowly")
    ] = False
    rank_of: Annotated[
        int | None,
        _flag("--rank-of", text="run one rank of N, its peers emulated: times of it, no answers"),
    ] = None
    allow_fallback: Annotated[
        tuple[str, ...],
        _flag("--allow-fallback", text="OP that may take a reference path (repeatable)"),
    ] = ()
    no_prefix_cache: Annotated[
        bool, _flag("--no-prefix-cache", text="never reuse cached prefixes")
    ] = False
    no_graphs: Annotated[bool, _flag("--no-graphs", text="capture no steps, launch op by op")] = (
        False
    )
    no_overlap: Annotated[
        bool, _flag("--no-overlap", text="read each step before the next is launched")
    ] = False
    halves: Annotated[
        int | None,
        _flag("--halves", text="chunks from N tokens on as two halves in turns; 0: never"),
    ] = None
    sum_pieces: Annotated[
        int | None,
        _flag("--sum-pieces", text="sums beside products, by pieces, from N tokens on; 0: never"),
    ] = None
    gathers_beside: Annotated[
        int | None,
        _flag(
            "--gathers-beside", text="a shared chunk's gathers beside, from N tokens on; 0: never"
        ),
    ] = None
    shared_beside: Annotated[
        int | None,
        _flag("--shared-beside", text="shared beside routed experts up to N tokens; 0: never"),
    ] = None
    rounded_from: Annotated[
        int | None,
        _flag("--rounded-from", text="rows to experts rounded first from N tokens on; 0: never"),
    ] = None
    prefill_from: Annotated[
        int | None,
        _flag("--prefill-from", text="of a pair, chunks below N tokens as decodes are; 0: none"),
    ] = None
    draft: Annotated[
        str | None,
        _flag(
            "--draft",
            text="speculation: off, auto (by gain), ngram:N (tokens seen before), mtp:N (a module)",
        ),
    ] = None
    grammar_backend: Annotated[
        Literal["auto", "llguidance", "xgrammar"] | None,
        _flag("--grammar-backend", text="library behind structured output and enforced calls"),
    ] = None
    model_option: Annotated[
        tuple[str, ...],
        _flag("--model-option", text="NAME=VALUE: a switch of the model's family (repeatable)"),
    ] = ()

    config: Annotated[
        Path | None,
        _flag("--config", text="FILE.toml or .yaml with flags by name", group=SOURCES),
    ] = None

    def intent(
        self, model: str, adapters: Sequence[str] = (), of_machine: str | None = None
    ) -> Intent:
        """The `Intent`, with the origin of each value that the user gave. `of_machine`: whose rank
        is emulated."""
        given = {
            INTENT_FIELDS[flag]: setting
            for flag, setting in settings.current.given.items()
            if flag in INTENT_FIELDS
        }
        origins = {name: setting.origin for name, setting in given.items()}
        platform = self.platform
        if platform is not None:
            origins.setdefault("platform", Origin.FLAG)
        elif env.get("METAINFER_PLATFORM"):
            platform = env.get("METAINFER_PLATFORM")
            origins["platform"] = Origin.ENV
        return Intent(
            model=model,
            platform=platform or "auto",
            goal=self.goal,
            dtype=self.dtype,
            context=self.context,
            concurrency=self.concurrency,
            kv_bytes=None if self.kv_memory is None else parse_size(self.kv_memory, "--kv-memory"),
            memory_share=self.memory_share,
            page_tokens=self.page_tokens,
            chunk_tokens=self.chunk_tokens,
            mixed_tokens=self.mixed_prefill_tokens,
            threads=self.threads,
            prefix_cache=not self.no_prefix_cache,
            graphs=not self.no_graphs,
            overlap=not self.no_overlap,
            halves=self.halves,
            sum_pieces=self.sum_pieces,
            gathers_beside=self.gathers_beside,
            shared_beside=self.shared_beside,
            rounded_from=self.rounded_from,
            prefill_from=self.prefill_from,
            draft=self.draft,
            grammar=self.grammar_backend,
            model_options=parse_pairs(self.model_option, "--model-option"),
            ops=parse_pairs(self.op, "--op"),
            layouts=parse_pairs(self.layout, "--layout"),
            parallel=self.parallel,
            collectives=self.collectives,
            one_card=self.one_card,
            rank_of=self.rank_of,
            of_machine=of_machine,
            allow_fallback=self.allow_fallback,
            adapters=parse_pairs(adapters, "--adapter"),
            origins=origins,
            said={
                name: f"{setting.flag} set by {setting.said}"
                for name, setting in given.items()
                if setting.said != settings.COMMAND_LINE
            },
        )


NO_FLAGS = EngineFlags()
