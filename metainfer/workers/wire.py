"""Messages between a group and its ranks: plain data, length first, over a socket pair."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgspec

_HEAD = struct.Struct("<Q")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message: what a rank has to know. `target` is ``module:callable``; it gets a
    `RankFacts` made of the rest."""

    target: str
    rank: int
    world: int
    token: str
    facts: dict[str, Any]


class Invoke(msgspec.Struct, frozen=True, tag="call"):
    method: str
    arguments: tuple[Any, ...]


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Close the worker and end."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    result: Any = None


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """A method failed at `at` (monotonic seconds, the same clock for all processes of a host).
    `about`: the rank whose trouble was only heard of, None for an own cause. `remedy` and `code`
    are those of a `UserError`, empty of others."""

    kind: str
    text: str
    trace: str
    at: float
    about: int | None = None
    remedy: str = ""
    code: str = ""


class RankFacts(msgspec.Struct, frozen=True):
    """What a rank is told. `token`: by which the group's ranks meet; `facts`: its caller's."""

    rank: int
    world: int
    token: str
    facts: Mapping[str, Any]


_encode = msgspec.msgpack.Encoder().encode
_to_rank = msgspec.msgpack.Decoder(Hello | Invoke | Leave)
_from_rank = msgspec.msgpack.Decoder(Done | Raised)


def send(channel: socket.socket, message: msgspec.Struct) -> None:
    body = _encode(message)
    channel.sendall(_HEAD.pack(len(body)) + body)


def receive(channel: socket.socket) -> bytes | None:
    """One message, or None when the other side is gone."""
    head = _exactly(channel, _HEAD.size)
    return None if head is None else _exactly(channel, _HEAD.unpack(head)[0])


def for_rank(body: bytes) -> Hello | Invoke | Leave:
    message: Hello | Invoke | Leave = _to_rank.decode(body)
    return message


def from_rank(body: bytes) -> Done | Raised:
    message: Done | Raised = _from_rank.decode(body)
    return message


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(min(1 << 20, size - len(parts)))
        except ConnectionResetError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
