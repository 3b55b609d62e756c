"""``metainfer bench``: measurements with their conditions attached."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from metainfer.cli.flags import NO_FLAGS, EngineFlags, Json
from metainfer.cli.output import Result


def app() -> App:
    """The group of verbs."""
    group = App(name="bench", help="Measure, verified and with conditions attached.")
    group.command(offline, name="offline")
    return group


def _flag(name: str, text: str) -> Parameter:
    return Parameter(name=name, help=text, negative="")


def offline(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    prompt_tokens: Annotated[int, _flag("--prompt-tokens", "tokens per prompt")] = 40,
    output_tokens: Annotated[int, _flag("--output-tokens", "tokens per answer")] = 90,
    batch: Annotated[tuple[int, ...], _flag("--batch", "batch size (repeatable)")] = (1, 8),
    prefill_tokens: Annotated[
        int, _flag("--prefill-tokens", "prompt of the prefill row; 0 skips it")
    ] = 1000,
    repeats: Annotated[int, _flag("--repeats", "measurements per row")] = 5,
    against: Annotated[
        Literal["", "transformers"], _flag("--against", "measure this beside us, in the same run")
    ] = "",
    seed: Annotated[int, _flag("--seed", "of the prompts")] = 0,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """Decode and prefill speed without a server.

    Example: metainfer bench offline smollm2-135m --against transformers
    """
    from metainfer.bench.offline import OfflineOptions, run

    options = OfflineOptions(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        batches=batch,
        prefill_tokens=prefill_tokens,
        repeats=repeats,
        against=against,
        seed=seed,
    )
    document = run(
        engine.intent(model), options, lambda text: print(text, file=sys.stderr, flush=True)
    )
    return Result(document, table(document))


def table(document: dict[str, Any]) -> str:
    """One line per row: what, whose, median, spread, count."""
    return "\n".join(
        f"{row['row']:<40} {row['engine']:<14} {row['median']:>9.1f} {row['unit']}"
        f"  (mad {row['mad']:.1f}, n {row['n']})"
        for row in document["rows"]
    )
