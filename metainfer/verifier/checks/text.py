"""Tokenizer and prompt template against the model's own files, read by nothing of ours.

Ids are those that the `tokenizers` library gives for ``tokenizer.json``; a prompt is what plain
Jinja makes of the template's text. No text may spell a special token where it must not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metainfer.text.tokenizer import Tokenizer
from metainfer.verifier.rows import FAILED, NOT_APPLICABLE, PASSED, Row, skipped
from metainfer.verifier.subject import TEXT, Subject

TOKENIZER, TEMPLATE = "tokenizer", "template"

TEXTS = (
    TEXT,
    "",
    " ",
    "a",
    "Hello, world!  Two  spaces,\ttab\nnewline\r\n",
    "0 12 345 6789 1234567890 3.14159 1e-9 0xFF",
    "def f(x: int) -> str:\n    return f'{x:>8}'  # comment\n\n\n",
    "Größenordnung, naïve façade, Ångström, Łódź, İstanbul",
    "日本語のテキスト 中文文本 한국어 العربية עברית हिन्दी ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00a0\u200b\ufeff",
    "'s 're 'LL don't I'VE \"quoted\" (a[b]{c}) <tag/> &amp; \\n",
    "x" * 300 + " " * 40 + "=" * 80,
)

MESSAGES = [
    {"role": "user", "content": "What is 2 + 2?\nAnswer in one word."},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And <b>3</b> + 3? 日本"},
]


def check(subject: Subject) -> Iterator[Row]:
    subject.say("  tokenizer and template ...")
    tokenizer = subject.text.tokenizer
    yield _ids(subject, tokenizer)
    yield _round_trip(tokenizer)
    yield _special(tokenizer)
    yield from _prompt(subject)


def _ids(subject: Subject, tokenizer: Tokenizer) -> Row:
    """Ids of the texts, beginnings and ends included."""
    source = subject.model.source
    reference = "tokenizer.json, read by tokenizers"
    if source.kind == "gguf" and source.path is not None:
        return _gguf_begin(tokenizer, source.gguf_metadata)
    if source.path is None or not (Path(source.path) / "tokenizer.json").is_file():
        return skipped(TOKENIZER, "ids", "the model has no tokenizer of its own")
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(Path(source.path) / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    wrong, named = [], ""
    for text in TEXTS:
        mine, theirs = tokenizer.encode(text), list(backend.encode(text).ids)
        if mine != theirs:
            wrong.append(text)
            bare = list(backend.encode(text, add_special_tokens=False).ids)
            named = named or _difference(mine, theirs, bare)
    return Row(
        check=TOKENIZER, what="ids", verdict=FAILED if wrong else PASSED, reference=reference,
        candidate="as prompts are read", error=float(len(wrong)), tolerance=0.0, unit="texts",
        named=(named,) if wrong else (),
        detail=f"first: {wrong[0][:40]!r}" if wrong else f"{len(TEXTS)} texts",
    )  # fmt: skip


def _difference(mine: list[int], theirs: list[int], bare: list[int]) -> str:
    if theirs != bare and mine == bare:
        return (
            "beginning of text missing" if theirs[-len(bare) :] == bare else "end of text missing"
        )
    if theirs == bare and mine[-len(bare) :] == bare:
        return "beginning of text added"
    return "token ids"


def _gguf_begin(tokenizer: Tokenizer, metadata: Any) -> Row:
    """GGUF has no file that tokenizers reads; what it says of the beginning holds."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if said is None or begin is None:
        return skipped(TOKENIZER, "ids", "the GGUF file does not say how a text begins")
    wrong = [
        text for text in TEXTS if text and (tokenizer.encode(text)[:1] == [begin]) is not bool(said)
    ]
    return Row(
        check=TOKENIZER, what="beginning of text", verdict=FAILED if wrong else PASSED,
        reference="add_bos_token of the GGUF file", candidate="as prompts are read",
        error=float(len(wrong)), tolerance=0.0, unit="texts",
        named=("beginning of text missing" if said else "beginning of text added",)
        if wrong else (),
    )  # fmt: skip


def _round_trip(tokenizer: Tokenizer) -> Row:
    lost = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        again = tokenizer.encode(tokenizer.decode(ids), add_special=False, parse_special=False)
        if again != ids:
            lost.append(text)
    return Row(
        check=TOKENIZER, what="text and back", verdict=FAILED if lost else PASSED,
        reference="the ids themselves", candidate="decoded and read again",
        error=float(len(lost)), tolerance=0.0, unit="texts",
        named=("detokenising",) if lost else (),
        detail=f"first: {lost[0][:40]!r}" if lost else f"{len(TEXTS)} texts",
    )  # fmt: skip


def _special(tokenizer: Tokenizer) -> Row:
    """A message that spells a special token gives plain text; one id where it is meant."""
    special = [i for i in tokenizer.added_ids if tokenizer.is_special(i)]
    leaks, split = [], []
    for token in special[:256]:
        text = tokenizer.token_bytes(token).decode("utf-8", errors="replace")
        if not text or "\ufffd" in text:
            continue
        if any(tokenizer.is_special(i) for i in tokenizer.encode_literal(f"a{text}b")):
            leaks.append(text)
        if tokenizer.encode(text, add_special=False) != [token]:
            split.append(text)
    named = [*(["special token from text"] if leaks else []), *(["special split"] if split else [])]
    return Row(
        check=TOKENIZER, what="special tokens", verdict=FAILED if named else PASSED,
        reference="one id as a marker, none as a user's text", candidate=f"{len(special)} tokens",
        error=float(len(leaks) + len(split)), tolerance=0.0, unit="tokens", named=tuple(named),
        detail=f"first: {(leaks or split)[0]!r}" if named else "",
    )  # fmt: skip


def _prompt(subject: Subject) -> Iterator[Row]:
    tools = subject.text
    if tools.format.describe().get("prompt") is None:
        yield skipped(TEMPLATE, "a conversation", "the model has no chat template")
        return
    one, two = (tools.chat_prompt(MESSAGES).ids for _ in range(2))
    yield Row(
        check=TEMPLATE, what="the same twice", verdict=PASSED if one == two else FAILED,
        reference="the first rendering", candidate="the second",
        named=() if one == two else ("template not stable",), detail=f"{len(one)} ids",
    )  # fmt: skip
    template = _template(subject)
    if template is None:
        why = "no Jinja template comes with the model; its prompts are built in"
        yield Row(check=TEMPLATE, what="a conversation", verdict=NOT_APPLICABLE, detail=why)
        return
    text = _render(template, tools.tokenizer.special_tokens)
    expected = tools.tokenizer.encode(text, add_special=False)
    yield Row(
        check=TEMPLATE, what="a conversation", verdict=PASSED if one == expected else FAILED,
        reference="the template's text, rendered by plain Jinja", candidate="as requests get it",
        named=() if one == expected else ("template altered",),
        detail="" if one == expected else _first_difference(tools.tokenizer, one, expected),
    )  # fmt: skip


def _first_difference(tokenizer: Tokenizer, mine: list[int], theirs: list[int]) -> str:
    shared = [a == b for a, b in zip(mine, theirs, strict=False)]
    at = shared.index(False) if False in shared else len(shared)
    return (
        f"from id {at}: {tokenizer.decode(mine[at : at + 8], False)!r} instead of "
        f"{tokenizer.decode(theirs[at : at + 8], False)!r}"
    )


def _template(subject: Subject) -> str | None:
    """The template's text in the model's files."""
    source = subject.model.source
    if source.kind == "gguf":
        found = source.gguf_metadata.get("tokenizer.chat_template")
        return found if isinstance(found, str) else None
    if source.path is None:
        return None
    folder = Path(source.path)
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    found = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    return found if isinstance(found, str) else None


def _render(template: str, special: Any) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return environment.from_string(template).render(
        messages=MESSAGES, add_generation_prompt=True, tools=None, documents=None, **special
    )
