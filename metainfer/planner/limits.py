"""Limits that a cache keeps, or a refusal whose advice passes the same check (B-20, B-21).

`fit_cache` is the check. Its refusal looks for advice only when it is shown to someone: a planner
refuses many candidates that nobody reads about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from metainfer.core.errors import RefusedError
from metainfer.core.plan import Limits
from metainfer.core.verdict import Reason
from metainfer.kv.book.capacity import check_limits, steady_pages
from metainfer.kv.book.spec import GroupSpec
from metainfer.planner.fitting import DOES_NOT_FIT
from metainfer.planner.memory import CacheBudget, size_cache

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAsk:
    """What one KV domain is asked to hold in `budget_bytes`.

    `running` sequences are this domain's share of ``--concurrency``; `domains` share it alike.
    `most_bytes`: what ``--kv-memory`` could ask for at most, None where raising it cannot help.
    """

    groups: tuple[GroupSpec, ...]
    budget_bytes: int
    context: int
    running: int
    step_tokens: int
    caching: bool = True
    domains: int = 1
    most_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """Single changes with which the ask passes, each None where none does. `both`: context and
    running together, where neither alone is enough."""

    context: int | None = None
    running: int | None = None
    both: tuple[int, int] | None = None
    budget_bytes: int | None = None

    def text(self, domains: int = 1) -> str:
        """As a remedy, in flags."""
        ways = []
        if self.context is not None:
            ways.append(f"--context to {self.context:,}")
        if self.running is not None:
            ways.append(f"--concurrency to {self.running * domains:,}")
        if self.both is not None:
            context, running = self.both
            ways.append(f"--context to {context:,} and --concurrency to {running * domains:,}")
        lower = f"Lower {', or '.join(ways)}" if ways else ""
        if self.budget_bytes is None:
            return f"{lower}." if lower else "Nothing fits beside the weights here."
        enough = f"--kv-memory to {-(-self.budget_bytes // MIB)}MiB."
        return f"{lower}, or raise {enough}" if lower else f"Raise {enough}"


Keeps = Callable[[int, int], bool]
"""Whether so long a context and so many sequences of a domain at once can be kept."""


class CacheTooSmall(RefusedError):
    """The limits of `ask` cannot be kept. Carries every reason; `advised` adds the remedy. `keeps`:
    the check with all that other limits change beside the cache, None where that is nothing."""

    def __init__(
        self, ask: CacheAsk, cause: str, reasons: Sequence[Reason], keeps: Keeps | None = None
    ) -> None:
        super().__init__(cause, reasons=reasons, code=DOES_NOT_FIT)
        self.ask, self.keeps = ask, keeps

    def advised(self) -> RefusedError:
        """The same refusal with advice that passes the check."""
        text = advice_for(self.ask, self.keeps).text(self.ask.domains)
        return RefusedError(self.cause, text, reasons=self.reasons, code=self.code)


def fit_cache(ask: CacheAsk) -> CacheBudget:
    """The cache of one domain, in which the limits can be kept.

    Raises:
        CacheTooSmall: they cannot.
    """
    try:
        sized = size_cache(
            ask.groups,
            ask.budget_bytes,
            context=ask.context,
            running=ask.running,
            step_tokens=ask.step_tokens,
            caching=ask.caching,
        )
    except RefusedError as error:
        raise CacheTooSmall(ask, error.cause, error.reasons) from None
    limits = Limits(
        max_context=ask.context,
        max_running=ask.running,
        step_tokens=ask.step_tokens,
        mixed_prefill_tokens=ask.step_tokens,
        max_waiting=0,
    )
    verdict = check_limits(sized.sizes, limits)
    if not verdict.accepted:
        said = "; ".join(reason.message for reason in verdict.reasons)
        cause = f"the limits cannot be kept in {ask.budget_bytes:,} B of cache: {said}."
        raise CacheTooSmall(ask, cause, verdict.reasons)
    return sized


def most_running(ask: CacheAsk) -> int:
    """Sequences at once that can be kept, at most those asked for; 0 when not even one can."""
    if passes(ask):
        return ask.running
    return _largest(1, ask.running - 1, lambda n: passes(replace(ask, running=n))) or 0


def advice_for(ask: CacheAsk, keeps: Keeps | None = None) -> Advice:
    """What to change; every value was tried: on `keeps`, or on `fit_cache` with nothing but the
    cache changed."""

    def kept(context: int, running: int) -> bool:
        return passes(replace(ask, context=context, running=running))

    keeps = keeps or kept
    context = _largest(1, ask.context - 1, lambda n: keeps(n, ask.running))
    running = _largest(1, ask.running - 1, lambda n: keeps(ask.context, n))
    both = None
    if context is None and running is None:
        one = _largest(1, ask.context - 1, lambda n: keeps(n, 1))
        if one is not None:
            both = one, _largest(1, ask.running, lambda n: keeps(one, n)) or 1
    return Advice(context, running, both, _enough(ask))


def passes(ask: CacheAsk) -> bool:
    """Whether the limits can be kept."""
    try:
        fit_cache(ask)
    except CacheTooSmall:
        return False
    return True


def _largest(low: int, high: int, accepted: Callable[[int], bool]) -> int | None:
    """The largest accepted number, by bisection; None when there is none."""
    if high < low or not accepted(low):
        return None
    reached, refused = low, high + 1
    while refused - reached > 1:
        middle = (reached + refused) // 2
        if accepted(middle):
            reached = middle
        else:
            refused = middle
    return reached


def _enough(ask: CacheAsk) -> int | None:
    """Bytes for the cache, whole MiB, with which the limits can be kept; None beyond what is
    free."""
    if ask.most_bytes is None:
        return None
    low, high = ask.budget_bytes // MIB, ask.most_bytes // MIB
    if high <= low or not passes(replace(ask, budget_bytes=high * MIB)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if passes(replace(ask, budget_bytes=middle * MIB)):
            high = middle
        else:
            low = middle
    return high * MIB


def held_bytes(groups: Sequence[GroupSpec], context: int, running: int, step_tokens: int) -> int:
    """Bytes with which `running` sequences of `context` tokens never wait for a page."""
    pages = sum(
        steady_pages(group, tokens=context, slots=running, step_tokens=step_tokens)
        * group.page_bytes
        for group in groups
    )
    return pages + sum((running + 1) * group.slot_bytes for group in groups)


def most_sequences(
    groups: Sequence[GroupSpec], budget_bytes: int, context: int, step_tokens: int, limit: int
) -> int:
    """Sequences of `context` tokens that run at once without waiting, at most `limit`."""
    found = _largest(
        1, limit, lambda n: held_bytes(groups, context, n, step_tokens) <= budget_bytes
    )
    return found or 0


def longest_context(
    groups: Sequence[GroupSpec], budget_bytes: int, step_tokens: int, limit: int
) -> int:
    """Tokens of the longest sequence that fits alone, at most `limit`."""
    found = _largest(1, limit, lambda n: held_bytes(groups, n, 1, step_tokens) <= budget_bytes)
    return found or 0
