"""What the scheduler is told at start. Everything else it learns from requests and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from metainfer.core.errors import UsageError
from metainfer.core.request import Request
from metainfer.core.step import Phase


class DraftSource(Protocol):
    """Proposes the next tokens of a sequence; called once per decode run, in running order."""

    def propose(self, request: Request, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """Up to `limit` tokens that may follow `tokens` (prompt and generated). May be empty.

        `tokens` is the scheduler's own list: it grows between calls, and is read, not kept.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or was put back: let go of what is held for it, if anything."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one engine; all counts are per KV domain except `max_waiting`.

    `max_context`: most tokens of prompt and answer together. `step_tokens`: most tokens computed in
    a step. `mixed_prefill_tokens`: most prefill tokens in a step in which *any* domain decodes,
    because all domains wait for the slowest. `max_drafts`: most proposed tokens per verify run.
    `model_drafts`: the device proposes them itself and plans carry placeholders (ADR 0010).
    `adaptive_drafts`: how many is chosen by measured gain, `max_drafts` at most (`depth`).
    `split_phases`: prefill and decode get a segment each instead of sharing a mixed one, where
    `prefill_from` tokens of prompts or more are in the step. `layouts` maps a phase to the layout
    of its segments, `buckets` to the padded sizes captured for it.
    `adapters`: name -> digest of content, in the order of their places on the device.
    """

    max_context: int
    max_running: int
    step_tokens: int = 8192
    mixed_prefill_tokens: int = 512
    max_waiting: int = 1024
    max_drafts: int = 0
    model_drafts: bool = False
    adaptive_drafts: bool = False
    split_phases: bool = False
    prefill_from: int = 0
    layouts: Mapping[Phase, str] = field(default_factory=dict)
    buckets: Mapping[Phase, tuple[int, ...]] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse limits under which some running sequence could starve.

        Raises:
            UsageError: naming the limit and the smallest value that works.
        """
        for name in ("max_context", "max_running", "mixed_prefill_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}.", f"Set {name} to 1 or more.")
        if self.step_tokens < self.max_running:
            raise UsageError(
                f"step_tokens {self.step_tokens} is below max_running {self.max_running}: "
                "some sequence would never get a token.",
                f"Set step_tokens to {self.max_running} or more.",
            )

    def bucket(self, phase: Phase, tokens: int) -> int:
        """The smallest captured size that holds `tokens`, 0 when none does."""
        fitting = [size for size in self.buckets.get(phase, ()) if size >= tokens]
        return min(fitting, default=0)
