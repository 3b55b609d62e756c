"""The reference of the command line, `docs/cli.md`, from what is declared.

    python -m metainfer.cli.reference > docs/cli.md

A test compares the file with this.
"""

from __future__ import annotations

from collections.abc import Iterator

from metainfer.cli import help_text, vllm_names
from metainfer.cli.config import example
from metainfer.cli.declared import Flag, Verb, Verbs
from metainfer.cli.flags import INTENT_FIELDS
from metainfer.cli.help_text import grouped
from metainfer.core import env
from metainfer.core.intent import DECISIONS

_HEAD = """\
# Command line

Made from the code by `python -m metainfer.cli.reference`; `metainfer --help TERM` searches the same
tables, `metainfer config explain FLAG` shows one flag with its effective value and who set it.

Every verb takes `--json` and then prints one document on standard output. Exit 0: done. 1: the
answer is no. 2: bad usage. A user's error is one line with cause and remedy.

Values come from the command line, else from the environment, else from `--config FILE`, else the
plan decides and says why. Keys of the file (`.toml`, or `.yaml` with the extra `yaml`) are flag
names without dashes in front; vLLM's spellings work there too. A key that only another verb has is
told and not used, any other unknown key is refused.

```text
$ metainfer serve smollm2-135m --max-model-len 2k --config serve.toml
--max-model-len 2k is --context 2000 here
```
"""


def text() -> str:
    """The whole page."""
    from metainfer.cli.main import build

    verbs = Verbs(build())
    return "\n".join(
        [_HEAD, *_searched(verbs), *_verbs(verbs), *_shared(verbs), *_environment(), *_aliases()]
    )


def _searched(verbs: Verbs) -> Iterator[str]:
    yield "```text"
    yield "$ metainfer --help cache"
    yield help_text.answer((), "cache", verbs)
    yield "```\n"


def _verbs(verbs: Verbs) -> Iterator[str]:
    for verb in verbs.values():
        words = " ".join(f"{argument.name}" for argument in verb.arguments)
        yield f"## {verb.name}\n"
        yield f"{verb.text}\n"
        yield "```text"
        yield f"metainfer {verb.name}{f' {words}' if words else ''} [FLAGS]"
        if verb.example:
            yield verb.example
        yield "```\n"
        own = [flag for flag in verb.flags if flag.name not in INTENT_FIELDS or _is_own(flag, verb)]
        if len(own) < len(verb.flags):
            yield "Takes the [flags of an engine](#flags-of-an-engine), too.\n"
        yield from _tables(own)


def _is_own(flag: Flag, verb: Verb) -> bool:
    return "--context" not in verb.by_name or flag.name == "--max-pending"


def _shared(verbs: Verbs) -> Iterator[str]:
    verb = verbs[("plan",)]
    flags = [flag for flag in verb.flags if flag.name in INTENT_FIELDS]
    yield "## Flags of an engine\n"
    yield "The planner decides each that is left out; the last column names the plan's decision.\n"
    yield from _tables(flags)


def _tables(flags: list[Flag]) -> Iterator[str]:
    for group, rows in grouped(flags):
        yield f"**{group}**\n"
        yield "| flag | what it is | default | vLLM | plan |"
        yield "|---|---|---|---|---|"
        for flag in rows:
            yield _row(flag)
        yield ""


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    shown = example(flag)
    more = " (required)" if flag.required else ""
    text = f"{flag.help}{more}"
    if flag.choices:
        text += f": {', '.join(f'`{choice}`' for choice in flag.choices if choice)}"
    elif shown and flag.value:
        text += f"; `{shown}`"
    vllm = ", ".join(f"`{name}`" for name in vllm_names.equals(flag.name))
    field = INTENT_FIELDS.get(flag.name)
    plan = f"`{DECISIONS[field]}`" if field is not None else ""
    cells = (names, text, f"`{flag.usual}`" if flag.usual else "", vllm, plan)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _environment() -> Iterator[str]:
    yield "## Environment\n"
    yield "An unknown name that begins with `METAINFER_` is an error.\n"
    yield "| name | effect | default |"
    yield "|---|---|---|"
    for row in env.VARIABLES:
        note = f"; {row.note}" if row.note else ""
        yield f"| `{row.name}` | {row.effect}{note} | {row.default} |"
    yield ""


def _aliases() -> Iterator[str]:
    yield "## vLLM's flags\n"
    yield "Where an engine is run or planned. One line on standard error says what each became.\n"
    yield "| flag of vLLM | here |"
    yield "|---|---|"
    for alias in vllm_names.ALIASES:
        names = ", ".join(f"`{name}`" for name in alias.names)
        if alias.refused:
            said = f"refused: {alias.refused}"
        elif alias.already:
            said = f"nothing to set: {alias.already}"
        elif alias.ours == vllm_names.MODEL:
            said = "the first word"
        else:
            said = f"`{alias.ours}`"
        yield f"| {names} | {said} |"
    yield ""


if __name__ == "__main__":
    print(text(), end="")
