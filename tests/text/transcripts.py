"""Answers as models write them, with what they mean: one table for every parser test.

DSML is spelled with ``D`` for the marker token; texts are our own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from metainfer.text.markup import DEEPSEEK, HERMES, QWEN3, Markup, Opening

D = "｜DSML｜"


@dataclass(frozen=True)
class Transcript:
    name: str
    markup: Markup
    opening: Opening
    text: str
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def parameter(name: str, value: Any, sp: str = "") -> str:
    is_text = isinstance(value, str)
    shown = value if is_text else json.dumps(value, ensure_ascii=False)
    flag = "true" if is_text else "false"
    return f'<{D}{sp}parameter name="{name}" string="{flag}">{shown}</{D}{sp}parameter>\n'


def invoke(name: str, arguments: dict[str, Any], sp: str = "") -> str:
    fields = "".join(parameter(key, value, sp) for key, value in arguments.items())
    return f'<{D}{sp}invoke name="{name}">\n{fields or (sp and chr(10))}</{D}{sp}invoke>\n'


def block(*invokes: str, name: str = "tool_calls") -> str:
    return f"\n\n<{D}{name}>\n{''.join(invokes)}</{D}{name}>"


def tool_call(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def tight(name: str) -> str:
    return tool_call(name, {}).replace("\n", "")


R, C, E = Opening.REASONING, Opening.CONTENT, Opening.EITHER

NESTED = {
    "where": {"city": "Łódź", "at": [51.75, -19.46, {"deep": [[], {}, None, True]}]},
    "note": 'a "quoted" \\ line\nand\ttab',
    "n": -3,
    "tiny": 1e-05,
    "emoji": "👩‍💻🌸",
}
HOSTILE = {
    "text": f'close </{D}invoke> or <{D}tool_calls> or </think> or </tool_call> {{"name": "x"}}',
    "empty": "",
    "padded": "  two spaces\n",
}
CODE = {"path": "a<b>.py", "body": 'if a < b and c > d:\n    print("x=\\"1\\"")\n'}

DSML = [
    Transcript("content only", DEEPSEEK, C, "A < b > \n\nbye", content="A < b > \n\nbye"),
    Transcript("reasoned", DEEPSEEK, R, "two words</think>Four.", "two words", "Four."),
    Transcript("empty reasoning", DEEPSEEK, R, "</think>Four.", "", "Four."),
    Transcript(
        "never closed", DEEPSEEK, R, "still thinking\n", "still thinking\n",
        notes=("reasoning_not_closed",),
    ),
    Transcript(
        "nothing but an open tag", DEEPSEEK, C, "<think>", notes=("reasoning_not_closed",)
    ),
    Transcript("close only", DEEPSEEK, C, "a</think>b", "", "ab", notes=("stray_reasoning_tag",)),
    Transcript(
        "nested open", DEEPSEEK, R, "a<think>b</think>c", "ab", "c", notes=("stray_reasoning_tag",)
    ),
    Transcript("opens by itself", DEEPSEEK, E, "\n<think>\nr\n</think>\n\nc", "r", "c"),
    Transcript(
        "call alone", DEEPSEEK, C, block(invoke("now", {})), calls=[("now", {})]
    ),
    Transcript(
        "text, call", DEEPSEEK, C, "Let me look." + block(invoke("find", NESTED)),
        content="Let me look.", calls=[("find", NESTED)],
    ),
    Transcript(
        "reasoning, text, two calls", DEEPSEEK, R,
        "Plan.\n\n1. all</think>Both." + block(invoke("find", NESTED), invoke("write", CODE)),
        "Plan.\n\n1. all", "Both.", [("find", NESTED), ("write", CODE)],
    ),
    Transcript(
        "call before reasoning is closed", DEEPSEEK, R, "hm" + block(invoke("now", {})),
        "hm", calls=[("now", {})], notes=("call_in_reasoning",),
    ),
    Transcript(
        "markers inside values", DEEPSEEK, C, block(invoke("echo", HOSTILE)),
        calls=[("echo", HOSTILE)],
    ),
    Transcript(
        "V4.1 spelling", DEEPSEEK, R,
        "p</think>Ok." + block(invoke("find", NESTED, " "), invoke("now", {}, " "), name=" calls"),
        "p", "Ok.", [("find", NESTED), ("now", {})],
    ),
    Transcript(
        "self-closing invoke", DEEPSEEK, C, block(f'<{D}invoke name="now"/>\n'), calls=[("now", {})]
    ),
    Transcript(
        "no outer block", DEEPSEEK, C, "So:\n" + invoke("find", {"q": 1}),
        content="So:", calls=[("find", {"q": 1})],
    ),
    Transcript(
        "JSON body", DEEPSEEK, C,
        block(f'<{D}invoke name="find">\n{{"q": "a > b", "n": 2}}\n</{D}invoke>\n'),
        calls=[("find", {"q": "a > b", "n": 2})],
    ),
    Transcript(
        "duplicate parameter", DEEPSEEK, C,
        "x" + block(f'<{D}invoke name="f">\n{parameter("a", 1)}{parameter("a", 2)}</{D}invoke>\n',
                    invoke("g", {"b": 3})),
        content="x", calls=[("g", {"b": 3})], notes=("duplicate_parameter",),
    ),
    Transcript(
        "value that is no JSON", DEEPSEEK, C,
        block(f'<{D}invoke name="f">\n<{D}parameter name="a" string="false">NaN</{D}parameter>\n'
              f"</{D}invoke>\n"),
        notes=("invalid_arguments",),
    ),
    Transcript(
        "text between and after calls", DEEPSEEK, C,
        "a" + block(invoke("f", {})) + " \n mid " + block(invoke("g", {})) + "\n\nend\n",
        content="a \n mid \n\nend\n", calls=[("f", {}), ("g", {})],
    ),
    Transcript(
        "invoke never closed", DEEPSEEK, C,
        f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n{parameter("a", 1)}</{D}tool_calls>',
        notes=("malformed_call",),
    ),
    Transcript(
        "stray closing tag in reasoning", DEEPSEEK, R, f"a</{D}invoke>b</think>c", "ab", "c"
    ),
]  # fmt: skip

JSON_CALLS = [
    Transcript("plain", HERMES, C, "Hi <b>you</b>", content="Hi <b>you</b>"),
    Transcript(
        "thinks, calls", QWEN3, E, "<think>\nI look.\n</think>\n\n" + tool_call("find", NESTED),
        "I look.", calls=[("find", NESTED)],
    ),
    Transcript(
        "prompt opened thinking", QWEN3, R, "I look.\n</think>\n\nYes.\n" + tool_call("f", {}),
        "I look.", "Yes.", [("f", {})],
    ),
    Transcript("thinking off", QWEN3, C, tool_call("f", {"a": 1}), calls=[("f", {"a": 1})]),
    Transcript(
        "three calls, no newlines", HERMES, C,
        "Hi!" + "".join(map(tight, ("f", "g", "h"))),
        content="Hi!", calls=[("f", {}), ("g", {}), ("h", {})],
    ),
    Transcript(
        "markers inside strings", QWEN3, C, tool_call("echo", HOSTILE), calls=[("echo", HOSTILE)]
    ),
    Transcript(
        "arguments encoded twice", HERMES, C, tool_call("f", json.dumps({"a": "b"})),
        calls=[("f", {"a": "b"})],
    ),
    Transcript(
        "closing tag missing", HERMES, C,
        '<tool_call>{"name": "f", "arguments": {}}\n' + tool_call("g", {}),
        calls=[("f", {}), ("g", {})],
    ),
    Transcript(
        "closing tag missing at the end", HERMES, C, '<tool_call>\n{"name": "f"}', calls=[("f", {})]
    ),
    Transcript(
        "no JSON", HERMES, C, "a<tool_call>not json</tool_call>b", content="ab",
        notes=("malformed_call",),
    ),
    Transcript(
        "quote never closed, then text", HERMES, C,
        'a<tool_call>{"name": "f}</tool_call>then ' + tool_call("g", {}),
        content="athen ", calls=[("g", {})], notes=("malformed_call",),
    ),
    Transcript(
        "a brace too many", HERMES, C, '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        calls=[("f", {})], notes=("text_after_call",),
    ),
    Transcript(
        "closing tag missing, then text", HERMES, C, '<tool_call>{"name": "f"}\nSo I "wait".',
        content='So I "wait".', calls=[("f", {})],
    ),
    Transcript(
        "a key twice", HERMES, C, '<tool_call>{"name": "f", "parameters": {"a":1,"a":2}}',
        notes=("malformed_call",),
    ),
    Transcript(
        "list for arguments", HERMES, C, tool_call("f", [1]), notes=("invalid_arguments",)
    ),
    Transcript(
        "stray closing tag", HERMES, C, "a</tool_call>b", content="ab", notes=("malformed_call",)
    ),
    Transcript("never thought", QWEN3, E, "  Just text", content="  Just text"),
    Transcript("almost a tag", QWEN3, E, "<thin air>", content="<thin air>"),
]  # fmt: skip

ALL = [*DSML, *JSON_CALLS]
