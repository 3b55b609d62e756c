"""``metainfer generate``: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from metainfer.cli import output
from metainfer.cli.flags import NO_FLAGS, Adapters, EngineFlags, Json
from metainfer.cli.output import Result
from metainfer.core.errors import RequestError, UsageError

if TYPE_CHECKING:
    from metainfer.core.request import SamplingParams

SAMPLING = Group("Generation", sort_key=1)
ANY_VOCABULARY = 2**31


def _flag(*names: str, text: str) -> Parameter:
    return Parameter(name=names, help=text, group=SAMPLING, negative="")


def sampling(
    temperature: float, top_p: float, top_k: int, seed: int | None, max_tokens: int
) -> SamplingParams:
    """Sampling parameters of the command line, checked before a model is loaded.

    Raises:
        UsageError: a value is out of range. `top_k` above the vocabulary is refused later.
    """
    from metainfer.core.request import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    try:
        params.check(ANY_VOCABULARY)
    except RequestError as error:
        flag = f"--{(error.param or '').replace('_', '-')}"
        raise UsageError(error.cause, f"Set {flag} inside that range.", code=error.code) from error
    return params


def generate(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    prompt: Annotated[
        str,
        Parameter(
            name=("--prompt", "-p"),
            help="text to continue; - reads standard input",
            group=SAMPLING,
            allow_leading_hyphen=True,
        ),
    ],
    max_tokens: Annotated[int, _flag("--max-tokens", text="most tokens to generate")] = 128,
    temperature: Annotated[float, _flag("--temperature", text="0 = greedy")] = 0.0,
    top_p: Annotated[float, _flag("--top-p", text="nucleus")] = 1.0,
    top_k: Annotated[int, _flag("--top-k", text="0 = off")] = 0,
    seed: Annotated[int | None, _flag("--seed", text="makes sampling repeatable")] = None,
    stop: Annotated[
        tuple[str, ...], _flag("--stop", text="text that ends the answer (repeatable)")
    ] = (),
    chat: Annotated[bool, _flag("--chat", text="wrap the prompt in the chat template")] = False,
    engine: EngineFlags = NO_FLAGS,
    adapter: Adapters = (),
    as_json: Json = False,
) -> Result:
    """Continue a text and stop.

    Example: metainfer generate smollm2-135m --prompt "The capital of France is" --max-tokens 16
    """
    from metainfer.cli.clients import Screen
    from metainfer.cli.session import Session

    if max_tokens < 1:
        raise UsageError(f"--max-tokens is {max_tokens}.", "Pass 1 or more.")
    sampling(temperature, top_p, top_k, seed, max_tokens)  # refused before a model is loaded
    if prompt == "-":
        prompt = sys.stdin.read()
    out = output.current
    screen = Screen(quiet=not sys.stderr.isatty())

    def show(text: str) -> None:
        if not out.as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    with Session(engine.intent(model, adapter), screen) as session:
        tools = session.text
        if chat:
            turn = [{"role": "user", "content": prompt}]
            asked = tools.chat_prompt(turn)
            ids = asked.ids
        else:
            asked, ids = None, tools.tokenizer.encode(prompt)
        if not ids:
            raise UsageError("The prompt is empty.", "Pass some text with --prompt.")
        params = sampling(temperature, top_p, top_k, seed, session.room(ids, max_tokens))
        answer = session.generate(ids, params, stops=stop, on_text=show, chat=asked)
    show("\n")
    if answer.decode_tok_s is not None and answer.ttft_s is not None:
        screen.line(
            f"{len(answer.token_ids)} tokens, first after {answer.ttft_s:.2f} s, "
            f"then {answer.decode_tok_s:.1f} tok/s"
        )
    return Result(answer.document())
