"""Seconds of the collectives of a step: what the ranks of a layout send each other.

Per layer (bf16 activations, width D, b tokens of a rank), by the formulas of `comm.model`, one
after the other:

* tensor ranks: all-reduce of b D twice, once when experts are cut over more ranks than the domain;
  in a step also of the embedding's rows, and the logits of all rows that need them are gathered;
* expert ranks beyond the domain: the rows of all domains are gathered (many of them rounded first,
  where the experts' kernels take them so), as are the experts' numbers and weights, a message of
  their own where rows are many, and what came of them is summed row by row where each domain is one
  rank, over all of these ranks where it is not; then the shared expert's sum of a domain is one
  more;
* ranks that share the rows of a chunk: the entries that it adds are gathered, with the windows and
  states at the parts' edges, and the rows that a draft layer goes on from; what of the cache before
  it a rank lacks is gathered too, or lent by its keepers in broadcasts (`RankWork.fetches`);
* ranks that each hold a part of the cache: queries are gathered, log-sums gathered and partial
  outputs merged by them, chosen positions gathered where keys choose.
"""

from __future__ import annotations

from dataclasses import dataclass

from metainfer.comm import model as links
from metainfer.comm.plan_offers import COPIED
from metainfer.comm.request import Op
from metainfer.comm.topology import Topology
from metainfer.models.arch import TOGETHER
from metainfer.planner.layouts import Fetch
from metainfer.planner.work import RankWork

CHOSEN_BYTES = 4096
"""A rank's chosen positions with their scores, a token and layer: 512 of 8 bytes."""
ROUNDED_BYTES = 1
"""Of a channel in e4m3."""
SCALE_BYTES = 4 / 128
"""Of a channel: a float32 scale of 128 of them, which travels with the routes."""
ROUTE_BYTES = 8
"""Of an expert's number for a token with its weight."""
LOGIT_BYTES = 4
"""Of a logit in float32."""
AROUND_US = 10.0
"""Of a message beside what `comm.model` says of it: kernels that no process alone has, and waiting
for the slower rank. Recorded decode steps of two and of eight ranks leave 8 to 17 (seed)."""
LOG_PART = 1 / 256
"""A float32 log-sum of a head beside its output: 512 channels of two bytes."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a step sends by. `tokens`: of a rank; `scored` of them need logits. `new`: tokens of a
    domain's prompts, with `before` cached in front of them; `decoding`: its decoding tokens.
    `eager`: op by op; copy engines are no part of a graph."""

    tokens: int
    scored: int
    new: int = 0
    before: int = 0
    decoding: int = 0
    eager: bool = False


def query_bytes(work: RankWork) -> float:
    """Of one token's queries in a layer, of all heads that meet at a dealt cache; its outputs are
    as many.

    A key costs 2 (d_k + d_v) FLOPs a head: a layer's queries and outputs are half as many elements
    as the FLOPs of one key. Heads of a group meet, not those of all tensor ranks.
    """
    one, two = (work.costs.decode_attention_flops(keys)[0] for keys in (1, 2))
    elements = (two - one) / 2 / work.layers * work.layout.shards / work.layout.tensor
    return elements / 2 * work.width


class Exchange:
    """Prices what `work`'s ranks send over `tree`; equal steps are priced once."""

    def __init__(self, work: RankWork, tree: Topology) -> None:
        self._work, self._tree = work, tree
        self._known: dict[Sent, float] = {}

    def seconds(self, sent: Sent) -> float:
        """All collectives of a step."""
        found = self._known.get(sent)
        if found is None:
            micros = self._tensor(sent) + self._experts(sent) + self._rows(sent)
            found = self._known[sent] = (micros + self._shards(sent)) / 1e6
        return found

    def _tensor(self, sent: Sent) -> float:
        work, tensor = self._work, self._work.layout.tensor
        if tensor == 1:
            return 0.0
        row = self._row(sent)
        apart = work.layout.expert > tensor  # the experts' sum comes back by another way
        micros = (1 if apart else 2) * work.layers * self._reduced(sent, tensor, row)
        micros += self._reduced(sent, tensor, row)  # the embedding's
        logit = LOGIT_BYTES if work.costs.exact_logits else work.width
        return micros + self._direct(sent, tensor, sent.scored * work.vocab * logit)

    def _experts(self, sent: Sent) -> float:
        work, tensor, expert = self._work, self._work.layout.tensor, self._work.layout.expert
        if expert <= tensor:
            return 0.0
        domains = expert // tensor
        every = domains * self._row(sent)
        met = every
        routed: float = domains * sent.tokens * work.costs.experts_per_token * ROUTE_BYTES
        rounds = 0 < work.rounded_from <= sent.tokens
        if rounds:
            met *= ROUNDED_BYTES / work.width
            routed += every * SCALE_BYTES / work.width
        if rounds or sent.tokens > TOGETHER:
            each = self._direct(sent, domains, met) + self._direct(sent, domains, routed)
        else:
            each = self._direct(sent, domains, met + routed)
        if tensor > 1:
            each += self._reduced(sent, expert, every)
            each += self._reduced(sent, tensor, self._row(sent))
        else:
            each += self._direct(sent, expert, every, Op.REDUCE_SCATTER)
        return work.layers * each

    def _rows(self, sent: Sent) -> float:
        """Entries of a chunk to all that share it, and those before it to ranks without them."""
        work, layout, layers = self._work, self._work.layout, self._work.paged_layers
        if not sent.new or not layers:
            return 0.0
        micros = 0.0
        if layout.prefill > 1:
            gathered = sent.new * work.token_bytes + layout.prefill * work.edge_bytes
            micros += layers * self._direct(sent, layout.prefill, gathered / layers)
            if ends := sent.scored * work.costs.draft_width * work.width:
                micros += self._direct(sent, layout.prefill, ends)
        if work.fetches is Fetch.LENT and sent.before:
            lent = sent.before * work.token_bytes / layers
            micros += layers * self._broadcast(max(layout.prefill, layout.shards), lent)
        if work.fetches is Fetch.GATHERED and sent.before and work.dealt_layers:
            each = sent.before * work.dealt_bytes / work.dealt_layers
            ranks = max(layout.prefill, layout.shards)
            micros += work.dealt_layers * self._direct(sent, ranks, each)
        return micros

    def _shards(self, sent: Sent) -> float:
        """Decoding tokens against a cache in parts."""
        work, layout = self._work, self._work.layout
        if layout.shards == 1 or not sent.decoding:
            return 0.0
        half = sent.decoding * query_bytes(work)
        each = 2 * self._direct(sent, layout.shards, half)
        # Every rank has a log-sum of each head for its part, and of its own heads' windows.
        each += self._direct(sent, layout.shards, (layout.shards + 1) * half * LOG_PART)
        micros = work.dealt_layers * each
        chosen = sent.decoding * layout.shards * CHOSEN_BYTES
        return micros + work.choosing_layers * self._direct(sent, layout.shards, chosen)

    def _row(self, sent: Sent) -> float:
        return float(sent.tokens * self._work.costs.hidden * self._work.width)

    def _reduced(self, sent: Sent, ranks: int, size: float) -> float:
        tree = self._group(ranks)
        host = links.HOST if sent.eager else links.HOST_KERNELS
        return AROUND_US + links.best(links.PEER if tree.peer else host, tree, int(size))[1]

    def _direct(self, sent: Sent, ranks: int, size: float, op: Op = Op.ALL_GATHER) -> float:
        """By kernels or, through host memory, by copy engines where these are sooner."""
        tree = self._group(ranks)
        parted, through_host = op is not Op.ALL_GATHER, not tree.peer
        micros = links.direct(tree, int(size), through_host=through_host, parted=parted)
        if through_host and sent.eager:
            micros = min(micros, COPIED[op](tree, int(size), links.SEEDS))
        return AROUND_US + micros

    def _broadcast(self, ranks: int, size: float) -> float:
        """By the way that is cheaper; host memory is always open."""
        tree = self._group(ranks)
        ways = (True, False) if tree.peer else (True,)
        return AROUND_US + min(links.broadcast(tree, int(size), through_host=way) for way in ways)

    def _group(self, ranks: int) -> Topology:
        return self._tree.group(ranks, self._work.layout.ranks)
