"""The bytes that each token stands for, by kind of decoder.

Two kinds are exact: byte-level BPE (GPT-2's byte alphabet) and SentencePiece style (``▁`` for a
space, ``<0xAB>`` for a byte). Their text is the tokens' bytes joined and read as UTF-8, invalid
bytes as U+FFFD. Differences from the `tokenizers` library, on purpose: an invalid run of byte
tokens does not spoil the valid characters before it, and an added token with Latin-1 letters
reads as itself. Any other decoder is `generic` and left to the library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Kind = Literal["bytes", "pieces", "generic"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def byte_alphabet() -> Mapping[str, int]:
    """GPT-2's map from printable characters to bytes."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in kept}
    moved = (byte for byte in range(256) if byte not in set(kept))
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(moved)})
    return alphabet


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """How token strings become bytes.

    `space` is the character that stands for a space (`pieces`). At the start of a text up to
    `strip_left` spaces are dropped; `drop_first` drops every `space` of the first token.
    """

    kind: Kind
    space: str = ""
    byte_fallback: bool = False
    strip_left: int = 0
    drop_first: bool = False

    def piece(self, token: str, *, added: bool = False, first: bool = False) -> bytes:
        """Bytes of one token string; `added` tokens of byte-level vocabularies are literal."""
        if self.kind == "bytes":
            return token.encode() if added else _from_alphabet(token)
        if self.kind == "generic":
            return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback and not added else None
        if match:
            return bytes([int(match[1], 16)])
        return token.replace(self.space, "" if first and self.drop_first else " ").encode()


def _from_alphabet(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # not written in the alphabet, so it stands for itself
        return token.encode()


def piece_decoder(decoder: Mapping[str, Any] | None) -> PieceDecoder:
    """The kind that ``tokenizer.json``'s decoder object amounts to."""
    steps = _flatten(decoder)
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return PieceDecoder("bytes")
    if names == ["Metaspace"]:
        drop = steps[0].get("prepend_scheme", "always") != "never"
        return PieceDecoder("pieces", steps[0].get("replacement", "▁"), drop_first=drop)
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and len(names) <= 4:
        pattern, content = steps[0].get("pattern"), steps[0].get("content")
        space = pattern.get("String") if isinstance(pattern, dict) else None
        strip = steps[3] if len(names) == 4 else {"type": "Strip", "content": " "}
        plain = strip["type"] == "Strip" and strip.get("content") == " " and not strip.get("stop")
        if content == " " and isinstance(space, str) and len(space) == 1 and plain:
            return PieceDecoder("pieces", space, True, strip_left=int(strip.get("start", 0)))
    return PieceDecoder("generic")


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [step for part in decoder.get("decoders", []) for step in _flatten(part)]
    return [decoder]
