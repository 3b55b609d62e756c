"""How fast a layout would be: what a step must read, compute and send, and nothing else.

A bound from bytes and FLOPs, plus the collectives of `comm.model` one after the other; nothing is
overlapped. A stock engine measured on one H200 reached 0.24 to 0.78 of such bounds (12 layers, one
sequence to 128), so a prediction is half of the bound with a band from a fifth to the whole of it.
Uncalibrated: no record of the machine goes in. Where a rate is unknown nothing is predicted.

Communication per layer (bf16 activations, width D, b tokens of a domain):

* tensor ranks: all-reduce of b D twice; once when experts are cut over more ranks than the domain;
* expert ranks E beyond the domain: each token goes to E (1 - (1 - 1/E)^k) ranks, D + D / 128 bytes
  there and 2 D bytes back; a domain's ranks send a part each and gather the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from metainfer.comm import model as links
from metainfer.comm.topology import Topology, from_facts
from metainfer.core.plan import LayoutPlan
from metainfer.models.arch import Arch, Costs
from metainfer.planner.ranks import Held
from metainfer.planner.weights import DTYPE_BYTES, EMBED, EXPERTS, Census
from metainfer.platform.facts import Facts

SHARE, LOW, HIGH = 0.5, 0.2, 1.0
"""Of the bound: what is predicted, and the ends of the band (seeds)."""

CONTEXT = PROMPT = 8192
"""Tokens that a decoding sequence sees, and tokens of a prompt, in predictions."""

HEAD = "linear.lm_head"
TABLES = "rotary tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Tokens per second over all ranks; None where a rate of the machine is unknown.

    `decode_tok_s`: of `batch` sequences at `context` tokens; `one_tok_s`: of one. `first_token_s`:
    of one prompt of `prompt` tokens on an idle machine. `assumed`: what stands in for facts.
    """

    prefill_tok_s: float | None
    decode_tok_s: float | None
    one_tok_s: float | None
    first_token_s: float | None
    batch: int
    context: int
    prompt: int
    assumed: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "basis": "roofline and communication model",
            "calibrated": False,
            "band": [LOW / SHARE, HIGH / SHARE],
            "batch": self.batch,
            "context": self.context,
            "prompt": self.prompt,
            "decode_one_tok_s": _rounded(self.one_tok_s),
            "first_token_s": _rounded(self.first_token_s),
            "assumed": list(self.assumed),
        }


def predict(
    counted: Census, held: Held, facts: Facts, dtype: str, *, running: int, step_tokens: int
) -> Prediction | None:
    """The speed of one layout; None where the family has no cost model or no rate is known."""
    costs = counted.arch.costs()
    read = facts.device.read_bytes_s
    rate = facts.device.dot_flops.get(dtype)
    if costs is None or read is None:
        return None
    step = _Step(counted, held, costs, facts, read, rate, DTYPE_BYTES[dtype])
    context = min(CONTEXT, counted.arch.max_context)
    batch, data = running, held.layout.data
    prefill = first = None
    if rate is not None:
        seconds = step.prefill(step_tokens, context)
        prefill = SHARE * data * step_tokens / seconds
        first = context / step_tokens * seconds / SHARE
    return Prediction(
        prefill_tok_s=prefill,
        decode_tok_s=SHARE * batch / step.decode(batch, context),
        one_tok_s=SHARE / step.decode(1, context),
        first_token_s=first,
        batch=batch,
        context=context,
        prompt=context,
        assumed=step.assumed,
    )


class _Step:
    """Bounds of one rank's step, in seconds."""

    def __init__(
        self,
        counted: Census,
        held: Held,
        costs: Costs,
        facts: Facts,
        read: float,
        rate: float | None,
        width: int,
    ) -> None:
        self.arch: Arch = counted.arch
        self.layout: LayoutPlan = held.layout
        self.held, self.costs = held, costs
        self.read, self.rate, self.width = read, rate, width
        self.assumed: tuple[str, ...] = ()
        self.tree: Topology | None = None
        if max(self.layout.tensor, self.layout.expert) > 1:
            self.tree = from_facts(facts)
            self.assumed = self.tree.assumed
        elements, whole = counted.elements(self.layout), counted.elements()
        routed = [site for site in elements if site.startswith(f"{EXPERTS}.")]
        self.head = elements.get(HEAD, 0)
        self.dense = sum(
            count for site, count in elements.items() if site not in (EMBED, HEAD, *routed)
        )
        chosen = sum(whole[site] for site in routed) * costs.experts_per_token
        experts = max(self.arch.routed_experts, 1)
        self.routed = chosen / experts / self.layout.tensor
        sites = {row.item: row.bytes for row in held.weights}
        self.expert_bytes = sum(sites.get(site, 0) for site in routed)
        self.dense_bytes = (
            sum(sites.values()) - self.expert_bytes - sites.get(EMBED, 0) - sites.get(TABLES, 0)
        )

    def decode(self, batch: int, context: int) -> float:
        """`batch` sequences over all domains, the fullest domain's ranks."""
        tokens = -(-batch // self.layout.data)
        heads, whole = self.costs.decode_attention_flops(context)
        flops = 2.0 * tokens * (self.dense + self.head + self.routed)
        flops += tokens * (heads / self.layout.tensor + whole)
        moved = self._weights(self._met(tokens, batch))
        moved += tokens * self.costs.cache_reads(self.held.specs, context)
        return self._time(flops, moved) + self._sent(tokens, tokens)

    def prefill(self, tokens: int, prompt: int) -> float:
        """A chunk of `tokens` tokens in each domain, of prompts of `prompt` tokens."""
        heads, whole = self.costs.prefill_attention_flops(prompt)
        flops = 2.0 * tokens * (self.dense + self.routed)
        flops += tokens / prompt * (heads / self.layout.tensor + whole)
        moved = self._weights(self._met(tokens, tokens * self.layout.data))
        return self._time(flops, moved) + self._sent(tokens, 1)

    def _met(self, tokens: int, batch: int) -> int:
        """Tokens that the experts of one rank choose from."""
        domains = max(1, self.layout.expert // self.layout.tensor)
        return min(batch, tokens * domains)

    def _weights(self, tokens: int) -> float:
        experts = max(self.arch.routed_experts, 1)
        share = self.costs.distinct_experts(tokens) / experts
        return self.dense_bytes + share * self.expert_bytes

    def _time(self, flops: float, moved: float) -> float:
        return max(moved / self.read, flops / self.rate if self.rate else 0.0)

    def _sent(self, tokens: int, scored: int) -> float:
        """All collectives of a step of `tokens` tokens a domain; `scored` of them need logits."""
        if self.tree is None:
            return 0.0
        tensor, expert, wide = self.layout.tensor, self.layout.expert, self.costs.hidden
        row, micros = tokens * wide * self.width, 0.0
        if tensor > 1:
            apart = expert > tensor  # the experts' sum comes back by another way
            micros += (1 if apart else 2) * self.arch.layers * self._reduced(tensor, row)
            micros += self._reduced(tensor, row)  # the embedding's
            micros += self._direct(tensor, scored * self.arch.vocab_size * self.width)
        if expert > tensor:
            ranks = expert * (1 - (1 - 1 / expert) ** self.costs.experts_per_token)
            out = tokens / tensor * ranks
            each = self._direct(expert, out * (wide + wide / 128))
            each += self._direct(expert, out * wide * self.width)
            if tensor > 1:
                each += self._direct(tensor, row)
            micros += self.arch.layers * each
        return micros / 1e6

    def _reduced(self, ranks: int, size: float) -> float:
        tree = self._group(ranks)
        return links.best(links.PEER if tree.peer else links.HOST, tree, int(size))[1]

    def _direct(self, ranks: int, size: float) -> float:
        tree = self._group(ranks)
        return links.direct(tree, int(size), through_host=not tree.peer)

    def _group(self, ranks: int) -> Topology:
        """One group's tree: every group talks at once, so each has its part of what all share."""
        assert self.tree is not None
        part = ranks / self.layout.ranks
        return replace(
            self.tree.first(ranks),
            dram_bytes_s=self.tree.dram_bytes_s * part,
            crossing_bytes_s=self.tree.crossing_bytes_s * part,
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def rates(prediction: Prediction | None) -> tuple[float | None, float | None]:
    """(prefill, decode) tokens per second to four digits; None where nothing is predicted."""
    if prediction is None:
        return None, None
    return _rounded(prediction.prefill_tok_s), _rounded(prediction.decode_tok_s)
