"""The expert products for 12.x (`ops/moe_experts/cuda_experts.cu`) on a card, against float64.

    python benchmarks/experts_native.py --out FOLDER [--software 1|2]

Without ``--software`` the card multiplies block-scaled elements itself (capability 12.x). With it,
a card of 8.9 or 9.0 stands in: 1 does the instruction in words, 2 by the FP8 product, whose
registers hold elements in the same places. Then copies, places, scales, epilogues and calls are
proven, the instruction is not, and no time is taken. Rows: shapes, judged by the norm of the error
beside that of the published code's arithmetic on the same inputs, and given rounded rows to the
same bits; then the op's cases. Writes ``experts_native.json`` after each row; exit status 1 when
one is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.formats.activation import activation_fp8
from metainfer.ops.case import poisoned
from metainfer.ops.catalog import builtin_registry, op_cases
from metainfer.ops.moe_experts.cuda_experts import Mx, experts, kernels, sent_rounded
from metainfer.ops.moe_experts.cuda_tiles import MX_CHUNK
from metainfer.ops.qualify import run_case

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MOST = 1.25
"""Times the published arithmetic's error."""


@dataclass(frozen=True, slots=True)
class Shape:
    """`tokens` of `top` choices among `busy` of `e` experts; scale bytes from `low` to `high`, and
    `lower` below that in the second matrix."""

    tokens: int
    e: int
    top: int
    d: int
    f: int
    limit: float = 10.0
    busy: int = 0
    padding: int = 0
    low: int = 118
    high: int = 122
    lower: int = 0
    shared: bool = False


SHAPES = (
    Shape(1, 4, 1, 256, 128, 0.0),
    Shape(3, 4, 3, 512, 384, 1.0, busy=3, padding=1, shared=True),
    Shape(40, 4, 2, 512, 640, 0.5, busy=2, padding=3, low=110, high=128),  # scales beyond 2^11
    Shape(65, 4, 1, 256, 128, busy=1, lower=80),  # results near 2^-90
    Shape(200, 4, 2, 1280, 1152, busy=3, shared=True),
    Shape(1, 256, 6, 4096, 2048),
    Shape(8, 256, 6, 4096, 2048),
    Shape(64, 32, 6, 4096, 256),
    Shape(2048, 32, 6, 4096, 2048, shared=True),
)


@dataclass(frozen=True, slots=True)
class Work:
    x: Tensor
    ids: Tensor
    routes: Tensor
    up: Mx
    down: Mx
    shared: Tensor | None


def drawn(s: Shape, seed: int) -> Work:
    g = torch.Generator("cuda").manual_seed(seed)

    def matrix(rows: int, k: int, lower: int = 0) -> Mx:
        packed = torch.randint(0, 256, (rows, k // 2), generator=g, device="cuda").byte()
        scales = torch.randint(s.low, s.high, (rows, k // 32), generator=g, device="cuda")
        return Mx(packed, (scales - lower).byte())

    x = torch.randn(s.tokens, s.d, generator=g, device="cuda").bfloat16()
    place = torch.rand(s.tokens, s.busy or s.e, generator=g, device="cuda").argsort(1)
    ids = place[:, : s.top].int().contiguous()
    ids[s.tokens - s.padding :] = -1
    up, down = matrix(s.e * 2 * s.f, s.d), matrix(s.e * s.d, s.f, s.lower)
    used = s.busy or s.e
    up.scales[used * 2 * s.f :], down.scales[used * s.d :] = 255, 255  # NaN: nobody reads them
    routes = torch.rand(s.tokens, s.top, generator=g, device="cuda")
    shared = torch.randn_like(x) if s.shared else None
    return Work(x, ids, routes, up, down, shared)


def dense(weight: Mx, first: int, rows: int) -> Tensor:
    packed = weight.elements[first : first + rows]
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    sizes = torch.tensor(E2M1, dtype=torch.float64, device="cuda")[nibbles & 7]
    step = torch.exp2(weight.scales[first : first + rows].double() - 127)
    return torch.where(nibbles > 7, -sizes, sizes) * step.repeat_interleave(32, -1)


def recipe(w: Work, s: Shape, kind: torch.dtype) -> Tensor:
    """float64: the truth between the recipe's roundings, e4m3 in 128s before both products.
    float32: as published, what the products give rounded to bfloat16."""
    x = activation_fp8(w.x, 128).to(kind)

    def product(rows: Tensor, weight: Mx, first: int, count: int) -> Tensor:
        found = rows @ dense(weight, first, count).to(kind).T
        return found if kind == torch.float64 else found.bfloat16().to(kind)

    out = torch.zeros(s.tokens, s.d, dtype=kind, device="cuda")
    for expert in sorted(set(w.ids.flatten().tolist()) - {-1}):
        token, slot = (w.ids == expert).nonzero(as_tuple=True)
        gate, up = product(x[token], w.up, expert * 2 * s.f, 2 * s.f).chunk(2, -1)
        if s.limit:
            gate, up = gate.clamp(max=s.limit), up.clamp(-s.limit, s.limit)
        hidden = F.silu(gate) * up * w.routes[token, slot].to(kind)[:, None]
        hidden = activation_fp8(hidden.bfloat16(), 128).to(kind)
        out.index_add_(0, token, product(hidden, w.down, expert * s.d, s.d))
    if w.shared is not None:
        out = out.bfloat16().to(kind) + w.shared.to(kind)
    return out if kind == torch.float64 else out.bfloat16()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def shape_row(s: Shape, software: int, seed: int) -> dict[str, Any]:
    w = drawn(s, seed)
    with poisoned():
        mine = experts(
            w.x, w.ids, w.routes, w.up, w.down, w.shared, experts=s.e, limit=s.limit,
            software=software,
        )  # fmt: skip
        sent = sent_rounded(w.x, kernels(w.x.device.index, software)[MX_CHUNK])
        ahead = experts(
            sent, w.ids, w.routes, w.up, w.down, w.shared, experts=s.e, limit=s.limit,
            software=software,
        )  # fmt: skip
    want, theirs = recipe(w, s, torch.float64), recipe(w, s, torch.float32)
    errors = error(mine, want), error(theirs, want)
    zero = mine[s.tokens - s.padding :] if s.padding and not s.shared else want[:0]
    right = errors[0] <= errors[1] * MOST and bool((zero == 0).all()) and torch.equal(mine, ahead)
    named = dataclasses.asdict(s)
    return {"shape": named, "error": errors[0], "published": errors[1], "right": right}


def case_rows(software: int) -> Iterator[dict[str, Any]]:
    registry = builtin_registry()
    (impl,) = (i for i in registry.impls() if i.id == "moe_experts/cuda-mxf8f6f4")
    module = op_cases("moe_experts")
    for case in module.CASES["moe_experts"](0) + module.FOREIGN["moe_experts"](0):
        if case.schemes == ("mxfp4",) and case.shape["d"] % 256 == case.shape["f"] % 128 == 0:
            found = run_case(impl, case, "bfloat16", "cuda", registry, {"software": software})
            reasons = [reason.message for reason in found.verdict.reasons]
            yield {"case": case.name, "right": found.verdict.accepted, "reasons": reasons}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--software", type=int, choices=(0, 1, 2), default=0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        body = {"device": device, "software": given.software, "rows": rows}
        (given.out / "experts_native.json").write_text(json.dumps(body, indent=1))
        print(json.dumps(row), flush=True)

    for number, shape in enumerate(SHAPES):
        keep(shape_row(shape, given.software, number))
    for row in case_rows(given.software):
        keep(row)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
