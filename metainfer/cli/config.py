"""``metainfer config``: what a flag is, what a command line amounts to, and who set what."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any

from cyclopts import App, Parameter

from metainfer.cli import settings, vllm_names
from metainfer.cli.declared import Flag, Verb, Verbs
from metainfer.cli.flags import INTENT_FIELDS, Json
from metainfer.cli.output import Result
from metainfer.core import env
from metainfer.core.errors import UsageError
from metainfer.core.intent import DECISIONS
from metainfer.core.ledger import Origin

Words = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="a command line without `metainfer`, like: serve MODEL --config serve.toml",
    ),
]


def app() -> App:
    """The group of verbs."""
    group = App(name="config", help="What flags mean, and where their values come from.")
    group.command(explain, name="explain")
    group.command(show, name="show")
    return group


def _declared() -> Verbs:
    from metainfer.cli.main import build

    return Verbs(build())


def explain(
    flag: Annotated[
        str, Parameter(allow_leading_hyphen=True, help="a flag, ours or vLLM's, with or without --")
    ],
    /,
    *words: Words,
    as_json: Json = False,
) -> Result:
    """What FLAG is: default, effective value and who set it, vLLM's name, its place in the plan.

    Example: metainfer config explain context serve smollm2-135m --config serve.toml
    """
    verbs = _declared()
    name = "--" + flag.lstrip("-").replace("_", "-") if not _short(flag) else flag
    rows = [(verb, verb.by_name[name]) for verb in verbs.values() if name in verb.by_name]
    alias = vllm_names.BY_NAME.get(name)
    if not rows and alias is not None:
        return _explain_alias(alias, verbs)
    if not rows:
        known = {known for verb in verbs.values() for known in verb.by_name}
        near = difflib.get_close_matches(name, [*known, *vllm_names.BY_NAME], n=1)
        raise UsageError(
            f"There is no flag {name}.",
            f"Did you mean {near[0]}?" if near else "See metainfer --help all.",
            code="unknown_flag",
        )
    made = settings.gather(words, verbs) if words else None
    if made is not None and made.verb is not None and name in made.verb.by_name:
        rows = [(made.verb, made.verb.by_name[name])]
    document = _document(rows[0][1], [verb.name for verb, _ in rows], made)
    return Result(document, "\n".join(_lines(document)))


def _short(flag: str) -> bool:
    return flag.startswith("-") and not flag.startswith("--")


def _explain_alias(alias: vllm_names.Alias, verbs: Verbs) -> Result:
    names = ", ".join(alias.names)
    if alias.refused:
        text = f"{names} is vLLM's and cannot be honoured: {alias.refused}."
    elif alias.already:
        text = f"{names} is vLLM's; nothing to set here: {alias.already}."
    else:
        text = f"{names} is vLLM's spelling of {alias.ours}."
    document: dict[str, Any] = {"flag": alias.name, "vllm": list(alias.names), "text": text}
    if alias.ours:
        document["ours"] = alias.ours
        rows = [verb for verb in verbs.values() if alias.ours in verb.by_name]
        if rows:
            own = _document(rows[0].by_name[alias.ours], [verb.name for verb in rows], None)
            document["explained"] = own
            text += "\n" + "\n".join(_lines(own))
    return Result(document, text)


def _document(flag: Flag, owners: list[str], made: settings.Settings | None) -> dict[str, Any]:
    given = made.given.get(flag.name) if made is not None else None
    field = INTENT_FIELDS.get(flag.name)
    variable = next((v.name for v in env.VARIABLES if v.flag == flag.name), None)
    return {
        "flag": flag.name,
        "names": list(flag.names),
        "text": flag.help,
        "group": flag.group,
        "value": flag.value or None,
        "choices": list(flag.choices),
        "repeatable": flag.repeatable,
        "default": flag.usual or None,
        "effective": given.shown if given is not None else flag.usual or None,
        "origin": (given.origin if given is not None else Origin.DEFAULT).value,
        "set_by": given.said if given is not None else None,
        "environment": variable,
        "vllm": list(vllm_names.equals(flag.name)),
        "verbs": owners,
        "decision": DECISIONS[field] if field is not None else None,
        "example": example(flag),
    }


def _lines(document: dict[str, Any]) -> Iterator[str]:
    value = f" {document['value']}" if document["value"] else ""
    more = " (repeatable)" if document["repeatable"] else ""
    yield f"{', '.join(document['names'])}{value}{more}: {document['text']}"
    rows = {
        "default": document["default"] or _undecided(document),
        "effective": _effective(document),
        "environment": document["environment"],
        "vLLM": ", ".join(document["vllm"]) or "no flag of that meaning",
        "verbs": ", ".join(document["verbs"]),
        "in the plan": document["decision"],
        "example": document["example"],
    }
    for name, text in rows.items():
        if text:
            yield f"  {name:<12} {text}"


def _undecided(document: dict[str, Any]) -> str:
    if not document["value"]:
        return "off"
    return "the plan decides and says why" if document["decision"] else "none"


def _effective(document: dict[str, Any]) -> str:
    if document["set_by"] is None:
        return ""
    return f"{document['effective']}, set by {document['set_by']}"


#: Values for examples that nothing declared gives: no default, no choices, no number.
EXAMPLES = {
    "--adapter": "support=./support-lora",
    "--cors-origin": "https://chat.example",
    "--curve": "16",
    "--limit": "messages=512",
    "--otlp-endpoint": "http://localhost:4318/v1/traces",
    "--root-path": "/llm",
    "--url": "http://localhost:8000",
    "--workload": "closed:concurrency=8",
    "--admin-key": "KEY",
    "--allow-fallback": "attn_paged",
    "--api-key": "KEY",
    "--draft": "ngram:3",
    "--engine-args": '"--model-path M --tp 8"',
    "--host-text": "host.txt",
    "--html": "report.html",
    "--kv-memory": "24GiB",
    "--layout": "kv=latent-fp8@1",
    "--machine": "8x-l20",
    "--explain": "limits.step_tokens",
    "--memory-share": "0.9",
    "--model": "smollm2-135m",
    "--model-option": "NAME=VALUE",
    "--only": "rmsnorm",
    "--op": "attn_paged=torch",
    "--parallel": "tp8",
    "--platform": "cpu",
    "--prompt": '"The capital of France is"',
    "--save-host-text": "host.txt",
    "--save-machine": "here.toml",
    "--served-model-name": "my-model",
    "--stop": '"\\n"',
    "--system": '"Answer in one sentence."',
    "--target": "sm_120a",
}


def example(flag: Flag) -> str | None:
    """The flag with a value that it takes; None where nothing tells one."""
    if not flag.value:
        return flag.name
    if flag.name in EXAMPLES:
        return f"{flag.name} {EXAMPLES[flag.name]}"
    usual = flag.usual.split()
    by_kind = {"INT": "8", "FLOAT": "0.5", "PATH": "FILE"}
    value = usual[0] if usual else next(filter(None, flag.choices), by_kind.get(flag.value))
    return None if value is None else f"{flag.name} {value}"


def show(*words: Words, as_json: Json = False) -> Result:
    """Every value of a command line and who set it; nothing is started.

    Example: metainfer config show serve smollm2-135m --config serve.toml --port 8001
    """
    verbs = _declared()
    made = settings.gather(words or ("serve",), verbs)
    if made.verb is None:
        raise UsageError(
            f"{words[0]!r} is no verb.",
            f"Verbs: {', '.join(verb.name for verb in verbs.values())}.",
        )
    rows = list(_rows(made.verb, made))
    document = {"verb": made.verb.name, "values": rows, "notes": made.notes}
    width = max(len(row["flag"]) for row in rows)
    shown = [f"{row['flag']:<{width}}  {_value(row)}" for row in rows]
    return Result(document, "\n".join([*shown, *made.notes]))


def _rows(verb: Verb, made: settings.Settings) -> Iterator[dict[str, Any]]:
    for flag in verb.flags:
        given = made.given.get(flag.name)
        yield {
            "flag": flag.name,
            "value": given.shown if given is not None else flag.usual or None,
            "origin": (given.origin if given is not None else Origin.DEFAULT).value,
            "set_by": given.said if given is not None else None,
            "group": flag.group,
        }


def _value(row: dict[str, Any]) -> str:
    if row["set_by"]:
        return f"{row['value']}  ({row['set_by']})"
    return str(row["value"] or "-")
