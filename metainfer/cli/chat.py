"""``metainfer chat``: a conversation on the terminal, or one turn per line of a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from metainfer.cli import output
from metainfer.cli.flags import NO_FLAGS, Adapters, EngineFlags, Json
from metainfer.cli.generate import _flag, sampling
from metainfer.cli.output import Result

if TYPE_CHECKING:
    from metainfer.cli.session import Session

Message = dict[str, Any]


def chat(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    system: Annotated[str | None, _flag("--system", text="system message")] = None,
    max_tokens: Annotated[
        int | None, _flag("--max-tokens", text="most tokens per answer; default: what fits")
    ] = None,
    temperature: Annotated[float, _flag("--temperature", text="0 = greedy")] = 0.7,
    top_p: Annotated[float, _flag("--top-p", text="nucleus")] = 1.0,
    top_k: Annotated[int, _flag("--top-k", text="0 = off")] = 0,
    seed: Annotated[int | None, _flag("--seed", text="makes sampling repeatable")] = None,
    engine: EngineFlags = NO_FLAGS,
    adapter: Adapters = (),
    as_json: Json = False,
) -> Result:
    """Talk to MODEL. Ctrl-C stops an answer, Ctrl-D leaves. A pipe gives one turn per line.

    Example: metainfer chat smollm2-135m --system "Answer in one sentence."
    """
    from metainfer.cli.clients import Screen
    from metainfer.cli.session import Session
    from metainfer.core.errors import RequestError

    sampling(temperature, top_p, top_k, seed, max_tokens or 1)  # refused before loading
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    terminal = sys.stdin.isatty()
    screen = Screen(quiet=not sys.stderr.isatty())
    with Session(engine.intent(model, adapter), screen) as session:
        while (line := _read(terminal)) is not None:
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            try:
                _answer(session, messages, max_tokens, (temperature, top_p, top_k, seed))
            except RequestError as error:
                if not terminal or error.code == "engine_dead":
                    raise
                messages.pop()
                print(f"error: {error}", file=sys.stderr, flush=True)
    return Result({"messages": messages})


def _read(terminal: bool) -> str | None:
    """The next turn, or None at the end."""
    try:
        if terminal:
            import readline  # noqa: F401 - gives input() history and editing

            return input("> ")
        line = sys.stdin.readline()
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return None
    return line.rstrip("\n") if line else None


def _answer(
    session: Session,
    messages: list[Message],
    max_tokens: int | None,
    how: tuple[float, float, int, int | None],
) -> None:
    """Generate the next turn and append it; an interrupted answer is kept as far as it came."""
    from metainfer.cli.session import Answer

    tools = session.text
    prompt = tools.chat_prompt(messages)
    params = sampling(*how, session.room(prompt.ids, max_tokens))
    answer = Answer(len(prompt.ids))
    quiet = output.current.as_json
    dim = sys.stdout.isatty()

    def show(text: str) -> None:
        if not quiet:
            sys.stdout.write(text)
            sys.stdout.flush()

    thoughts: list[str] = []

    def think(text: str) -> None:
        if dim:  # a pipe gets the answers only
            thoughts.append(text)
            show(f"\x1b[2m{text}\x1b[0m")

    def say(text: str) -> None:
        if thoughts:
            thoughts.clear()
            show("\n")
        show(text)

    try:
        session.generate(
            prompt.ids, params, on_text=say, on_reasoning=think, chat=prompt, answer=answer
        )
    except KeyboardInterrupt:
        show(" [stopped]")
    show("\n")
    messages.append({"role": "assistant", "content": answer.text})
