"""Declared implementations of `linear` by libraries of others."""

from metainfer.core.step import Phase
from metainfer.kernels.conditions import capability, dot_type, multiple_of, package, weight_schemes
from metainfer.kernels.cost import extent, linear_traffic, roofline
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.declare import ON_CUDA, STORED, foreign
from metainfer.ops.linear.tiles import BLOCK, foreign_rows

E4M3 = "float8_e4m3fn"


def _cost(context: Context) -> float | None:
    """Activations quantised, scales widened, rows padded, one product. Parts as paired with ours on
    an H200 (record 2026-11-30-h200-vendors-adapters): 0.7 to 0.92 of the measured rate, ours 0.55
    to 0.69; but 0.24 at 2,048 rows of the one matrix of fewer than 4,096 outputs. Chosen once for
    chunks of every size, so such a matrix is priced by that one."""
    rows, n, k = (extent(context, name) for name in ("rows", "n", "k"))
    padded = foreign_rows(rows)[-1]
    cost = roofline(
        linear_traffic(1.0),
        lambda _: 2.0 * padded * n * k,
        launches=3 + (padded > rows),
        part=0.7,
        compute_part=0.8 if n >= 4096 else 0.24,
        element=E4M3,
    )
    return cost(context)


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
        cost=_cost,
    ),
)
