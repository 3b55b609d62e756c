"""Malformed and hostile requests, drawn from a seed: what a server on an open port has to stand.

Each family makes the bytes of one connection. `Attack.hold_s`: how long the connection stays open
without sending more; `Attack.trickle`: bytes that follow one by one; `Attack.leaves`: it goes away
without reading. What comes back must never be a 5xx, and must come.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAT = "/v1/chat/completions"
GENERATING = (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize")


@dataclass(frozen=True)
class Attack:
    family: str
    data: bytes
    trickle: bytes = b""
    hold_s: float = 0.0
    leaves: bool = False


Draw = Callable[[random.Random], Attack]


def post(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", *headers]
    if not any(line.lower().startswith("content-type") for line in headers):
        lines.append("Content-Type: application/json")
    if length is None or length >= 0:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def chat(**extra: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "say:ok"}]
    return {"model": "fake", "messages": messages, "max_tokens": 4, **extra}


def close(body: Any, path: str = CHAT) -> bytes:
    return post(path, json.dumps(body).encode(), "Connection: close")


def huge_body(draw: random.Random) -> Attack:
    size = draw.choice([4 << 20, (4 << 20) + 1, 6 << 20, 12 << 20])
    text = draw.choice(["a", "é", "[", '"', "\\u0000", " ", "1,"])
    body = b'{"model":"fake","messages":[{"role":"user","content":"'
    body += (text * (size // len(text.encode()))).encode()
    return Attack("huge body", post(CHAT, body, "Connection: close"))


def big_honest_body(draw: random.Random) -> Attack:
    count = draw.choice([100_000, 400_000])
    kinds: list[Any] = [
        {"model": "fake", "prompt": [1] * count},
        {"model": "fake", "prompt": "word " * count},
        {"model": "fake", "prompt": "a" * count * 4},
        {"model": "fake", "prompt": ["x"] * 4000},
        {"model": "fake", "prompt": "hi", "logit_bias": {str(i): 1 for i in range(count // 20)}},
        {f"k{i}": i for i in range(count)},
    ]
    return Attack("big body", close(draw.choice(kinds), "/v1/completions"))


def deep_json(draw: random.Random) -> Attack:
    depth = draw.choice([100, 900, 1100, 20_000, 200_000])
    left, right = draw.choice([("[", "]"), ('{"a":', "}"), ('[{"a":[', "]}]")])
    body = f'{{"model":"fake","messages":{left * depth}1{right * depth}}}'.encode()
    return Attack("deep JSON", post(draw.choice(GENERATING), body, "Connection: close"))


def schema(draw: random.Random) -> Attack:
    depth = draw.choice([8, 60, 64, 65, 200])
    nested: Any = {"type": "string"}
    for _ in range(depth):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}
    crossing = {"anyOf": [{"pattern": "^(a|b)*c.{20}$", "type": "string"}] * 40}
    looping = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}
    long = {"type": "string", "minLength": 10**9}
    counted = {"type": "array", "items": {"enum": list(range(500))}, "minItems": 10**6}
    found = draw.choice([nested, wide, crossing, looping, long, counted, {"type": 5}, []])
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": found}}},
        {"guided_json": found},
        {"structured_outputs": {"json": json.dumps(found)}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": found}}] * 20},
    ]
    return Attack("schema", close(chat(**draw.choice(forms))))


REGEXES = (
    "(a+)+$", "(a|aa)+b", "((a{0,100}){0,100}){0,100}", "(.*){1000}", "[a-z]{1,100000}",
    "(?=x)y", "(", "\\", "a{9999999999}", "(x?){64}x{64}", "(?:(?:(?:a*)*)*)*b", "\\p{L}{500}",
    "[^\\x00-\\x{10FFFF}]", "(a|b|c|d|e|f|g)*" * 60, ".{0,4000}y.{0,4000}", "$", "", "x" * 9000,
)  # fmt: skip


def regex(draw: random.Random) -> Attack:
    pattern = draw.choice(REGEXES)
    field = draw.choice(["guided_regex", "structured_outputs"])
    value: Any = pattern if field == "guided_regex" else {"regex": pattern}
    if draw.random() < 0.2:
        field, value = "guided_choice", ["x" * draw.randint(0, 400)] * draw.randint(0, 2000)
    return Attack("regex", close(chat(**{field: value})))


NUMBERS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-0.0", "9" * 5000, "0x10", "1_000", "01", "1.", ".5",
    "-", "1e", "true", "null", '"1"', "[1]", "{}", "1e-400", str(2**63), str(-(2**63) - 1), "00",
)  # fmt: skip
FIELDS = (
    "temperature", "top_p", "n", "seed", "max_tokens", "presence_penalty", "frequency_penalty",
    "min_p", "top_k", "repetition_penalty", "min_tokens", "priority", "top_logprobs", "logit_bias",
    "stop", "stop_token_ids", "stream", "user", "tools", "tool_choice", "messages", "model",
    "response_format", "reasoning_effort", "chat_template_kwargs", "cache_salt", "logprobs",
    "stream_options", "metadata", "nonsense", "bad_words", "allowed_token_ids",
)  # fmt: skip


def number(draw: random.Random) -> Attack:
    body = json.dumps(chat())[:-1] + f', "{draw.choice(FIELDS)}": {draw.choice(NUMBERS)}}}'
    return Attack("number", post(CHAT, body.encode(), "Connection: close"))


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**70, 1e300, "", "x" * 600, "\x00", "\ud800", "{{ 7*7 }}", "</think>", [],
    [None], [[]], [{}], {}, {"a": {}}, {"type": "function"}, ["a", 1], ["\u202e" * 100],
)  # fmt: skip


def value(draw: random.Random) -> Attack:
    body: dict[str, Any] = chat()
    for _ in range(draw.randint(1, 3)):
        body[draw.choice(FIELDS)] = draw.choice(VALUES)
    if draw.random() < 0.5:
        body["messages"] = [
            {
                draw.choice(["role", "content", "name", "tool_calls", "prefix", "refusal"]): v
                for v in draw.sample(VALUES, 3)
            }
            for _ in range(draw.randint(0, 3))
        ]
    return Attack("value", close(body, draw.choice(GENERATING)))


def encoding(draw: random.Random) -> Attack:
    good = json.dumps(chat()).encode()
    bad = draw.choice([
        b"\xff\xfe" + good, b"\xef\xbb\xbf" + good, good.replace(b"ok", b"\xc3("),
        good.replace(b"ok", b"\xed\xa0\x80"), good.replace(b"ok", b"\x00"), good + b"\x00",
        good.replace(b"ok", b"\\ud800"), good.decode().encode("utf-16"), b"", b"\x80" * 3000,
        good + good, good[:-1], good.replace(b"}", b",}"), b"null", b'"x"', b"[]", b"{" * 3,
        good.replace(b'"model"', b'"model":1,"model"'), draw.randbytes(300),
    ])  # fmt: skip
    return Attack("encoding", post(draw.choice(GENERATING), bad, "Connection: close"))


def slow_head(draw: random.Random) -> Attack:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX: "
    cut = draw.randint(0, len(head))
    return Attack("slow head", head[:cut], head[cut:] + b"a" * 20, hold_s=draw.uniform(0.2, 1.0))


def slow_body(draw: random.Random) -> Attack:
    body = json.dumps(chat()).encode()
    cut = draw.randint(0, len(body) - 1)
    data = post(CHAT, body[:cut], "Connection: close", length=len(body) + draw.choice([0, 1000]))
    return Attack("slow body", data, body[cut:][:20], hold_s=draw.uniform(0.2, 1.0))


def headers(draw: random.Random) -> Attack:
    extra = draw.choice([
        [f"X-{i}: {i}" for i in range(draw.choice([300, 1000]))],
        ["X: " + "a" * draw.choice([8_000, 70_000, 400_000])],
        ["Cookie: " + "a=b; " * 5000], ["X\x00Y: 1"], ["X: \x01\x02"], [" folded: 1"], ["X:"],
        ["Authorization: Bearer " + "k" * 30_000], ["X-Request-Timeout: -1"], [": empty"],
        ["X-Request-Id: " + "i" * 3000], ["Expect: 100-continue"], ["Host: y"], ["X: é" * 10],
        ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Key: x"],
        ["Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__", "Connection: Upgrade"],
        ["Content-Type: text/html"], ["Content-Type: " + "application/json;" * 500],
        ["Content-Encoding: gzip"], ["Transfer-Encoding: gzip, chunked"],
    ])  # fmt: skip
    return Attack("headers", post(CHAT, json.dumps(chat()).encode(), *extra, "Connection: close"))


def pipeline(draw: random.Random) -> Attack:
    one = post(CHAT, json.dumps(chat()).encode())
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    bad = draw.choice([b"GARBAGE\r\n\r\n", post(CHAT, b"{"), health, one])
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    parts = [draw.choice([one, health, bad]) for _ in range(draw.randint(2, 40))]
    return Attack("pipeline", b"".join(parts) + last)


def length(draw: random.Random) -> Attack:
    body = json.dumps(chat()).encode()
    if draw.random() < 0.5:  # more is promised than comes
        data = post(CHAT, body, length=len(body) + draw.choice([1, 5000, 10**12]))
        return Attack("length", data, leaves=True)
    lines = draw.choice([
        f"Content-Length: {len(body)}\r\nContent-Length: {len(body) - 1}", "Content-Length: -1",
        "Content-Length: 1e3", "Content-Length: +5", "Content-Length: 99999999999999999999",
        f"Content-Length: {len(body)}\r\nTransfer-Encoding: chunked", "Content-Length: ",
        f"Content-Length: {len(body) - 3}", "Content-Length: 0x10", "Content-Length: 0",
    ])  # fmt: skip
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{lines}\r\n"
    return Attack("length", head.encode() + b"Connection: close\r\n\r\n" + body, leaves=True)


def chunked(draw: random.Random) -> Attack:
    body = json.dumps(chat()).encode()
    size = f"{len(body):x}".encode()
    big = b"%x\r\n" % (1 << 16) + b"a" * (1 << 16) + b"\r\n"
    data = draw.choice([
        size + b"\r\n" + body + b"\r\n0\r\n\r\n", b"zz\r\n" + body, b"FFFFFFFFFFFFFFFFF\r\n" + body,
        b"-1\r\n\r\n", size + b";ext=" + b"e" * 100_000 + b"\r\n" + body + b"\r\n0\r\n\r\n",
        b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n", b"0\r\n\r\n",
        size + b"\r\n" + body + b"\r\n0\r\nTrailer: " + b"t" * 90_000 + b"\r\n\r\n",
        size + b"\n" + body + b"\n0\n\n", big * 100 + b"0\r\n\r\n", b"1\r\n" * 1000,
    ])  # fmt: skip
    head = post(CHAT, b"", "Transfer-Encoding: chunked", "Connection: close", length=-1)
    return Attack("chunked", head + data, leaves=True)


def not_http(draw: random.Random) -> Attack:
    data = draw.choice([
        draw.randbytes(draw.randint(1, 4000)), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /health\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n" * 5000, b"\x00" * 500,
        b"G\xc3\x89T / HTTP/1.1\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n\r\n", b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://x/health HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n",
    ])  # fmt: skip
    return Attack("not HTTP", data, leaves=True)


def path(draw: random.Random) -> Attack:
    where = draw.choice([
        "/..%2f..%2fetc/passwd", "//health", "/v1/models/../../plan", "/v1/models/%00", "/%ff%fe",
        "/v1/models/" + "x" * 3000, "/v1/chat/completions/", "/V1/models",
        "/v1/models?x=" + "y" * 900,
        "/page/../x", "/page/%2e%2e/x", "/docs", "/v1/models/\u00e9", "/;/health", "/health?%",
    ])  # fmt: skip
    method = draw.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW"])
    head = f"{method} {where} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    return Attack("path", head.encode())


def leaves(draw: random.Random) -> Attack:
    body = chat(n=draw.choice([1, 4, 16]), max_tokens=1500, stream=draw.random() < 0.7)
    body["messages"][0]["content"] = "go on"
    data = post(CHAT, json.dumps(body).encode())
    return Attack("leaves", data[: draw.choice([len(data), len(data) - 1])], leaves=True)


def many_messages(draw: random.Random) -> Attack:
    count = draw.choice([1000, 4096, 4097, 20_000])
    body = chat()
    body["messages"] = [{"role": "user", "content": draw.choice(["", "x", "</s>" * 10])}] * count
    if draw.random() < 0.3:
        part = {"type": "text", "text": "x"}
        body["messages"] = [{"role": "user", "content": [part] * count}]
    return Attack("messages", close(body))


FAMILIES: tuple[Draw, ...] = (
    huge_body, big_honest_body, deep_json, schema, regex, number, value, encoding, slow_head,
    slow_body, headers, pipeline, length, chunked, not_http, path, leaves, many_messages,
)  # fmt: skip


def attacks(seed: int, count: int) -> list[Callable[[], Attack]]:
    """`count` attacks, each made when it is called: together they would fill the memory."""
    draw = random.Random(seed)
    # The heavy families would take most of the time and say little more each.
    weights = [1 if family in (huge_body, big_honest_body) else 4 for family in FAMILIES]
    chosen = draw.choices(FAMILIES, weights, k=count)

    def made(family: Draw, number: int) -> Callable[[], Attack]:
        return lambda: family(random.Random(f"{seed}/{number}"))

    return [made(family, number) for number, family in enumerate(chosen)]
