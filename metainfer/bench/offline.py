"""`bench offline`: decode and prefill speed of one engine, beside `transformers` in the same run.

Verified before timed: the reference's log-probabilities of a prompt must be ours. Prompts are
unique from their first token, the prefix cache is off, answers have a fixed length; every row says
its context. The two sides take turns, so that a machine whose speed drifts favours neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metainfer.bench.conditions import conditions
from metainfer.core.errors import RefusedError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.request import Request, SamplingParams
from metainfer.core.step import RequestOutput
from metainfer.engine.engine import Engine
from metainfer.planner.opening import open_model

LOGPROB_BAR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """What to measure. Token counts per request; `prefill_tokens` 0 skips the prefill row."""

    prompt_tokens: int = 40
    output_tokens: int = 90
    batches: tuple[int, ...] = (1, 8)
    prefill_tokens: int = 1000
    repeats: int = 5
    against: str = ""
    seed: int = 0


def run(intent: Intent, options: OfflineOptions, log: Callable[[str], None]) -> dict[str, object]:
    """Measure and return ``{"rows", "verification", "conditions"}``.

    Raises:
        RefusedError: the reference disagrees, so nothing was timed.
    """
    origins = {**intent.origins, "prefix_cache": Origin.DERIVED}
    engine = Engine(replace(intent, prefix_cache=False, origins=origins), lambda progress: None)
    info = engine.start()
    ours = EngineSide(engine, info.vocab_size)
    prompt, output = options.prompt_tokens, options.output_tokens
    entering = max((ours.entering(batch, prompt) for batch in options.batches), default=0)
    longest = max(prompt + output + entering, options.prefill_tokens + 1)
    if longest > info.max_context:
        raise RefusedError(
            f"the longest row needs {longest} tokens, the context is {info.max_context}.",
            "Raise --context or shorten the rows.",
        )
    sides: list[tuple[str, Any]] = [("metainfer", ours)]
    verification: dict[str, object] = {"checked": False}
    if options.against == "transformers":
        theirs = _Transformers(intent.model)
        sides.append(("transformers", theirs))
        verification = _verify(ours, theirs, options)
        log(f"verified: log-probabilities differ by at most {verification['max_difference']:.1e}")
    rows = []
    for batch in options.batches:
        rows += _decode_rows(sides, batch, options, log)
    if options.prefill_tokens:
        rows += _prefill_rows(sides, options, log)
    assert engine.resolved is not None
    described = conditions(engine.resolved.plan)
    engine.close()
    return {"rows": rows, "verification": verification, "conditions": described}


class EngineSide:
    """The engine as a timed thing. Decodes are timed while every sequence is running: prompts that
    do not fit one step enter behind the first, which goes on meanwhile."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        self.engine = engine
        self.vocab = vocab
        self._count = 0
        self._running: list[str] = []

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        """(seconds of prefill, seconds of decode): the border is the last first token."""
        begin = time.perf_counter()
        self.fill(prompts, tokens)
        border = time.perf_counter()
        self.decode(tokens - 1)
        end = time.perf_counter()
        self.end()
        return border - begin, end - border

    def entering(self, count: int, prompt_tokens: int) -> int:
        """Tokens at most that the first of `count` sequences makes before the last has one."""
        assert self.engine.resolved is not None
        limits = self.engine.resolved.plan.limits
        rest = count * prompt_tokens - limits.step_tokens
        beside = max(1, min(limits.mixed_prefill_tokens, limits.step_tokens - count))
        return 1 - (-rest // beside) if rest > 0 else 0

    def fill(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Start prompts of one length, up to the first token of each; all can make `tokens` then.

        Raises:
            RefusedError: one of them was found in the prefix cache.
        """
        most = tokens + self.entering(len(prompts), len(prompts[0]))
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        for prompt in prompts:
            self._count += 1
            self._running.append(name := f"bench-{self._count}")
            self.engine.submit(Request(name, tuple(prompt), params))
        waiting = set(self._running)
        while waiting:
            for output in self._step():
                if output.tokens:
                    waiting.discard(output.request_id)
                if output.cached_tokens:
                    raise RefusedError(
                        "a benchmark prompt was found in the prefix cache.",
                        "Pass --no-prefix-cache, or another --seed.",
                    )

    def decode(self, steps: int) -> None:
        """Let every sequence that runs make `steps` tokens more.

        Raises:
            RefusedError: they do not all run at once.
        """
        left = steps * len(self._running)
        while left > 0:
            left -= sum(len(output.tokens) for output in self._step())

    def end(self) -> None:
        """Stop what runs."""
        self.engine.cancel(self._running)
        self._running.clear()
        while self.engine.has_work:
            self.engine.step()

    def _step(self) -> list[RequestOutput]:
        if not self.engine.has_work:
            raise RefusedError(
                "a request of the benchmark ended before all of them were running.",
                "Raise --context or the cache's memory, or ask for smaller batches.",
            )
        return self.engine.step()[0]

    def logprobs(self, prompt: Sequence[int]) -> list[float]:
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        self.engine.submit(Request(f"bench-{self._count}", tuple(prompt), params))
        found: list[float] = []
        while self.engine.has_work:
            outputs, _ = self.engine.step()
            for output in outputs:
                found += [item.logprob for item in output.prompt_logprobs]
        return found


class _Transformers:
    """`transformers` float32 greedy generate on the decoded weights."""

    def __init__(self, reference: str) -> None:
        from metainfer.bench.reference import transformers_model

        self.model = transformers_model(open_model(reference))

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
        import torch

        ids = torch.tensor([list(prompt) for prompt in prompts])
        seconds = []
        for count in (1, tokens):
            begin = time.perf_counter()
            with torch.inference_mode():
                self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )
            seconds.append(time.perf_counter() - begin)
            if tokens == 1:
                return seconds[0], 0.0
        return seconds[0], seconds[1] - seconds[0]

    def logprobs(self, prompt: Sequence[int]) -> list[float]:
        import torch

        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            scores = self.model(ids).logits[0].float().log_softmax(-1)
        found: list[float] = scores[:-1].gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        return found


def _verify(ours: EngineSide, theirs: _Transformers, options: OfflineOptions) -> dict[str, object]:
    prompt = drawn_prompts(1, min(200, options.prompt_tokens * 4), ours.vocab, options.seed + 999)[
        0
    ]
    pairs = zip(ours.logprobs(prompt), theirs.logprobs(prompt), strict=True)
    worst = max(abs(a - b) for a, b in pairs)
    if not worst <= LOGPROB_BAR:
        raise RefusedError(
            f"log-probabilities differ from transformers by {worst:.2e}, "
            f"more than {LOGPROB_BAR:.0e}.",
            "Nothing was timed; run `metainfer verify`.",
            code="not_verified",
        )
    return {"checked": True, "max_difference": worst, "bar": LOGPROB_BAR, "tokens": len(prompt)}


def _decode_rows(
    sides: Sequence[tuple[str, Any]],
    batch: int,
    options: OfflineOptions,
    log: Callable[[str], None],
) -> list[dict[str, object]]:
    rates: dict[str, list[float]] = {name: [] for name, _ in sides}
    last = options.prompt_tokens + options.output_tokens
    title = f"decode, batch {batch}, context {options.prompt_tokens}-{last}"
    log(f"measuring {title}")
    for turn in range(options.repeats + 1):
        for name, side in sides:
            vocab = sides[0][1].vocab
            seed = options.seed + 31 * turn + 104_729 * batch
            prompts = drawn_prompts(batch, options.prompt_tokens, vocab, seed)
            _, decode_s = side.generate(prompts, options.output_tokens)
            if turn:  # the first turn warms both up
                rates[name].append(batch * (options.output_tokens - 1) / decode_s)
    return [_row(title, name, values) for name, values in rates.items()]


def _prefill_rows(
    sides: Sequence[tuple[str, Any]], options: OfflineOptions, log: Callable[[str], None]
) -> list[dict[str, object]]:
    rates: dict[str, list[float]] = {name: [] for name, _ in sides}
    title = f"prefill, {options.prefill_tokens} tokens"
    log(f"measuring {title}")
    for turn in range(options.repeats + 1):
        for name, side in sides:
            vocab = sides[0][1].vocab
            prompts = drawn_prompts(
                1, options.prefill_tokens, vocab, options.seed + 7919 * (turn + 1)
            )
            seconds, _ = side.generate(prompts, 1)
            if turn:
                rates[name].append(options.prefill_tokens / seconds)
    return [_row(title, name, values) for name, values in rates.items()]


def _row(title: str, engine: str, values: Sequence[float]) -> dict[str, object]:
    median = statistics.median(values)
    spread = statistics.median(abs(value - median) for value in values)
    return {
        "row": title,
        "engine": engine,
        "unit": "tokens/s",
        "median": median,
        "mad": spread,
        "n": len(values),
        "values": list(values),
    }


def drawn_prompts(count: int, tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """Random ids; the first differs per request, so that no prefix is shared."""
    import random

    source = random.Random(seed)
    low = min(16, vocab // 4)
    return [[source.randrange(low, vocab) for _ in range(tokens)] for _ in range(count)]
