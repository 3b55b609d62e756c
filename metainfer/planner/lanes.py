"""What is computed beside what inside a step: halves of a chunk in turns, the pieces of a product
beside their own sums, a shared chunk beside its own gathers, the shared expert beside the routed
ones. Each is on where a measurement
showed a gain (`benchmarks/overlap` takes it, `gains` has it), and off elsewhere. Asked for, it is
on, or an error with every reason; where a device has one stream it changes the order of calls at
most, and the plan says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import DecisionLedger, Loser, Origin
from metainfer.core.plan import LayoutPlan
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.planner.bound import bound
from metainfer.planner.cards import Cards
from metainfer.planner.drafts import MODEL
from metainfer.planner.gains import (
    GATHERS,
    HALVES,
    PIECES,
    SHARED,
    Gain,
    against_beside,
    gain_of,
    rows_beside,
)
from metainfer.planner.launches import launch_seconds
from metainfer.planner.steps import WHOLE, Halves, StepCost

MOST_TOKENS = 1 << 20
"""Of a chunk for which it is asked whether its halves are launched in time."""

STREAMS = ("cuda",)
"""Kinds of device with a stream beside the current one."""

UNMEASURED = Reason("unmeasured", "no measurement of such a card and layout shows a gain")


def halves(
    layout: LayoutPlan, cards: Cards, ledger: DecisionLedger, cost: StepCost | None = None
) -> int:
    """The plan's `halves`: chunks of at least so many tokens take turns by halves; 0: none. `cost`:
    of the layout's steps, for what the shortest of them lose to their launches.

    Raises:
        RefusedError: they were asked for, and cannot.
        UsageError: a negative number was, or 1: one row has no halves.
    """
    if cards.intent.halves == 1:
        cause = "--halves is 1: a chunk of one row has no halves."
        raise UsageError(cause, "Name 2 tokens or more, or 0 for never.")
    gain = gain_of(HALVES, cards.arch.family, cards.intent, cards.facts, layout)
    least, against = _least(HALVES, gain, cards), _against_halves(layout, cards)
    slower = None if cost is None else launched(least, cost, cards)
    losers = () if slower is None else (Loser("off", (slower,)),)
    return _decide(HALVES, least, against, cards, ledger, gain, losers)


def priced_halves(layout: LayoutPlan, cards: Cards) -> Halves:
    """What `halves` would decide, for prices; none where it would refuse."""
    gain = gain_of(HALVES, cards.arch.family, cards.intent, cards.facts, layout)
    if _against_halves(layout, cards) or (least := _least(HALVES, gain, cards)) <= 0:
        return WHOLE
    return Halves(least, {} if gain is None else gain.gains)


def _against_halves(layout: LayoutPlan, cards: Cards) -> list[Reason]:
    against = _against_started(layout, cards)
    if layout.expert <= 1 and (layout.tensor == 1 or layout.prefill > 1):
        against.append(Reason("alone", "no rank waits for another inside a chunk but for entries"))
    if cards.draft.method == MODEL:
        against.append(Reason("draft", "a model that drafts reads every row of a chunk"))
    return against


def launched(tokens: int, cost: StepCost, cards: Cards) -> Reason | None:
    """Why the shortest chunk that would be halved, of at least `tokens`, ends sooner whole: halves
    are launched for longer than the whole takes, by prices. None where they are not, where a price
    is unknown or where no chunk is that long."""
    price, launch_s = bound(cards.facts, cards.dtype), launch_seconds(cards.facts.device.kind)
    if tokens < 2 or price is None or price.rate is None:
        return None

    def seconds(count: int) -> tuple[float, float]:
        whole, parts = cost.halved(count)
        return price(Phase.CHUNK, whole), parts.launches * launch_s

    tokens = cost.eager_from(tokens)
    whole, launching = seconds(tokens)
    if launching <= whole or tokens > cards.limits.step_tokens:
        return None
    enough = tokens
    while outlast := seconds(enough)[1] > seconds(enough)[0]:
        if enough >= MOST_TOKENS:
            break
        enough *= 2
    text = (
        f"halves of {tokens:,} tokens are launched for {1e3 * launching:.0f} ms, and the whole "
        f"takes {1e3 * whole:.0f}; "
        f"{f'at {enough:,} they still are' if outlast else f'from {enough:,} on they are not'} "
        "(launches by a seed)"
    )
    data = {
        "tokens": tokens, "launch_s": launching, "whole_s": whole,
        "from": None if outlast else enough,
    }  # fmt: skip
    return Reason("launches", text, data)


def sum_pieces(layout: LayoutPlan, cards: Cards, halves: int, ledger: DecisionLedger) -> int:
    """The plan's `sum_pieces`: chunks of at least so many tokens sum products over ranks piece by
    piece, those that do not take turns by `halves`; 0: none.

    Raises:
        RefusedError: it was asked for, and cannot.
        UsageError: a negative number was.
    """
    against = _against_started(layout, cards)
    if layout.tensor == 1:
        against.append(Reason("alone", "no ranks hold parts of one sum"))
    if layout.prefill > 1:
        text = "ranks that share a chunk's rows add the parts of a sum by themselves"
        against.append(Reason("layout", text))
    if layout.expert > layout.tensor:
        text = "domains meet at the experts: what comes back is scattered, not summed everywhere"
        against.append(Reason("not-built", text))
    if cards.arch.adapters is not None:
        text = "rows of adapters are told by the whole segment"
        against.append(Reason("not-built", text))
    gain = gain_of(PIECES, cards.arch.family, cards.intent, cards.facts, layout)
    least = _least(PIECES, gain, cards)
    if 0 < halves <= least:
        text = f"halves take turns from {halves:,} tokens on: one computes beside the other's sums"
        against.append(Reason("halves", text))
    return _decide(PIECES, least, against, cards, ledger, gain)


def gathers_beside(layout: LayoutPlan, cards: Cards, ledger: DecisionLedger) -> int:
    """The plan's `gathers_beside`: chunks of at least so many tokens whose rows ranks share have
    gathers and scattered sums on their way beside what does not need them; 0: none.

    Raises:
        RefusedError: it was asked for, and cannot.
        UsageError: a negative number was.
    """
    against = _against_started(layout, cards)
    if layout.prefill == 1:
        against.append(Reason("layout", "ranks do not share the rows of a chunk"))
    elif layout.expert <= 1:
        text = "the keys that a rank waits for are what it would compute next"
        against.append(Reason("alone", text))
    gain = gain_of(GATHERS, cards.arch.family, cards.intent, cards.facts, layout)
    return _decide(GATHERS, _least(GATHERS, gain, cards), against, cards, ledger, gain)


def _against_started(layout: LayoutPlan, cards: Cards) -> list[Reason]:
    """What stands against sums of a chunk that go on while it computes."""
    against = []
    if layout.shards > 1 and layout.prefill == 1:
        text = "ranks that share a cache gather entries layer by layer, in one go"
        against.append(Reason("not-built", text))
    if cards.emulated is not None:
        against.append(Reason("emulated", "waits for peers that are a stand-in overlap nothing"))
    return against


def _least(key: str, gain: Gain | None, cards: Cards) -> int:
    """Chunks of at least so many tokens do it, if they can: as asked for, else as measured."""
    asked: int | None = getattr(cards.intent, key)
    return asked if asked is not None else 0 if gain is None else gain.tokens


def shared_beside(layout: LayoutPlan, cards: Cards, ledger: DecisionLedger) -> int:
    """The plan's `shared_beside`: steps of at most so many tokens compute the shared expert on a
    stream of its own, beside the routed ones; 0: none.

    Raises:
        RefusedError: it was asked for, and cannot.
        UsageError: a negative number was.
    """
    intent, arch, facts = cards.intent, cards.arch, cards.facts
    gain = gain_of(SHARED, arch.family, intent, facts, layout)
    rows = rows_beside(intent, arch, facts, layout)
    return _decide(SHARED, rows, against_beside(arch, layout), cards, ledger, gain)


def _decide(
    key: str,
    value: int,
    against: Sequence[Reason],
    cards: Cards,
    ledger: DecisionLedger,
    gain: Gain | None,
    losers: tuple[Loser, ...] = (),
) -> int:
    """Put `value` on the record; `gain`: why it is on where nobody asked; `losers`: what would be
    better where it is on."""
    flag, wished = f"--{key.replace('_', '-')}", getattr(cards.intent, key)
    step = cards.limits.step_tokens
    unreached = key != SHARED and value > step
    if unreached and wished is None:
        text = f"chunks have at most {step:,} tokens, and a gain was measured from {value:,} on"
        against = [*against, Reason("chunk", text)]
    if wished is not None and wished < 0:
        raise UsageError(f"{flag} is {wished}.", "Name a number of tokens, or 0 for never.")
    if wished and against:
        cause = f"{flag} {wished} was asked for, and this plan cannot do it."
        raise RefusedError(cause, f"Leave {flag} out.", reasons=against)
    if wished is not None:
        why, kind = "asked for" if wished else "switched off", cards.facts.device.kind
        if wished and kind not in STREAMS:
            why += f"; a {kind} has no stream beside the current one: nothing overlaps"
        if unreached:
            why += f"; chunks have at most {step:,} tokens: none does it"
        ledger.record(key, value, cards.intent.origin(key), why, losers)
    elif value and gain is not None and not against:
        ledger.record(key, value, Origin.RECORD, gain.why, losers)
    else:
        losers = (Loser("on", (*against, UNMEASURED) if gain is None else tuple(against)),)
        origin = Origin.DERIVED if against else Origin.SEED
        ledger.record(key, 0, origin, "nothing is computed beside something else", losers)
        return 0
    return value
