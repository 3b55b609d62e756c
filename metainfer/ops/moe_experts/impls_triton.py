"""Declared Triton implementations of `moe_experts` on MXFP4 experts as stored."""

from collections.abc import Callable

from metainfer.core.verdict import Verdict
from metainfer.kernels.conditions import (
    capability,
    dot_type,
    feature,
    multiple_of,
    package,
    shared_memory,
    weight_schemes,
)
from metainfer.kernels.cost import extent, roofline
from metainfer.kernels.impl import Context, Numerics
from metainfer.ops.declare import ON_CUDA, triton
from metainfer.ops.moe_experts.tiles import (
    PORTABLE_CHUNK,
    WGMMA_TILES,
    chunk_for,
    stream_for,
)

E4M3 = "float8_e4m3fn"
STORED = {"experts": "experts-stored@1"}
CLAMP = frozenset({"clamp"})
BF16 = frozenset({"bfloat16"})
MXFP4_BYTES = 0.5 + 1 / 32


def expert_traffic(c: Context) -> float:
    """Each touched expert once (rows choose evenly), activations and hidden values."""
    experts, picks = extent(c, "e"), extent(c, "rows") * extent(c, "top_k")
    touched = experts * (1 - (1 - 1 / experts) ** picks)
    d, f = extent(c, "d"), extent(c, "f")
    return touched * 3 * d * f * MXFP4_BYTES + picks * (2 * d + 5 * f + 4 * d)


def expert_operations(c: Context) -> float:
    return 6.0 * extent(c, "rows") * extent(c, "top_k") * extent(c, "d") * extent(c, "f")


def _fits(wide: bool) -> Callable[[Context], Verdict]:
    """Both forms' tiles fit the card's shared memory."""

    def fits(context: Context) -> Verdict:
        card = context.facts.device.capability
        tiles = (stream_for(card, wide), chunk_for(card, wide))
        return shared_memory(max(tile.shared_bytes(wide) for tile in tiles))(context)

    return fits


_STORED = (ON_CUDA, package("triton", (3, 6)), weight_schemes("mxfp4"))
_FORMAT = (*_STORED, dot_type(E4M3))
_BLOCKS = (multiple_of("d", 128), multiple_of("f", 128))

IMPLS = (
    triton(
        "moe_experts",
        "moe_experts.mxfp4:wgmma",
        name="triton-wgmma",
        dtypes=BF16,
        conditions=(
            *_FORMAT,
            capability((9, 0), (9, 9)),
            feature("wgmma"),
            *_BLOCKS,
            shared_memory(max(tile.shared_bytes() for tile in WGMMA_TILES)),
        ),
        requires_layout=STORED,
        honours=CLAMP,
        native_when=(dot_type(E4M3),),
        numerics=Numerics.NATIVE,
        cost=roofline(
            expert_traffic, expert_operations, launches=5, part=0.85, compute_part=0.3, element=E4M3
        ),
        rounds="moe_experts.mxfp4:rounded",
    ),
    triton(
        "moe_experts",
        "moe_experts.mxfp4:portable",
        dtypes=BF16,
        conditions=(
            *_FORMAT,
            capability((8, 9)),
            *_BLOCKS,
            _fits(wide=False),
            shared_memory(PORTABLE_CHUNK.shared_bytes()),
        ),
        requires_layout=STORED,
        honours=CLAMP,
        native_when=(dot_type(E4M3),),
        numerics=Numerics.NATIVE,
        cost=roofline(
            expert_traffic, expert_operations, launches=5, part=0.45, compute_part=0.2, element=E4M3
        ),
        rounds="moe_experts.mxfp4:rounded",
    ),
    triton(
        "moe_experts",
        "moe_experts.mxfp4:wide",
        name="triton-bf16",
        dtypes=BF16,
        conditions=(*_STORED, capability((8, 0)), *_BLOCKS, _fits(wide=True)),
        requires_layout=STORED,
        honours=CLAMP,
        native_when=(),  # exact, and not the format's own instruction
        numerics=Numerics.NATIVE,
        cost=roofline(
            expert_traffic,
            expert_operations,
            launches=5,
            part=0.3,
            compute_part=0.15,
            element="bfloat16",
        ),
    ),
)
