"""The declared implementation of `moe_experts` by the block-scaled instruction of 12.x."""

from metainfer.kernels.conditions import (
    capability,
    dot_type,
    feature,
    multiple_of,
    package,
    shared_memory,
    weight_schemes,
)
from metainfer.kernels.cost import roofline
from metainfer.kernels.impl import Numerics
from metainfer.ops.declare import ON_CUDA, compiled_cuda
from metainfer.ops.moe_experts.cuda_tiles import MX_TILES
from metainfer.ops.moe_experts.impls_triton import (
    BF16,
    CLAMP,
    STORED,
    expert_operations,
    expert_traffic,
)

INSTRUCTION = (dot_type("float4_e2m1"), feature("block_scaled_mma"))

IMPLS = (
    compiled_cuda(
        "moe_experts",
        "moe_experts.cuda_experts:native",
        name="cuda-mxf8f6f4",
        dtypes=BF16,
        conditions=(
            ON_CUDA,
            package("triton", (3, 6)),  # pairs are sorted and results added by kernels of ours
            weight_schemes("mxfp4"),
            capability((12, 0), (12, 1)),
            *INSTRUCTION,
            multiple_of("d", max(tile.n for tile in MX_TILES)),
            multiple_of("f", 128),
            shared_memory(max(tile.shared_bytes() for tile in MX_TILES)),
        ),
        requires_layout=STORED,
        honours=CLAMP,
        native_when=INSTRUCTION,
        numerics=Numerics.NATIVE,
        # Seeds a little above those of the form that unpacks; neither was timed on such a card.
        cost=roofline(
            expert_traffic, expert_operations, launches=5, part=0.5, compute_part=0.3,
            element="float8_e4m3fn",
        ),
        rounds="moe_experts.cuda_experts:rounding",
    ),
)  # fmt: skip
