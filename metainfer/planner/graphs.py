"""Which steps are captured as graphs, what they hold, and what stands against it op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from metainfer.core.digest import digest
from metainfer.core.ledger import Loser
from metainfer.core.plan import DraftPlan, LayoutPlan, LedgerRow, Limits, StepGraph
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.kernels.choice import Choice, Selection
from metainfer.kv.book.spec import GroupSpec
from metainfer.models.arch import Arch
from metainfer.planner.drafts import MODEL
from metainfer.planner.launches import LAUNCH_S

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Sequences at which decode and verify are captured, up to the most running ones (seed)."""

CHUNKS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Prompt tokens at which chunks are captured, alone and beside decodes (seed): close enough that
padding costs a third at most from 512 tokens on."""

SHORT_CHUNK = 256
"""Chunks up to here are captured on every device (seed)."""

CHUNK_RUNS = 4
"""Most prompts in a captured chunk (seed)."""

CAPTURES = ("cuda",)
"""Kinds of device whose steps can be captured."""

GRAPH_BYTES = 16 << 20
"""What the driver keeps of one captured step beside its tensors (seed)."""

ITEM, FREE = "captured steps (seed)", "left over"
STANDING = "captured steps and library workspaces"


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """`graphs`: what is captured, the largest first; empty where steps run op by op."""

    graphs: tuple[StepGraph, ...]
    why: str
    losers: tuple[Loser, ...] = ()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts of decode."""
        return tuple(g.tokens for g in self.graphs if g.phase == Phase.DECODE.value)


def launch_bound(
    launches: float, token_flops: float, rate: float | None, *, talks: bool = False
) -> int:
    """Tokens of the longest chunk that is computed sooner than it is launched op by op.

    `launches` of a chunk; `token_flops`: of its matrices, a token; `rate`: the device's FLOP/s, of
    which half is reached (seed), None where it is unknown. `talks`: ranks' sums take as long again
    (seed), and longer ones go by copy engines, which no graph holds.
    """
    if rate is None or not token_flops:
        return SHORT_CHUNK
    tokens = launches * LAUNCH_S * rate / 2 / token_flops
    return max(SHORT_CHUNK, int(tokens / 2 if talks else tokens))


def wanted(
    device: str,
    running: int,
    limits: Limits,
    draft: DraftPlan,
    layout: LayoutPlan,
    longest: int = SHORT_CHUNK,
) -> tuple[StepGraph, ...]:
    """What a device of that kind would capture, if every op can be: the largest first, so that
    later captures fit into the first one's memory. `running`: sequences of one domain; `longest`:
    prompt tokens from which on launches cost nothing (`launch_bound`).

    Several domains meet in collectives, so all must take the same bucket. Tokens tell them apart
    alike on every rank, runs do not: only decode is captured there. Where ranks share the rows of a
    chunk, decode is, and chunks that are computed as decodes are (`pairs`), which come as mixed
    steps. Where ranks share a cache chunks read copies that the host lays out: no chunk is.
    """
    if device not in CAPTURES or layout.context > 1:
        return ()
    found, step_tokens = [], limits.step_tokens
    pair = layout.prefill > 1
    depth = draft.depth if layout.data == 1 and not pair else 0
    for runs in (*(bucket for bucket in BUCKETS if bucket < running), running):
        found.append(StepGraph(phase=Phase.DECODE.value, tokens=runs, runs=runs))
        tokens = runs * (1 + depth)
        if depth and tokens <= step_tokens:
            found.append(StepGraph(phase=Phase.VERIFY.value, tokens=tokens, runs=runs))
    below = 0
    for tokens in CHUNKS if layout.data == layout.shards == 1 else ():
        if tokens > longest:
            break
        if tokens <= step_tokens and not pair:
            runs = min(CHUNK_RUNS, running)
            found.append(StepGraph(phase=Phase.CHUNK.value, tokens=tokens, runs=runs))
        mixes = pair or below < limits.mixed_prefill_tokens
        if tokens + running <= step_tokens and mixes:
            both = tokens + running
            found.append(StepGraph(phase=Phase.MIXED.value, tokens=both, runs=running))
        below = tokens
    return tuple(sorted(found, key=lambda g: (-g.tokens, -g.runs, g.phase)))


def by_length(shapes: Sequence[StepGraph], choices: Sequence[Choice]) -> tuple[StepGraph, ...]:
    """Those of `shapes` in whose phase no op reads all that a page table has room for."""
    reading = {choice.request.phase.value for choice in choices if choice.impl.by_table}
    return tuple(shape for shape in shapes if shape.phase not in reading)


def capturable(shapes: Sequence[StepGraph], choices: Sequence[Choice]) -> tuple[StepGraph, ...]:
    """Those of `shapes` in whose phase every op can be captured; draws run behind a step."""
    against = {
        choice.request.phase.value
        for choice in choices
        if not choice.impl.graph_safe and choice.request.op != "sample"
    }
    return tuple(shape for shape in shapes if shape.phase not in against)


def replayed(shapes: Sequence[StepGraph], choices: Sequence[Choice]) -> tuple[StepGraph, ...]:
    """Those of `shapes` that prices take to be replayed: of steps with prompts those whose every op
    can be captured. Decodes and verify runs all are: where kernels of a family or a card are still
    to come, prices do not count what stands in for them either."""
    whole = capturable(shapes, choices)
    short = (Phase.DECODE.value, Phase.VERIFY.value)
    return tuple(shape for shape in shapes if shape in whole or shape.phase in short)


def border(shapes: Sequence[StepGraph]) -> int:
    """Prompt tokens from which on no mixed step of `shapes` has room for them; 0: there is none."""
    mixed = [each.tokens - each.runs for each in shapes if each.phase == Phase.MIXED.value]
    return max(mixed, default=-1) + 1


def choose(
    selection: Selection, shapes: Sequence[StepGraph], device: str, draft: DraftPlan
) -> GraphChoice:
    """Of the steps `wanted`, those of phases whose every op can be captured.

    A phase with an op that cannot loses with that op's name: it pays every launch; so does decode
    where an op reads by the page table's width, which `by_length` took out of `shapes`. Behind a
    captured step run a draft model's own steps, and draws that ask for more than a temperature and
    filters; other draws are captured too where the sampler can be, and likeliest tokens with the
    step.
    """
    if device not in CAPTURES:
        return GraphChoice((), f"steps on {device} are not captured")
    against: dict[str, dict[str, Reason]] = {}
    drawn: dict[str, Reason] = {}
    choices = selection.bundle.choices
    for choice in choices:
        request, impl = choice.request, choice.impl
        if impl.graph_safe:
            continue
        reason = Reason("graph", f"{impl.id} at {request.site} cannot be captured")
        if request.op == "sample":
            drawn[request.phase.value] = reason
        else:
            against.setdefault(request.phase.value, {})[impl.id] = reason
    losers = tuple(
        Loser(f"{phase} graphs", tuple(reasons.values()))
        for phase in dict.fromkeys(shape.phase for shape in shapes)
        if (reasons := against.get(phase))
    )
    losers += _reading(choices)
    graphs = capturable(shapes, choices)
    losers += tuple(
        Loser(f"{phase} draws", (drawn[phase],))
        for phase in dict.fromkeys(shape.phase for shape in graphs)
        if phase in drawn
    )
    if draft.method == MODEL:
        text = "the draft model's own steps pay every launch: they are not captured yet"
        losers = (*losers, Loser("draft graphs", (Reason("not-built", text),)))
    if not any(shape.phase == Phase.DECODE.value for shape in graphs):
        return GraphChoice(graphs, "decode runs op by op: it pays every launch", losers)
    return GraphChoice(graphs, "seed, up to concurrency", losers)


def _reading(choices: Sequence[Choice]) -> tuple[Loser, ...]:
    """Decode graphs, where ops read all that a page table has room for."""
    reading = dict.fromkeys(
        choice.impl.id
        for choice in choices
        if choice.impl.by_table and choice.request.phase is Phase.DECODE
    )
    text = "reads all that a page table has room for"
    reasons = tuple(Reason("graph", f"{impl} {text}") for impl in reading)
    return (Loser("decode graphs", reasons),) if reasons else ()


def key(shapes: Sequence[StepGraph], context: int, beside: int) -> str:
    """What the bytes that captured steps hold depend on, beside the model; as a digest. `beside`:
    the plan's `shared_beside`, for a second stream has memory and library workspaces of its own."""
    return digest({"shapes": list(shapes), "context": context, "beside": beside})


def graph_row(
    shapes: Sequence[StepGraph], arch: Arch, groups: Sequence[GroupSpec], context: int, width: int
) -> LedgerRow | None:
    """What captured steps hold: intermediates of the largest and its draws, whose memory all share,
    and of each its logits, its page tables and the driver's part. `width`: bytes of an activation
    element."""
    if not shapes:
        return None
    tables = sum(4 * group.pages_for(context) for group in groups)
    shared = max(arch.activation_bytes(s.tokens, _rows(s), width) for s in shapes)
    each = sum(GRAPH_BYTES + s.runs * tables + 4 * _rows(s) * arch.vocab_size for s in shapes)
    return LedgerRow(item=ITEM, kind="graphs", bytes=shared + each)


def released(ledger: Sequence[LedgerRow]) -> tuple[LedgerRow, ...]:
    """The ledger of a plan that captures nothing: what was kept for it is left over."""
    kept = sum(row.bytes for row in ledger if row.item == ITEM)
    return tuple(
        replace(row, bytes=row.bytes + kept) if row.item == FREE else row
        for row in ledger
        if row.item != ITEM
    )


def _rows(shape: StepGraph) -> int:
    """Rows of logits."""
    short = shape.phase in (Phase.DECODE.value, Phase.VERIFY.value)
    return shape.tokens if short else shape.runs
