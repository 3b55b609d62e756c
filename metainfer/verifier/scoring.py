"""Logits of a text, teacher-forced: a prompt in chunks, then single steps on given tokens."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metainfer.core.errors import InternalError
from metainfer.core.request import SamplingParams
from metainfer.core.step import Phase
from metainfer.kernels.table import Function
from metainfer.kv.store.entries import gather, locate
from metainfer.ops.common import wide
from metainfer.ops.indexer.ref import scores as index_scores
from metainfer.ops.moe_route.ref import scores as router_scores
from metainfer.verifier.probe import Call, Tap
from metainfer.verifier.subject import Running


@dataclass(frozen=True, slots=True)
class Text:
    """`tokens`; the first `prompt` come as a prompt, the others step by step."""

    name: str
    tokens: tuple[int, ...]
    prompt: int


@dataclass(slots=True)
class Scored:
    """`logits` [len(tokens) - 1, V] float64: row i scores token i + 1. `reported`: the
    log-probabilities of prompt tokens as the engine reports them. `choices`: (site, call) -> what
    routers and selections chose, [rows, k] sorted, with the gap to the next best [rows]."""

    logits: Tensor
    reported: list[float]
    choices: dict[tuple[str, int], tuple[Tensor, Tensor]] = field(default_factory=dict)


class _Watch:
    """Takes logits, forces tokens, notes choices."""

    def __init__(self, text: Text, head: str) -> None:
        self._text, self._head = text, head
        self.rows: list[Tensor] = []
        self.choices: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        self._drawn = 0

    def __call__(self, call: Call, go: Function) -> Any:
        result = go(*call.args, **call.kwargs)
        if call.site == self._head and call.phase is Phase.CHUNK:
            self.rows.append(result.detach().double().cpu())
        elif call.op == "sample":
            if call.phase is not Phase.CHUNK:
                self.rows.append(call.args[0].detach().double().cpu())
            token = self._text.tokens[self._text.prompt + self._drawn]
            self._drawn += 1
            return dataclasses.replace(result, tokens=torch.full_like(result.tokens, token))
        elif call.op in ("moe_route", "index_select"):
            key = (call.site, call.number)
            chosen = result[0] if call.op == "moe_route" else result
            gap = _router_gap(call) if call.op == "moe_route" else _select_gap(call)
            pair = (chosen.sort(dim=-1).values.cpu(), gap.cpu())
            self.choices.setdefault(key, []).append(pair)
        return result


def score(running: Running, text: Text, *taps: Tap) -> Scored:
    """One run. `taps` see the calls that the watch saw, nearer to the op.

    Raises:
        InternalError: the engine gave an error or another number of rows.
    """
    watch = _Watch(text, head_site(running))
    steps = len(text.tokens) - text.prompt
    params = SamplingParams(
        temperature=0.0, max_tokens=steps, prompt_logprobs=0, logprobs=0, ignore_eos=True
    )
    with running.probe.tapped(watch, *taps):
        (answer,) = running.ask([text.tokens[: text.prompt]], params)
    if answer.error:
        raise InternalError(f"{text.name}: {answer.error}")
    logits = torch.cat(watch.rows)
    if len(logits) != len(text.tokens) - 1:
        raise InternalError(f"{len(logits)} rows of logits for {len(text.tokens)} tokens")
    choices = {
        key: (torch.cat([chosen for chosen, _ in calls]), torch.cat([gap for _, gap in calls]))
        for key, calls in watch.choices.items()
    }
    return Scored(logits, [item.logprob for item in answer.prompt_logprobs], choices)


def head_site(running: Running) -> str:
    """Where the output head is."""
    specs = running.resolved.arch.packed_weights()
    return next(spec.site for spec in specs if spec.name == "lm_head")


def _router_gap(call: Call) -> Tensor:
    """Between the last chosen expert and the next, [T]."""
    x, gate, bias = call.args
    order = (router_scores(x, gate) + bias).sort(dim=-1, descending=True).values
    top_k = call.kwargs["top_k"]
    if top_k >= order.shape[1]:
        return torch.full((len(x),), float("inf"))
    gap: Tensor = order[:, top_k - 1] - order[:, top_k]
    return gap.double()


def _select_gap(call: Call) -> Tensor:
    """Between the last selected entry and the next, [T]; relative to the row's largest."""
    q, g, pages, table, positions, starts, contexts = call.args
    ratio, top_k, scale = (call.kwargs[name] for name in ("ratio", "top_k", "scale"))
    gaps = torch.full((q.shape[0],), float("inf"), dtype=torch.float64)
    for s, context in enumerate(contexts.tolist()):
        begin, end, total = int(starts[s]), int(starts[s + 1]), context // ratio
        if begin == end or total <= top_k:
            continue
        every = torch.arange(total, device=q.device)
        keys = gather(pages, locate(table[s], pages.entries, every))
        value = wide(index_scores(q[begin:end], g[begin:end], keys, scale)).double()
        hidden = every >= ((positions[begin:end] + 1) // ratio).unsqueeze(1)
        best = value.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True).values
        found = best[:, top_k - 1] - best[:, top_k]
        gaps[begin:end] = found.nan_to_num(posinf=float("inf")).cpu()
    return gaps


def flips(one: Scored, other: Scored, near: float) -> tuple[int, int]:
    """Rows before the first choice that differs at a gap of at most `near` (of `other`), and how
    many choices before it differ at a larger one: the first is a near tie, the second is not."""
    first, wide_apart = len(one.logits), []
    for key, (theirs, gap) in other.choices.items():
        mine, _ = one.choices.get(key, (theirs[:0], gap[:0]))
        if mine.shape != theirs.shape:
            return first, len(theirs)
        for row in (mine != theirs).any(dim=-1).nonzero().flatten().tolist():
            if gap[row] <= near:
                first = min(first, row)
            else:
                wide_apart.append(row)
    return first, sum(row < first for row in wide_apart)
