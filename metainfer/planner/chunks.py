"""How many tokens of prompts a step takes where nobody says: so many that it reads little for them.

A step reads every matrix once, all experts among them, whatever its length; what it computes grows
with its tokens. A chunk of

    tokens = ENOUGH (bytes / 2 elements) (RATE_SHARE rate / READ_SHARE read)

computes `ENOUGH` times as long as it reads: `bytes` of all matrices as stored, `elements` that a
token passes, rates and shares as `bound` has them. Ranks cut both alike, so the layout does not
enter. A sparse model passes few of the elements that it reads and asks for long chunks; a dense one
is satisfied by a fraction of them.
"""

from __future__ import annotations

from metainfer.formats.blocks import FORMATS
from metainfer.formats.schemes import tensor_bytes
from metainfer.planner.bound import RATE_SHARE, READ_SHARE
from metainfer.planner.weights import EMBED, WHOLE, Census, Stored, token_elements
from metainfer.platform.facts import CPU, Facts

ENOUGH = 8.0
"""Seconds of computing for each of reading (seed)."""
MOST = 8192
"""Of tokens by this rule (seed): what a token takes was not seen to fall beyond."""
BALANCE = 160.0
"""FLOPs a byte where a card's rates are unknown (seed): an H200's, as measured in bfloat16. By data
sheets the cards that this engine is for lie between 110 and 420."""
PATIENT = ("throughput", "ttft")
"""Goals under which running answers wait for chunks as long."""


def enough(counted: Census, facts: Facts, dtype: str, goal: str) -> int | None:
    """Tokens of a chunk that computes for long enough, a power of two; None where the goal is
    another, the family has no cost model, or the device is a CPU, whose seeds are its own."""
    costs, device = counted.arch.costs(), facts.device
    if goal not in PATIENT or device.kind == CPU or costs is None:
        return None
    stored = sum(_bytes(each) for each in counted.matrices if each.site != EMBED)
    dense, _, routed = token_elements(counted, costs, WHOLE)
    rate, read = device.dot_flops.get(dtype), device.read_bytes_s
    balance = BALANCE if rate is None or read is None else rate / read
    tokens = ENOUGH * stored / (2 * (dense + routed)) * RATE_SHARE * balance / READ_SHARE
    return min(1 << int(tokens).bit_length(), MOST)


def _bytes(each: Stored) -> int:
    if each.scheme in FORMATS:
        return each.count * FORMATS[each.scheme].nbytes(each.n, each.k)
    return each.count * tensor_bytes(each.scheme, (each.n, each.k))
