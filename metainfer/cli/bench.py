"""``metainfer bench``: measurements with their conditions attached."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from metainfer.cli.flags import NO_FLAGS, EngineFlags, Json, RankMachine
from metainfer.cli.output import Result
from metainfer.core.errors import UsageError


def app() -> App:
    """The group of verbs."""
    group = App(name="bench", help="Measure, verified and with conditions attached.")
    group.command(offline, name="offline")
    group.command(serve, name="serve")
    group.command(calibrate, name="calibrate")
    group.command(ladder, name="ladder")
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
    machine: RankMachine = None,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """Decode and prefill speed without a server; with --rank-of of one rank, its peers emulated.

    Example: metainfer bench offline smollm2-135m --against transformers
    """
    from metainfer.bench import emulated
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
    intent = engine.intent(model, of_machine=machine)
    if intent.rank_of is not None:
        document = emulated.run(intent, options, _log)
        return Result(document, emulated.table(document))
    document = run(intent, options, _log)
    return Result(document, table(document))


def serve(
    model: Annotated[
        str | None, Parameter(help="a model to serve for the measurement; or pass --url")
    ] = None,
    /,
    *,
    url: Annotated[str | None, _flag("--url", "a running server, http://HOST:PORT")] = None,
    api_key: Annotated[str | None, _flag("--api-key", "of the running server")] = None,
    workload: Annotated[
        str, _flag("--workload", "closed:..., poisson:..., shared:... or file:PATH")
    ] = "closed:concurrency=8",
    repeats: Annotated[int, _flag("--repeats", "times that it is served, drawn anew")] = 3,
    warm_up: Annotated[int, _flag("--warm-up", "requests before anything is timed")] = 2,
    seed: Annotated[int, _flag("--seed", "of the drawn requests")] = 0,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """First tokens, gaps and throughput of a server under a load, over HTTP.

    Example: metainfer bench serve smollm2-135m --workload poisson:rate=1,prompt=200,output=50
    """
    import asyncio

    from metainfer.bench.client import server_at
    from metainfer.bench.own_server import own_server
    from metainfer.bench.serve import ServeOptions, measure

    if (model is None) == (url is None):
        raise UsageError("Either a model or --url is needed, not both.", "Pass one.")
    if repeats < 1 or warm_up < 0:
        raise UsageError(
            f"--repeats is {repeats}, --warm-up {warm_up}.", "Pass at least 1, and at least 0."
        )
    options = ServeOptions(workload=workload, seed=seed, repeats=repeats, warm_up=warm_up)
    if url is not None:
        if engine != NO_FLAGS:
            raise UsageError("A running server has its own engine flags.", "Leave them out.")
        document = asyncio.run(measure(server_at(url, api_key), options, _log))
    else:
        assert model is not None
        with own_server([model, *given(engine)], _log) as server:
            document = asyncio.run(measure(server, options, _log))
    return Result(document, serve_text(document))


def calibrate(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    repeats: Annotated[int, _flag("--repeats", "turns of every load")] = 5,
    seed: Annotated[int, _flag("--seed", "of the prompts")] = 0,
    dry_run: Annotated[bool, _flag("--dry-run", "measure, and keep no record")] = False,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """How long steps take here: a record that `plan` and `simulate` then price with.

    Example: metainfer bench calibrate smollm2-135m
    """
    from metainfer.bench.calibrate import CalibrateOptions, run
    from metainfer.bench.own_server import own_server

    if repeats < 1:
        raise UsageError(f"--repeats is {repeats}.", "Pass at least 1.")
    options = CalibrateOptions(repeats=repeats, seed=seed, keep=not dry_run)
    words = [model, *given(engine)]
    document = run(engine.intent(model), options, _log, lambda: own_server(words, _log))
    found: Any = document["calibration"]
    rows: Any = document["samples"]
    lines = [
        f"{row['phase']:<7} {row['rows']:>5} rows  {row['seconds'] * 1e3:>9.2f} ms  "
        f"fitted {row['fitted_s'] * 1e3:>9.2f} ms"
        for row in rows
    ]
    lines.append(f"band {found['band']:.0%} from {found['samples']} kinds of steps")
    request, token = found["request_s"] * 1e3, found["token_s"] * 1e3
    lines.append(f"the server adds {request:.2f} ms a request, {token:.3f} ms a token")
    return Result(document, "\n".join(lines))


def ladder(
    model: Annotated[str, Parameter(help="folder, .gguf file, cached name, or catalogue name")],
    /,
    *,
    prompt_tokens: Annotated[int, _flag("--prompt-tokens", "tokens per prompt")] = 64,
    output_tokens: Annotated[int, _flag("--output-tokens", "tokens per answer")] = 48,
    batch: Annotated[tuple[int, ...], _flag("--batch", "batch size (repeatable)")] = (1, 8),
    prefill_tokens: Annotated[
        int, _flag("--prefill-tokens", "prompt of the prefill row; 0 skips it")
    ] = 1000,
    repeats: Annotated[int, _flag("--repeats", "turns of every pair")] = 7,
    seed: Annotated[int, _flag("--seed", "of prompts and order")] = 0,
    picture: Annotated[Path | None, _flag("--picture", "write the ladder as SVG here")] = None,
    engine: EngineFlags = NO_FLAGS,
    as_json: Json = False,
) -> Result:
    """What each measure is worth, from a stock engine's way of working to ours.

    Example: metainfer bench ladder smollm2-135m --picture ladder.svg
    """
    from metainfer.bench import ladder as climbing
    from metainfer.bench.ladder_picture import picture as drawn

    if repeats < 2 or output_tokens < 2 or prompt_tokens < 1 or not batch or min(batch) < 1:
        raise UsageError(
            "nothing can be timed in so little.",
            "--repeats and --output-tokens are at least 2, --prompt-tokens and --batch at least 1.",
        )
    if prefill_tokens < 0:
        raise UsageError(f"--prefill-tokens is {prefill_tokens}.", "Pass 0 to skip its row.")
    if picture is not None and not picture.parent.is_dir():
        raise UsageError(f"{picture.parent} is not a folder.", "Make it, or name another.")
    options = climbing.LadderOptions(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        batches=batch,
        prefill_tokens=prefill_tokens,
        repeats=repeats,
        seed=seed,
    )
    document = climbing.run(engine.intent(model), options, _log)
    if picture is not None:
        picture.write_text(drawn(document), encoding="utf-8")
    return Result(document, climbing.text(document))


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def given(engine: EngineFlags) -> list[str]:
    """The flags that say what `engine` says, for another process."""
    words = []
    for field in dataclasses.fields(engine):
        value, name = getattr(engine, field.name), f"--{field.name.replace('_', '-')}"
        if value == getattr(NO_FLAGS, field.name):
            continue
        for each in value if isinstance(value, tuple) else (value,):
            words += [name] if each is True else [name, str(each)]
    return words


def serve_text(document: dict[str, Any]) -> str:
    """Each compared figure with its spread over the clean repeats."""
    measured, spread = document["measured"], document["spread"]
    lines = [f"{document['workload']} (clean repeats: {document['n']} of {document['repeats']})"]
    for key, part in spread.items():
        name, _, inner = key.partition(".")
        value = measured[name][inner] if inner else measured[name]
        lines.append(f"{key:<14} {value:>10.4g}  (half range {part:.1%})")
    lines += [
        f"seed {run['seed']}: {why}" for run in document["runs"] for why in run["contaminated"]
    ]
    return "\n".join(lines)


def table(document: dict[str, Any]) -> str:
    """One line per row: what, whose, median, spread, count."""
    return "\n".join(
        f"{row['row']:<40} {row['engine']:<14} {row['median']:>9.1f} {row['unit']}"
        f"  (mad {row['mad']:.1f}, n {row['n']})"
        for row in document["rows"]
    )
