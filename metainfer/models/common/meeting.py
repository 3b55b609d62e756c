"""Tokens of several domains on their way to the experts that all of them share.

Each rank's rows go to all: as they are, or rounded as the experts' first product would round them
there, which halves the bytes and changes no bit. Every message has a price of its own, so numbers
and weights of experts travel as one, bits as they are, and few rows along with them. What is sent
is under way when a call here returns; the function that it returns waits for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from metainfer.comm.peers import Peers
from metainfer.models.arch import TOGETHER
from metainfer.ops.moe_experts.rounded import Rounded, Rows

Arriving = Callable[[], tuple[Rows, Tensor, Tensor]]
"""Waits for the rows, expert ids and routing weights of all domains."""


def send_rows(domains: Peers, x: Tensor, ids: Tensor, weights: Tensor) -> Arriving:
    """x [T, D], ids [T, k] int32 and weights [T, k] of this rank to all."""
    few = x.shape[0] <= TOGETHER
    rows = None if few else domains.start_rows(x)
    routes = _send(domains, *([x] if few else []), weights, ids)

    def wait() -> tuple[Rows, Tensor, Tensor]:
        *along, shares, numbers = routes()
        return along[0] if rows is None else rows.wait(), numbers, shares

    return wait


def send_rounded(domains: Peers, x: Rounded, ids: Tensor, weights: Tensor) -> Arriving:
    """The same of rows that were rounded. Their scales travel with the routes."""
    rows = domains.start_rows(x.elements.view(torch.uint8))
    routes = _send(domains, weights, x.scales, ids)

    def wait() -> tuple[Rows, Tensor, Tensor]:
        elements = rows.wait().view(x.elements.dtype)
        shares, scales, numbers = routes()
        return dataclasses.replace(x, elements=elements, scales=scales), numbers, shares

    return wait


def _send(domains: Peers, *parts: Tensor) -> Callable[[], list[Tensor]]:
    """`parts` [T, n] side by side as one message of 32-bit words, the last of them numbers of
    experts; what all sent, part by part. Wider types stand first, where they are aligned."""
    words = [part.contiguous().view(torch.int32) for part in parts]
    sent = domains.start_rows(torch.cat(words, dim=1), numbers=words[-1].shape[1])

    def wait() -> list[Tensor]:
        every = torch.split(sent.wait(), [each.shape[1] for each in words], dim=1)
        whole = torch.contiguous_format  # of no rows, too
        return [
            came.clone(memory_format=whole).view(part.dtype)
            for came, part in zip(every, parts, strict=True)
        ]

    return wait
