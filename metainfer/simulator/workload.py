"""What arrives: requests with their times, drawn from a short specification and a seed. No torch.

====================  ============================================================================
``closed``            `requests` requests, `concurrency` of them at any time; with `think`, that
                      many clients, each of which waits so many seconds before its next one
``poisson``           `requests` requests at exponential gaps, `rate` a second
``shared``            ``closed``, every prompt behind one of `groups` prefixes of `prefix` tokens
``agentic``           `concurrency` sessions of `turns` turns: a long first prompt, then each turn
                      is all before it, the answer included, and `step` new tokens, after `think` s
``file:PATH``         JSON lines: {"at_s", "prompt_tokens" or "prompt", "output_tokens"}
====================  ============================================================================

``NAME:key=value,...``; lengths are a number or LOW-HIGH, drawn evenly. The same specification,
seed and vocabulary give the same requests to the simulator and to ``bench serve``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from metainfer.core.errors import UsageError

LOWEST_ID = 16
"""Ids below are left out of drawn prompts: control tokens of many vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request. `prompt`: its own ids. `at_s`: when it arrives; None: as soon as a place of the
    workload's concurrency is free. `after`: the job whose end it waits for, `think_s` more; where
    it `extends` that job, its prompt stands behind that job's prompt and answer."""

    prompt: tuple[int, ...]
    output: int
    at_s: float | None = None
    after: int | None = None
    think_s: float = 0.0
    extends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`concurrency`: places for jobs without a time; 0 where every job has one."""

    spec: str
    seed: int
    jobs: tuple[Job, ...]
    concurrency: int = 0
    text_class: str = "random token ids"
    conditions: Mapping[str, object] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, answer included."""
        held: list[int] = []
        for job in self.jobs:
            before = held[job.after] if job.after is not None and job.extends else 0
            held.append(before + len(job.prompt) + job.output)
        return max(held)


class _Options:
    """Key=value pairs of a specification, each read once; what is left over is unknown."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._left: dict[str, str] = {}
        for item in filter(None, text.split(",")):
            key, equals, value = item.partition("=")
            if not equals or not value or key in self._left:
                raise self._wrong(f"{item!r} is not one KEY=VALUE")
            self._left[key] = value

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"workload {self._name}: {what}.", USAGE, code="bad_workload")

    def number(self, key: str, default: float, least: float) -> float:
        text = self._left.pop(key, None)
        try:
            value = default if text is None else float(text)
        except ValueError:
            raise self._wrong(f"{key} is {text!r}, no number") from None
        if not least <= value < 1e9:
            raise self._wrong(f"{key} is {value:g}; it must be at least {least:g}")
        return value

    def count(self, key: str, default: int, least: int = 1) -> int:
        value = self.number(key, default, least)
        if value != int(value):
            raise self._wrong(f"{key} is {value:g}, no whole number")
        return int(value)

    def lengths(self, key: str, default: str) -> tuple[int, int]:
        low, dash, high = self._left.pop(key, default).partition("-")
        try:
            found = (int(low), int(high) if dash else int(low))
        except ValueError:
            raise self._wrong(f"{key} is neither a length nor LOW-HIGH") from None
        if not 1 <= found[0] <= found[1]:
            raise self._wrong(f"{key} {found[0]}-{found[1]} is no range of lengths from 1")
        return found

    def finish(self) -> None:
        if self._left:
            raise self._wrong(f"unknown {', '.join(sorted(self._left))}")


USAGE = (
    "Write closed:concurrency=8,requests=64,prompt=1000,output=200, poisson:rate=2,..., "
    "shared:prefix=2000,groups=4,..., agentic:turns=6,step=500,think=1,... or file:PATH."
)


def draw(spec: str, vocab: int, seed: int = 0) -> Workload:
    """The workload of a specification.

    Raises:
        UsageError: an unknown kind or key, a value out of range, a file that cannot be read.
    """
    name, _, text = spec.partition(":")
    if name == "file":
        return _from_file(text, vocab, spec, seed)
    if name not in _KINDS:
        raise UsageError(f"workload {name!r} is not known.", USAGE, code="bad_workload")
    options = _Options(name, text)
    source = random.Random(f"{seed}:{vocab}")
    jobs, concurrency = _KINDS[name](options, source, vocab)
    options.finish()
    return Workload(spec=spec, seed=seed, jobs=tuple(jobs), concurrency=concurrency)


Drawn = tuple[list[Job], int]


def _ids(source: random.Random, count: int, vocab: int) -> tuple[int, ...]:
    low = min(LOWEST_ID, vocab // 4)
    return tuple(source.choices(range(low, vocab), k=count))


def _between(source: random.Random, lengths: tuple[int, int]) -> int:
    return source.randint(*lengths)


def _closed(options: _Options, source: random.Random, vocab: int) -> Drawn:
    concurrency = options.count("concurrency", 8)
    requests = options.count("requests", 8 * concurrency)
    prompts, outputs = options.lengths("prompt", "1000"), options.lengths("output", "200")
    jobs = [
        Job(prompt=_ids(source, _between(source, prompts), vocab), output=_between(source, outputs))
        for _ in range(requests)
    ]
    think = options.number("think", 0.0, 0.0)
    if not think:
        return jobs, concurrency
    clients = [
        replace(job, at_s=0.0)
        if index < concurrency
        else replace(job, after=index - concurrency, think_s=think)
        for index, job in enumerate(jobs)
    ]
    return clients, 0


def _poisson(options: _Options, source: random.Random, vocab: int) -> Drawn:
    rate, requests = options.number("rate", 1.0, 1e-6), options.count("requests", 64)
    prompts, outputs = options.lengths("prompt", "1000"), options.lengths("output", "200")
    jobs, now = [], 0.0
    for _ in range(requests):
        now += source.expovariate(rate)
        prompt = _ids(source, _between(source, prompts), vocab)
        jobs.append(Job(prompt=prompt, output=_between(source, outputs), at_s=now))
    return jobs, 0


def _shared(options: _Options, source: random.Random, vocab: int) -> Drawn:
    prefix, groups = options.count("prefix", 2000), options.count("groups", 4)
    heads = [_ids(source, prefix, vocab) for _ in range(groups)]
    jobs, concurrency = _closed(options, source, vocab)
    behind = [replace(job, prompt=source.choice(heads) + job.prompt) for job in jobs]
    return behind, concurrency


def _agentic(options: _Options, source: random.Random, vocab: int) -> Drawn:
    sessions, turns = options.count("concurrency", 4), options.count("turns", 6)
    prompts, steps = options.lengths("prompt", "8000"), options.lengths("step", "500")
    outputs, think = options.lengths("output", "200"), options.number("think", 1.0, 0.0)
    jobs: list[Job] = []
    for _ in range(sessions):
        for turn in range(turns):
            lengths = steps if turn else prompts
            jobs.append(
                Job(
                    prompt=_ids(source, _between(source, lengths), vocab),
                    output=_between(source, outputs),
                    at_s=None if turn else 0.0,
                    after=len(jobs) - 1 if turn else None,
                    think_s=think if turn else 0.0,
                    extends=turn > 0,
                )
            )
    return jobs, 0


_KINDS: Mapping[str, Callable[[_Options, random.Random, int], Drawn]] = {
    "closed": _closed,
    "poisson": _poisson,
    "shared": _shared,
    "agentic": _agentic,
}


def _from_file(path: str, vocab: int, spec: str, seed: int) -> Workload:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"workload file {path!r} cannot be read: {error}.", USAGE) from None
    source = random.Random(f"{seed}:{vocab}")
    jobs, last = [], 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at, output = float(row["at_s"]), int(row["output_tokens"])
            given = row.get("prompt")
            prompt = (
                _ids(source, int(row["prompt_tokens"]), vocab)
                if given is None
                else tuple(int(token) for token in given)
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} line {number} is no request: {error!r}.",
                'Write {"at_s": 0.5, "prompt_tokens": 1000, "output_tokens": 200} on each line.',
                code="bad_workload",
            ) from None
        if not prompt or output < 1 or not last <= at < 1e9:
            raise UsageError(
                f"{path} line {number} has {len(prompt)} prompt tokens, {output} of answer, at "
                f"{at:g} s after {last:g} s.",
                "Tokens are at least 1, times do not fall.",
                code="bad_workload",
            )
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise UsageError(
                f"{path} line {number} has ids outside the vocabulary of {vocab}.",
                "Replay it with the model that its ids are of.",
                code="bad_workload",
            )
        last = at
        jobs.append(Job(prompt=prompt, output=output, at_s=at))
    if not jobs:
        raise UsageError(f"workload file {path!r} has no request.", USAGE, code="bad_workload")
    text_class = "from a file"
    return Workload(spec=spec, seed=seed, jobs=tuple(jobs), text_class=text_class)


class Release:
    """Which jobs may arrive now, whoever serves them. `ended` tells it of each end.

    Jobs without a time and without a predecessor enter in order while a place is free.
    """

    def __init__(self, workload: Workload) -> None:
        self._jobs = workload.jobs
        self._places = workload.concurrency
        self._queue = [
            i for i, job in enumerate(workload.jobs) if job.at_s is None and job.after is None
        ][::-1]
        self._timed = sorted(
            ((job.at_s, i) for i, job in enumerate(workload.jobs) if job.at_s is not None),
            reverse=True,
        )
        self._successor = {
            job.after: i for i, job in enumerate(workload.jobs) if job.after is not None
        }
        self._histories: dict[int, tuple[int, ...]] = {}

    def ready(self, now: float) -> list[tuple[int, float, tuple[int, ...]]]:
        """(job, when it arrived, its whole prompt) of each that arrives up to `now`."""
        found = []
        while self._timed and self._timed[-1][0] <= now:
            at, index = self._timed.pop()
            found.append((index, at, self._prompt(index)))
        while self._places and self._queue:
            self._places -= 1
            index = self._queue.pop()
            found.append((index, now, self._prompt(index)))
        return found

    def next_at(self) -> float | None:
        """When the next job with a time arrives; None when none is left."""
        return self._timed[-1][0] if self._timed else None

    def ended(self, index: int, answer: Sequence[int], now: float) -> None:
        """A job ended with `answer`: a place is free, or its successor gets a time."""
        job = self._jobs[index]
        if job.at_s is None and job.after is None:
            self._places += 1
        following = self._successor.get(index)
        prompt = self._histories.pop(index)
        if following is not None:
            if self._jobs[following].extends:
                self._histories[following] = prompt + tuple(answer)
            at = now + self._jobs[following].think_s
            self._timed.append((at, following))
            self._timed.sort(reverse=True)

    def _prompt(self, index: int) -> tuple[int, ...]:
        whole = self._histories.get(index, ()) + self._jobs[index].prompt
        self._histories[index] = whole
        return whole
