"""What a page is called: the hash of everything up to its end, and of who may read it.

``digest(p) = BLAKE2b-256(root || token ids of [0, p))`` with a root made of the namespace (model,
weights, adapter) and the tenant's salt, each preceded by its length. The digest does not depend on
any page size; a page's key adds group name, layout identifier and logical span. Two prompts share a
key iff they share content, salt and namespace; finding a collision costs 2^128 hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from metainfer.kv.book.spec import GroupSpec

DIGEST_BYTES = 32


def root(namespace: str, salt: str) -> bytes:
    """The first bytes hashed: length-prefixed, so ("a", "bc") and ("ab", "c") differ."""
    parts = []
    for text in (namespace, salt):
        raw = text.encode()
        parts.append(len(raw).to_bytes(8, "little"))
        parts.append(raw)
    return b"".join(parts)


def page_key(digest: bytes, group: GroupSpec) -> bytes:
    """The key under which a store outside this process may keep the page that ends at `digest`."""
    name, layout = group.name.encode(), group.form.layout.encode()
    head = b"".join(len(part).to_bytes(8, "little") + part for part in (name, layout))
    span = group.page_tokens.to_bytes(8, "little")
    return hashlib.blake2b(head + span + digest, digest_size=DIGEST_BYTES).digest()


class Prefix:
    """The digests of one token sequence at multiples of `unit`, computed as far as needed, once.

    Lives as long as its request, so that waiting, preemption and resumption hash nothing twice.
    """

    __slots__ = ("_digests", "_hash", "_tokens", "unit")

    def __init__(self, tokens: list[int], unit: int, namespace: str = "", salt: str = "") -> None:
        self.unit = unit
        self._tokens = tokens  # the owner appends to it; what was hashed never changes
        self._hash = hashlib.blake2b(root(namespace, salt), digest_size=DIGEST_BYTES)
        self._digests: list[bytes] = []

    def at(self, position: int) -> bytes:
        """The digest of the first `position` tokens; a positive multiple of `unit`."""
        index = position // self.unit
        if index > len(self._digests):
            self._extend(index)
        return self._digests[index - 1]

    def _extend(self, count: int) -> None:
        unit, tokens, running = self.unit, self._tokens, self._hash
        for index in range(len(self._digests), count):
            span = tokens[index * unit : (index + 1) * unit]
            if len(span) != unit:
                raise IndexError(f"{len(tokens)} tokens known, digest {(index + 1) * unit} asked")
            running.update(array("I", span).tobytes())
            self._digests.append(running.copy().digest())


def digests(
    tokens: Sequence[int], unit: int, namespace: str = "", salt: str = ""
) -> tuple[bytes, ...]:
    """All digests of `tokens` at multiples of `unit`."""
    chain = Prefix(list(tokens), unit, namespace, salt)
    return tuple(chain.at(end) for end in range(unit, len(tokens) + 1, unit))
