"""An engine process without a model: speaks the protocol, answers deterministically.

A prompt that holds ``say:`` is answered with what follows (and then end of sequence); any other
prompt with letters that depend on the prompt, the seed and the position. Flags make it slow, deaf,
refusing or mortal. Each command it gets is a line in ``--log``.

With ``--script FILE`` (``{"vocab", "eos", "first_byte", "replies": {name: ids}}``) it plays a
recorded answer for each prompt that holds ``play:NAME;``, or the first of its ``cues``, and logs
the prompts it is given. With
``--held TEXT`` it says so only as far as a request's grammar lets it (`held.py`).

With ``--hold-at N`` no request gets more than N tokens until the file ``--release`` is there: a
stream stays open for as long as a test looks at it, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from metainfer.core.request import FinishReason, Request
from metainfer.core.step import RequestOutput, TokenLogprobs
from metainfer.engine.protocol import (
    Cancel,
    EngineInfo,
    EngineStats,
    Failed,
    Outputs,
    Progress,
    Ready,
    Rejected,
    Submit,
    ToEngine,
)

VOCAB = 300
EOS = 256
MAX_CONTEXT = 2048
OPS = {"linear@decode": {"impl": "linear/fake", "quality": "native", "evidence": "ran"}}


def play(request: Request, script: dict[str, Any]) -> Iterator[int | None]:
    """The recorded answer that the last message names."""
    base = script["first_byte"]
    text = bytes(token - base for token in request.prompt if base <= token < base + 256)
    cued = (name for cue, name in script.get("cues", {}).items() if cue.encode() in text)
    name = next(cued, text.rpartition(b"play:")[2].split(b";")[0].decode())
    yield from script["replies"][name]
    while True:
        yield None


def reply(request: Request) -> Iterator[int | None]:
    """The tokens of `request`; None is end of sequence."""
    text = bytes(token for token in request.prompt if token < 256)
    start = text.rfind(b"say:")
    if start >= 0:
        said = text[start + 4 :].split(b"\nassistant: ")[0].split(b"\x00")[0]
        yield from said
        yield None
        return
    base = zlib.crc32(text) + (request.params.seed or 0)
    place = 0
    while True:
        yield 97 + (base + place * 7 + place // 26) % 26
        place += 1


def reply_text(prompt: str, count: int, seed: int = 0) -> str:
    """What the fake answers to a plain prompt, for tests to compare with."""
    base = zlib.crc32(prompt.encode()) + seed
    return "".join(chr(97 + (base + i * 7 + i // 26) % 26) for i in range(count))


def logprob(token: int, top: int) -> TokenLogprobs:
    others = tuple(((token + i) % VOCAB, -0.25 - i) for i in range(top))
    return TokenLogprobs(token, -0.25, others, 1)


class Fake:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.live: dict[str, tuple[Request, Iterator[int | None], int]] = {}
        self.steps = self.generated = self.prompted = 0
        self.dying = False
        self.script: dict[str, Any] | None = None
        self.vocab, self.eos = VOCAB, EOS
        if options.script:
            self.script = json.loads(Path(options.script).read_text())
            self.vocab, self.eos = self.script["vocab"], self.script["eos"]
        self.held = None
        if options.held:
            from held import Held

            self.held = Held(options.held, self.vocab, self.eos)
        self.log = open(options.log, "a", buffering=1) if options.log else None  # noqa: SIM115

        self.first: dict[str, int] = {}  # request -> the step that gives its first tokens
        self.times: list[float] = []  # of each step's results, monotonic

    def stamp(self, path: str) -> None:
        """Write down which step gave what, and when."""
        Path(path).write_text(json.dumps({"first": self.first, "times": self.times}))

    def note(self, text: str) -> None:
        if self.log is not None:
            self.log.write(text + "\n")

    def submit(self, request: Request) -> Rejected | None:
        self.note(f"submit {request.request_id} {json.dumps(msgspec.to_builtins(request.params))}")
        if len(self.live) >= self.options.max_running:
            return Rejected(
                request.request_id, 429, "The queue is full.", "Try later.", "queue_full",
                None, "rate_limit_error", 2.0,
            )  # fmt: skip
        tokens = reply(request)
        if self.script is not None:
            self.note(f"prompt {json.dumps(request.prompt)}")
            tokens = play(request, self.script)
        if self.held is not None and request.params.grammar is not None:
            tokens = self.held.say(tokens, request.params.grammar)
        self.live[request.request_id] = (request, tokens, 0)
        self.prompted += len(request.prompt)
        self.first[request.request_id] = self.steps
        return None

    def cancel(self, request_ids: tuple[str, ...]) -> Outputs:
        ended = []
        for request_id in request_ids:
            self.note(f"cancel {request_id}")
            if request_id in self.live:
                index = self.live.pop(request_id)[2]
                ended.append(RequestOutput(request_id, (), index, finish=FinishReason.CANCELLED))
        return Outputs(tuple(ended), EngineStats(running=len(self.live), steps=self.steps))

    def step(self) -> Outputs:
        outputs = []
        for key, (request, tokens, index) in list(self.live.items()):
            if self.held_back(index):
                continue
            output = self.advance(request, tokens, index)
            if output.finish is not None:
                del self.live[key]
            else:
                self.live[key] = (request, tokens, index + len(output.tokens))
            outputs.append(output)
            self.generated += len(output.tokens)
            if 0 < self.options.die_at <= index + len(output.tokens):
                self.dying = True
        if not outputs:
            time.sleep(0.005)  # all are held back
        self.steps += 1
        self.times.append(time.monotonic())
        return Outputs(
            tuple(outputs),
            EngineStats(
                running=len(self.live), kv_used=len(self.live) / 64, steps=self.steps,
                prompt_tokens=self.prompted, generated_tokens=self.generated,
            ),
        )  # fmt: skip

    def held_back(self, index: int) -> bool:
        """Whether a request with `index` tokens must wait."""
        most = self.options.hold_at
        if most is None or index < most:
            return False
        return not (self.options.release and Path(self.options.release).exists())

    def advance(self, request: Request, tokens: Iterator[int | None], index: int) -> RequestOutput:
        params = request.params
        out: list[int] = []
        finish, stop = None, None
        if params.max_tokens == 0:
            finish = FinishReason.LENGTH
        while finish is None and len(out) < self.options.tokens_per_step:
            token = next(tokens)
            if token is None:
                finish, stop = FinishReason.STOP, self.eos
                break
            out.append(token)
            if index + len(out) >= params.max_tokens:
                finish = FinishReason.LENGTH
        if b"fail:" in bytes(t for t in request.prompt if t < 256) and index >= 2:
            return RequestOutput(
                request.request_id, (), index, finish=FinishReason.ERROR, error="NaN in logits"
            )
        chosen = () if params.logprobs is None else tuple(logprob(t, params.logprobs) for t in out)
        prompt: tuple[TokenLogprobs, ...] = ()
        if params.prompt_logprobs is not None and index == 0:
            prompt = tuple(logprob(t, params.prompt_logprobs) for t in request.prompt[1:])
        return RequestOutput(
            request.request_id, tuple(out), index, chosen, prompt, finish, stop,
            cached_tokens=len(request.prompt) // 16 * 16, queue_s=0.0 if index == 0 else None,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--log")
    parser.add_argument("--script")
    parser.add_argument("--stamps", help="write the times of all steps here at the end")
    parser.add_argument("--held")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--release", help="file that ends --hold-at")
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--max-running", type=int, default=10_000)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--die-at-start", action="store_true")
    parser.add_argument("--hang-at-start", action="store_true")
    parser.add_argument("--deaf", action="store_true", help="take requests, never answer")
    parser.add_argument("--garble", action="store_true", help="answer with what is no message")
    parser.add_argument("--ignore-stop", action="store_true")
    options = parser.parse_args()
    intent = json.loads(sys.stdin.readline())["intent"]
    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(options.address)

    def send(message: object) -> None:
        socket.send(msgspec.msgpack.encode(message))

    send(Progress("weights"))
    if options.die_at_start:
        time.sleep(0.2)
        os._exit(7)
    while options.hang_at_start:
        time.sleep(1)
    if options.refuse:
        send(Failed("Nothing fits.", "Lower --context.", "does_not_fit", 1))
        socket.close(linger=1000)
        return 1
    send(Progress("weights", 0.25, "fake"))
    fake = Fake(options)
    info = EngineInfo(
        intent["model"], fake.vocab, MAX_CONTEXT, 65536, 64, (fake.eos,),
        {"plan": {"fingerprint": "fake0123", "ops": OPS}, "intent": intent},
        (("weights", 0.25),),
    )  # fmt: skip
    send(Ready(info))
    decode = msgspec.msgpack.Decoder(ToEngine).decode
    while True:
        busy = bool(fake.live) and not options.deaf
        while not busy or socket.poll(0):
            message = decode(socket.recv())
            if isinstance(message, Submit):
                for request in message.requests:
                    refusal = fake.submit(request)
                    if refusal is not None:
                        send(refusal)
            elif isinstance(message, Cancel):
                send(fake.cancel(message.request_ids))
            elif not options.ignore_stop:
                fake.note(f"stop {message.drain}")
                if options.stamps:
                    fake.stamp(options.stamps)
                socket.close(linger=1000)
                return 0
            busy = bool(fake.live) and not options.deaf
        if options.step_ms:
            time.sleep(options.step_ms / 1000)
        send({"type": "outputs", "outputs": 1} if options.garble else fake.step())
        if fake.dying:
            time.sleep(0.2)  # let the socket's thread hand over what was sent
            os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
