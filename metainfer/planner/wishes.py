"""Fields of an intent as values: the user's where there is one, else a seed of the device or the
model's own, each on the record with its author.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import MAX_PENDING, Intent
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.plan import Limits
from metainfer.models.arch import Arch
from metainfer.planner.weights import DTYPE_BYTES
from metainfer.platform.facts import CPU, Facts


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Seeds by device kind; replaced by records once a machine has been tuned."""

    dtype: str
    running: int
    step_tokens: int
    mixed_prefill_tokens: int
    page_tokens: int


_DEFAULTS = {CPU: _Defaults("float32", 32, 1024, 128, 32)}
_ACCELERATOR = _Defaults("bfloat16", 64, 4096, 512, 64)
_LONG = "so long that a step computes for longer than it reads weights"
_BOUND = "bounds how long a prompt can hold up running answers"
_WAIT = "running answers wait (--goal latency: 512)"


class Wishes:
    """What one intent asks of a model on a machine; each method decides one thing."""

    def __init__(self, intent: Intent, arch: Arch, facts: Facts, ledger: DecisionLedger) -> None:
        self.intent, self.arch, self.facts, self.ledger = intent, arch, facts, ledger
        self.seeds = _DEFAULTS.get(facts.device.kind, _ACCELERATOR)

    def given(self, name: str, key: str, default: object, why: str, origin: Origin) -> object:
        """The user's value if there is one, else ours; either way on the record."""
        value = getattr(self.intent, name)
        if value is not None:
            self.ledger.record(key, value, self.intent.origin(name), "asked for")
            return value
        self.ledger.record(key, default, origin, why)
        return default

    def number(self, name: str, key: str, default: int, why: str, origin: Origin) -> int:
        """`given` for a positive count."""
        value = self.given(name, key, default, why, origin)
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is {value}.", "It must be at least 1.")
        return value

    def dtype(self) -> str:
        seed = self.seeds.dtype
        dtype = str(
            self.given("dtype", "model.dtype", seed, "the device's usual type", Origin.SEED)
        )
        if dtype not in DTYPE_BYTES:
            raise UsageError(f"dtype {dtype!r} is not known.", f"Known: {', '.join(DTYPE_BYTES)}.")
        return dtype

    def limits(self, chunk: int | None = None, refused: int | None = None) -> Limits:
        """`chunk`: prompt tokens that a step takes where nobody says (`chunks.enough`), None for
        seeds; `refused`: of such a chunk with which nothing could be had."""
        most = self.arch.max_context
        context = self.number(
            "context", "limits.max_context", most, "the model's own limit", Origin.CHECKPOINT
        )
        if context > most:
            raise RefusedError(
                f"a context of {context:,} tokens exceeds the model's {most:,}.",
                f"Use --context {most:,} or less.",
                code="context_too_long",
            )
        running = self.intent.concurrency
        if running is None:
            running = self.seeds.running
        elif running < 1:
            raise UsageError(f"concurrency is {running}.", "It must be at least 1.")
        step = self._step(chunk, refused, running)
        if step < running:
            raise UsageError(
                f"a step of {step} tokens cannot decode {running} sequences.",
                f"Raise --chunk-tokens to {running}, or lower --concurrency.",
            )
        mixed = self._mixed(chunk, step)
        if mixed > step:
            raise UsageError(
                f"{mixed} prompt tokens do not fit into a step of {step}.",
                f"Pass --mixed-prefill-tokens {step} or less, or raise --chunk-tokens.",
            )
        why = "further requests get 429 and retry"
        waiting = self.number("max_waiting", "limits.max_waiting", MAX_PENDING, why, Origin.DEFAULT)
        return Limits(
            max_context=context,
            max_running=running,
            step_tokens=step,
            mixed_prefill_tokens=mixed,
            max_waiting=waiting,
        )

    def _step(self, chunk: int | None, refused: int | None, running: int) -> int:
        """Tokens of a step, at least one of each running sequence."""
        seed, why, origin = self.seeds.step_tokens, "seed for this kind of device", Origin.SEED
        if refused is not None:
            why = f"seed for this kind of device: {refused:,} left too little memory"
        elif chunk is not None and chunk > seed:
            seed, why, origin = chunk, _LONG, Origin.COST_MODEL
        if running > seed:
            seed, why, origin = running, "one of each running sequence", Origin.DERIVED
        return self.number("chunk_tokens", "limits.step_tokens", seed, why, origin)

    def _mixed(self, chunk: int | None, step: int) -> int:
        """Prompt tokens of a step in which answers run."""
        seed, why, origin = self.seeds.mixed_prefill_tokens, _BOUND, Origin.SEED
        if chunk is not None and chunk > seed:
            seed, why, origin = chunk, f"{_LONG}; {_WAIT}", Origin.COST_MODEL
        if seed > step:
            why, origin = f"as long as a step: {seed:,} were wished for", Origin.DERIVED
        key = "limits.mixed_prefill_tokens"
        return self.number("mixed_tokens", key, min(seed, step), why, origin)

    def record_running(self, running: int) -> None:
        """After memory has spoken: a seed gives way to it, a user's word does not."""
        seed, why = self.seeds.running, "seed for this kind of device"
        if self.intent.concurrency is None and running < seed:
            why = f"seed {seed} lowered to {running}: the cache holds no more"
        self.number("concurrency", "limits.max_running", running, why, Origin.SEED)

    def page_tokens(self) -> int:
        """Decided before kernels are, since they have conditions on it.

        A page holds whole compressed entries; two of the longest where the seed holds none.
        """
        unit, seed = self.arch.page_unit, self.seeds.page_tokens
        why = "seed, a power of two"
        if seed % unit:
            seed, why = 2 * unit, f"two units of {unit} tokens, in which every ratio closes"
        page = self.number("page_tokens", "kv_groups", seed, why, Origin.SEED)
        if page % unit:
            raise UsageError(
                f"a page of {page} tokens cuts compressed entries of this model.",
                f"Use a multiple of {unit}.",
                code="bad_page",
            )
        return page

    def record_threads(self, source: Origin) -> None:
        cores = self.facts.host.usable_cores
        if cores is None:
            why = "the number of usable cores is unknown"
            self.number("threads", "threads", 1, why, Origin.DEFAULT)
        else:
            self.number("threads", "threads", cores, "every usable core", source)
