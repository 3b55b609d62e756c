"""The PTX that unpacks FP4 elements, run here instruction by instruction."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from metainfer.core.errors import InternalError
from metainfer.core.step import Phase
from metainfer.kernels.audit import target_facts
from metainfer.kernels.impl import Context, OpRequest
from metainfer.kernels.select_op import objections
from metainfer.ops.moe_experts.choice import portable_for, wgmma_for
from metainfer.ops.moe_experts.impls import IMPLS
from metainfer.ops.moe_experts.tiles import (
    OPERANDS,
    OPERANDS_WORDS,
    PORTABLE_CHUNK,
    PORTABLE_STREAM,
    SPAN,
    UNPACK,
    UNPACK_WORDS,
    WGMMA_CHUNK,
    WGMMA_MANY,
    WGMMA_MIDDLE,
    WGMMA_SOME,
    WGMMA_STREAM,
    WgmmaTile,
)

WORD = 0xFFFFFFFF
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def permuted(a: int, b: int, selector: int) -> int:
    """``prmt.b32``: four bytes of b:a, each by a nibble whose highest bit asks for the sign."""
    eight, word = b << 32 | a, 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = eight >> 8 * (nibble & 7) & 255
        word |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return word


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "prmt.b32": permuted,
    "sub.s32": operator.sub,
    "mad.lo.s32": lambda a, b, c: a * b + c,
    "and.b32": operator.and_,
    "or.b32": operator.or_,
    "shl.b32": operator.lshift,
    "shr.u32": operator.rshift,
}


def run(ptx: str, inputs: Sequence[int]) -> list[int]:
    """Outputs $0 .. $3 of `ptx`, whose inputs begin at $4."""
    held = {f"${i + 4}": value for i, value in enumerate(inputs)}
    for line in ptx.replace(";", "").splitlines():
        name, _, rest = line.partition(" ")
        if name not in ("", "{", "}", ".reg"):
            out, *operands = rest.split(", ")
            values = [held[o] if o in held else int(o, 0) for o in operands]
            held[out] = INSTRUCTIONS[name](*values) & WORD
    return [held[f"${i}"] for i in range(4)]


@pytest.mark.parametrize("each", [4, 2])
def test_unpacked_elements_are_exact(each: int, rng: random.Random) -> None:
    """`each`: elements that a register of scales, references and selectors is given for."""
    ptx, text = (UNPACK, OPERANDS) if each == 4 else (UNPACK_WORDS, OPERANDS_WORDS)
    assert text.count("=&r") == 4 and text.count("r") == 4 + 2 + 3 * each
    for _ in range(40):
        nibbles = [rng.randrange(16) for _ in range(16)]
        ref, group = rng.randrange(SPAN, 255), rng.randrange(4)
        scales = [rng.randrange(ref - SPAN, ref + 1) for _ in range(4)]
        packed = [sum(n << 4 * i for i, n in enumerate(nibbles[p : p + 8])) for p in (0, 8)]
        four = sum(s << 8 * i for i, s in enumerate(scales))
        rest = [value for v in (four, ref, 0x4440 + group) for value in (v, *[WORD] * (each - 1))]
        words = run(ptx, [*packed, *rest])
        codes = torch.tensor([w >> 8 * i & 255 for w in words for i in range(4)]).to(torch.uint8)
        sizes = torch.tensor([E2M1[n & 7] * (-1) ** (n >> 3) for n in nibbles])
        want = sizes * 2.0 ** (scales[group] - ref + 6)
        assert torch.equal(codes.view(torch.float8_e4m3fn).float(), want)


def test_tiles_by_pairs_and_widths() -> None:
    assert portable_for(8 * 256, 256) == PORTABLE_STREAM
    assert portable_for(8 * 256 + 1, 256) == PORTABLE_CHUNK
    pairs = (8, 9, 16, 17, 28, 29, 80, 81)
    chosen = [wgmma_for(256 * each, 256, 4096, 2048) for each in pairs]
    below = [*[WGMMA_SOME] * 2, *[WGMMA_MIDDLE] * 2]
    assert chosen == [WGMMA_STREAM, *below, *[WGMMA_CHUNK] * 2, WGMMA_MANY]
    narrow = [WGMMA_SOME, *below, *[WGMMA_MANY] * 3]
    for d, f in ((4096, 256), (4096, 512), (640, 4096), (4096, 2048 + 128)):
        assert [wgmma_for(256 * each, 256, d, f) for each in pairs] == narrow


def test_a_tile_that_copies_past_its_scales_is_refused_at_declaration() -> None:
    for stages, blocks in ((4, 2), (3, 4), (6, 1), (3, 3)):
        with pytest.raises(InternalError, match="scales that it has room for"):
            WgmmaTile(64, 8, 4, stages, blocks)
    assert WgmmaTile(64, 8, 4, 5, 1).shared_bytes() and WgmmaTile(64, 8, 4, 2, 4).shared_bytes()


def test_b05_one_name_one_price_narrow_experts_run_the_same_kernel() -> None:
    """`tp8` of V4-Flash has 256 hidden channels a rank: these took a form 2 to 4 times slower."""
    impls = {impl.name: impl for impl in IMPLS}
    for target, name in (("sm_120", "triton"), ("sm_89", "triton"), ("sm_90", "triton-wgmma")):
        for f in (128, 256, 384, 512, 2048):
            shape = {"rows": 8, "d": 4096, "f": f, "e": 256, "top_k": 6}
            request = OpRequest("moe_experts", "experts", Phase.DECODE, "bfloat16", shape)
            context = Context(request, target_facts(target), impls[name].requires_layout)
            assert objections(impls[name], context).accepted
        odd = replace(context, request=replace(request, shape={**shape, "f": 192}))
        refused = objections(impls[name], odd)
        assert [reason.message for reason in refused.reasons] == [
            "f must be a multiple of 128, it is 192"
        ]
