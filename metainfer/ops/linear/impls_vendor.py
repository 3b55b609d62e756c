"""Declared implementations of `linear` by libraries of others."""

from metainfer.core.step import Phase
from metainfer.kernels.conditions import capability, dot_type, multiple_of, package, weight_schemes
from metainfer.kernels.cost import linear_operations, linear_traffic, roofline
from metainfer.kernels.impl import Impl
from metainfer.ops.declare import ON_CUDA, STORED, foreign
from metainfer.ops.linear.tiles import BLOCK

E4M3 = "float8_e4m3fn"

IMPLS: tuple[Impl, ...] = (
    foreign(
        "linear",
        "linear.vendor_deep_gemm:linear",
        library="deep_gemm",
        phases=frozenset({Phase.CHUNK}),
        conditions=(
            ON_CUDA,
            capability((9, 0), (10, 9)),
            dot_type(E4M3),
            package("triton", (3, 6)),  # activations are quantised by a kernel of ours
            package("deep_gemm"),
            weight_schemes("fp8_128", "fp8_128_f32"),
            multiple_of("k", BLOCK),
            multiple_of("n", BLOCK),
        ),
        requires_layout=STORED,
        native_when=(dot_type(E4M3),),
        cost=roofline(
            linear_traffic(1.0),
            linear_operations,
            launches=3,
            part=0.7,
            compute_part=0.8,
            element=E4M3,
        ),
    ),
)
