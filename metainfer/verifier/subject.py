"""The thing under verification: a model, an intent, this machine; engines are started from it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from metainfer.core.errors import InternalError
from metainfer.core.intent import Intent
from metainfer.core.ledger import Origin
from metainfer.core.request import FinishReason, Request, SamplingParams
from metainfer.core.step import TokenLogprobs
from metainfer.engine.engine import Engine
from metainfer.engine.machine import Machine
from metainfer.engine.model_text import TextTools, load_text
from metainfer.engine.protocol import EngineInfo, Progress
from metainfer.kernels.registry import Registry
from metainfer.planner.opening import OpenedModel
from metainfer.planner.resolve import Resolved
from metainfer.verifier.probe import Probe

Say = Callable[[str], None]

TEXT = (
    "The harbour town of Veldren lies where two rivers meet. In 1847 its council ordered a "
    "lighthouse, 31 metres high, built of grey stone; the keeper's notes of the first winter say: "
    "'fog for nine days, no ship, oil low'. What would you have done? Nobody answers."
)
"""The fixed text that answers are scored on."""


@dataclass(slots=True)
class Answer:
    """What an engine said to one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str = ""


_names = itertools.count()


@dataclass(slots=True)
class Running:
    """A started engine with its probe."""

    engine: Engine
    info: EngineInfo
    probe: Probe

    @property
    def resolved(self) -> Resolved:
        if self.engine.resolved is None:
            raise InternalError("the engine has not started")
        return self.engine.resolved

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        eos: tuple[int, ...] = (),
        salt: str | None = None,
    ) -> list[Answer]:
        """Submit all prompts at once, run until idle, answers in order. Without a `salt` each
        request has one of its own, so that nothing is found in the prefix cache."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        answers: dict[str, Answer] = {}
        for prompt, wanted in zip(prompts, each, strict=True):
            name = f"verify-{next(_names)}"
            answers[name] = Answer()
            own = name if salt is None else salt
            self.engine.submit(Request(name, tuple(prompt), wanted, eos, cache_salt=own))
        while self.engine.has_work:
            outputs, _ = self.engine.step()
            for output in outputs:
                answer = answers[output.request_id]
                answer.tokens += output.tokens
                answer.logprobs += output.logprobs
                answer.prompt_logprobs += output.prompt_logprobs
                answer.finish, answer.stop_token = output.finish, output.stop_token
                answer.cached_tokens = max(answer.cached_tokens, output.cached_tokens)
                answer.error = answer.error or output.error
        return list(answers.values())


@dataclass(slots=True)
class Subject:
    """`main` is the engine on the intent as given; the other checks' engines differ from it in what
    they name. `tie`: how near two log-probabilities may be to count as equal; set by the end-to-end
    check, which measures it."""

    intent: Intent
    machine: Machine
    model: OpenedModel
    say: Say
    seed: int
    main: Running
    text: TextTools
    tie: float = 1e-3

    @property
    def plan(self) -> Any:
        return self.main.resolved.plan

    @property
    def vocab(self) -> int:
        return self.model.arch.vocab_size

    @contextmanager
    def engine(self, *, registry: Registry | None = None, **changes: Any) -> Iterator[Running]:
        """Another engine, for the block, on the intent with `changes`."""
        origins = {**self.intent.origins, **dict.fromkeys(changes, Origin.DERIVED)}
        intent = dataclasses.replace(self.intent, **changes, origins=origins)
        machine = self.machine
        if registry is not None:
            known = {impl.id: _trusted(impl.id) for impl in registry.impls()}
            machine = dataclasses.replace(machine, registry=registry, qualified=known)
        running = start(intent, machine)
        try:
            yield running
        finally:
            running.engine.close()

    def words(self, most: int) -> list[int]:
        """Ids of the fixed text, `most` at the longest."""
        ids = self.text.tokenizer.encode(TEXT, parse_special=False)
        return [token for token in ids if token < self.vocab][:most]

    def noise(self, count: int, salt: int = 0) -> list[int]:
        """Random ids."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + salt)
        low = min(16, self.vocab // 4)
        return torch.randint(low, self.vocab, (count,), generator=generator).tolist()

    def room(self, wanted: int) -> int:
        """How long a text of the checks may be: `wanted`, or what the context holds."""
        return max(2, min(wanted, int(self.plan.limits.max_context) - 2))


def _trusted(impl: str) -> Any:
    """A reference is what the others are judged by; its own cases say nothing."""
    from metainfer.kernels.evidence import Qualification

    return Qualification(impl, True)


def start(
    intent: Intent,
    machine: Machine,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Running:
    """Raises whatever `Engine.start` raises."""
    probe = Probe()
    engine = Engine(intent, on_progress, trace=probe, machine=machine)
    return Running(engine, engine.start(), probe)


def open_subject(
    intent: Intent, machine: Machine, model: OpenedModel, say: Say, seed: int
) -> Subject:
    """Start the engine that is verified.

    Raises:
        UserError: the machine, the model or a wish stands against it.
    """

    def shown(progress: Progress) -> None:
        if progress.seconds is not None:
            say(f"  {progress.phase:<20} {progress.seconds:7.2f} s")

    main = start(intent, machine, shown)
    text = load_text(intent.model, model.arch.vocab_size)
    return Subject(intent, machine, model, say, seed, main, text)


def layout_pins(resolved: Resolved) -> Mapping[str, str]:
    """The cache layouts of a plan whose rounding belongs to its recipe."""
    scaled = ("fp8", "fp4")
    return {
        role: layout
        for role, layout in resolved.plan.bundle.items()
        if role in ("kv", "index") and any(word in layout for word in scaled)
    }
