"""Speculation as one decided value: the drafter and its depth (B-22).

A wish is ``off``, ``METHOD``, ``METHOD:DEPTH``, a bare ``DEPTH`` (of `ngram`), or ``auto``: the
checkpoint's module if there is one, else `ngram`, as deep as pays off while serving. It is
normalised here, once and on the record; the width of verify runs, the rows of a step's logits
and the scheduler's limit all follow from the plan's value. What cannot be done is refused, never
reduced to something else in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.plan import DraftPlan
from metainfer.kv.book.spec import GroupKind, GroupSpec, Rewind

OFF, NGRAM, MODEL, AUTO = "off", "ngram", "mtp", "auto"
MOST = 7
"""Deepest draft: what every cursor state can take back (ADR 0009)."""
USUAL = 4
"""Depth when only a method is given (seed)."""

WRITE = (
    f"Write --draft off, --draft {AUTO}, --draft {NGRAM}:N (tokens seen before) or "
    f"--draft {MODEL}:N (the checkpoint's own module) with N from 1 to {MOST}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModule:
    """A draft module that comes with a checkpoint.

    `block`: tokens it proposes at once, which is then the only depth; 0 for one that proposes them
    one after the other, to any depth.
    """

    block: int = 0


def parse(wish: str) -> tuple[str, int | None]:
    """Method and depth of a wish; depth None when it names none.

    Raises:
        UsageError: no such method, no number, or a number out of range.
    """
    method, colon, number = wish.partition(":")
    if method.isdigit() and not colon:
        method, colon, number = NGRAM, ":", method
    if method not in (OFF, NGRAM, MODEL, AUTO) or (method in (OFF, AUTO) and colon):
        raise UsageError(f"draft {wish!r} is not known.", WRITE, code="bad_draft")
    if not colon:
        return method, None
    if not number.isdigit() or not 1 <= int(number) <= MOST:
        raise UsageError(
            f"draft {wish!r} asks for {number or 'no'} tokens; it must be 1 to {MOST}.",
            WRITE,
            code="bad_draft",
        )
    return method, int(number)


def decide(
    wish: str | None,
    module: DraftModule | None,
    ledger: DecisionLedger,
    origin: Origin,
    *,
    step_tokens: int,
    max_context: int,
) -> DraftPlan:
    """The effective drafter, with the way from the wish to it on the record.

    Raises:
        UsageError: the wish is malformed, or no draft fits into a step or the context.
        RefusedError: the model has no draft module, or one of another block.
    """
    if wish is None or parse(wish)[0] == OFF:
        said = "off by default: its gain depends on the text" if wish is None else "asked for"
        ledger.record("draft", OFF, Origin.DEFAULT if wish is None else origin, said)
        return DraftPlan(method=OFF, depth=0)
    method, asked = parse(wish)
    why = [f"asked for {wish!r}"]
    depth = asked if asked is not None else USUAL
    adaptive = method == AUTO and not (module is not None and module.block)
    if adaptive:
        depth = MOST
        why.append(f"up to {MOST}, by measured gain")
    elif asked is None:
        why.append(f"the depth is a seed, {USUAL}")
    if method == AUTO:
        method = NGRAM if module is None else MODEL
    if method == MODEL and not adaptive:
        depth = _depth_of_module(module, asked, depth, why)
    for limit, what in (
        (step_tokens - 1, f"a step of {step_tokens} tokens"),
        (max_context - 2, f"a context of {max_context} tokens"),
    ):
        if depth > limit:
            if limit < 1 or (module is not None and module.block and method == MODEL):
                raise UsageError(f"{what} has no room for {depth} drafts.", "Use --draft off.")
            why.append(f"{depth} lowered to {limit}: {what} holds no more")
            depth = limit
    shown = f"{method}, at most {depth}" if adaptive else f"{method}:{depth}"
    ledger.record("draft", shown, origin, "; ".join(why))
    return DraftPlan(method=method, depth=depth, adaptive=adaptive)


def _depth_of_module(
    module: DraftModule | None, asked: int | None, depth: int, why: list[str]
) -> int:
    if module is None:
        raise RefusedError(
            "the checkpoint has no draft module, or this release does not run it.",
            f"Use --draft {NGRAM}, which needs none.",
            code="no_draft_module",
        )
    if not module.block:
        return depth
    if asked not in (None, module.block):
        raise RefusedError(
            f"the checkpoint's draft module proposes {module.block} tokens at once, not {asked}.",
            f"Use --draft {MODEL} or --draft {MODEL}:{module.block}.",
            code="draft_block",
        )
    why[1:] = [f"the depth is the module's block, {module.block}"]
    return module.block


def check_rewind(draft: DraftPlan, groups: Sequence[GroupSpec]) -> None:
    """Every cursor state must be able to go back over all of a run's drafts.

    Raises:
        RefusedError: naming the group and the depth that works.
    """
    for group in groups:
        if group.kind is not GroupKind.STATE or group.rewind is not Rewind.CURSOR:
            continue
        if group.ring_tokens < draft.depth:
            remedy = f"{NGRAM}:{group.ring_tokens}" if group.ring_tokens else OFF
            raise RefusedError(
                f"{draft.depth} drafts are asked for; the states of {group.name} take back "
                f"{group.ring_tokens}.",
                f"Use --draft {remedy}.",
                code="draft_rewind",
            )
