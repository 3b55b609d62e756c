"""Declared implementations of `linear` and `linear_f32`, and the layouts of packed weights."""

import dataclasses

from metainfer.core.verdict import ACCEPT, Verdict
from metainfer.formats.blocks import FORMATS
from metainfer.formats.schemes import BLOCKS, tensor_bytes
from metainfer.kernels.conditions import package, weight_schemes
from metainfer.kernels.cost import linear_operations, linear_traffic, roofline, width
from metainfer.kernels.impl import Context, Layout, Numerics
from metainfer.ops.declare import (
    BLOCK_SCALED,
    C_ON_CPU,
    DENSE,
    FLOAT32,
    ON_CPU,
    ON_EITHER,
    PLAIN,
    RECIPE,
    STORED,
    compiled_c,
    own_matrix_unit,
    portable,
    reference,
)
from metainfer.ops.linear.impls_triton import IMPLS as TRITON_IMPLS
from metainfer.ops.linear.impls_vendor import IMPLS as VENDOR_IMPLS

BIAS = frozenset({"bias"})
BLOCKED = frozenset({"Q8_0", "Q4_0", "Q4_1"})
DECODED = BLOCKED | PLAIN | BLOCK_SCALED
ROWS16 = {"weight": "c-rows16@1"}
ONEDNN = {"weight": "onednn-f32@1"}


def _own_library(context: Context) -> Verdict:
    """The vendor library runs on the device's own instructions for the type."""
    return ACCEPT if context.facts.device.kind == "cpu" else own_matrix_unit(context)


def _blocks(scheme: str, n: int, k: int) -> int:
    """Bytes of ggml's blocks."""
    return int(n * k * BLOCKS[scheme][1] / BLOCKS[scheme][0])


def stored_bytes(scheme: str, n: int, k: int) -> int:
    """Bytes of a tensor as the checkpoint holds it, scales included."""
    return FORMATS[scheme].nbytes(n, k) if scheme in FORMATS else tensor_bytes(scheme, (n, k))


LAYOUTS = (
    Layout(
        id="dense@1",
        role="weight",
        pack="metainfer.ops.linear.packed:pack_dense",
        schemes=DECODED,
    ),
    Layout(
        id="onednn-f32@1",
        role="weight",
        pack="metainfer.ops.linear.onednn_layout:pack",
        schemes=DECODED,
        conditions=(ON_CPU,),
        embed_apart=True,
    ),
    Layout(
        id="c-rows16@1",
        role="weight",
        pack="metainfer.ops.linear.cpu_c:pack",
        schemes=BLOCKED,
        conditions=C_ON_CPU,
        nbytes=_blocks,
    ),
    Layout(
        id="stored@1",
        role="weight",
        pack="metainfer.ops.linear.stored:pack",
        schemes=PLAIN | BLOCK_SCALED,
        nbytes=stored_bytes,
    ),
)


def _library(context: Context) -> float | None:
    """cuBLAS near its roofline; F.linear on CPU reorders the weight at every call."""
    parts = (0.5, 0.45) if context.facts.device.kind == "cpu" else (0.75, 0.75)
    cost = roofline(linear_traffic(), linear_operations, part=parts[0], compute_part=parts[1])
    return cost(context)


def _keeps_sums(context: Context) -> bool:
    """The library gives float32 results without widening what it multiplies (`torch_dense`)."""
    card = context.facts.device.kind == "cuda"
    return width(context) >= 4 or (card and context.request.dtype == "bfloat16")


def _stored_traffic(context: Context) -> float:
    """Weights at the size they have in the checkpoint."""
    sizes = [BLOCKS[s][1] / BLOCKS[s][0] for s in context.request.schemes if s in BLOCKS]
    return linear_traffic(sum(sizes) / len(sizes) if sizes else 4.0)(context)


def _recipe_traffic(context: Context) -> float:
    """Stored weights, widened on the way (seed: 16 more bytes of an element move)."""
    schemes = context.request.schemes or ("BF16",)
    each = sum(stored_bytes(s, 128, 128) / 128**2 for s in schemes) / len(schemes)
    return linear_traffic(each + 16)(context)


#: Half types are widened first: the weights move three times, twice as wide.
_widened = roofline(
    lambda c: linear_traffic()(c) * (1 if width(c) >= 4 else 5),
    linear_operations,
    launches=3,
    part=0.6,
    element="float32",
)
_packed = roofline(linear_traffic(), linear_operations, part=0.8, compute_part=0.8)
_streamed = roofline(_stored_traffic, linear_operations, part=0.9, compute_part=0.8)
_recipe = roofline(
    _recipe_traffic, linear_operations, launches=24, part=0.6, compute_part=0.5, element="float32"
)
_IN_BLOCKS = (*C_ON_CPU, weight_schemes(*sorted(BLOCKED)))

_ON_CARDS = TRITON_IMPLS + VENDOR_IMPLS

# Seeds, from two-core measurements of a 135M model: F.linear reaches a bit over half of what
# oneDNN's prepacked weights do; streaming 4-bit blocks wins by its bytes, not by its arithmetic.
IMPLS = _ON_CARDS + tuple(
    dataclasses.replace(impl, honours=BIAS)
    for impl in (
        compiled_c(
            "linear",
            "linear.cpu_c:linear",
            conditions=_IN_BLOCKS,
            requires_layout=ROWS16,
            cost=_streamed,
        ),
        portable(
            "linear",
            "linear.cpu_onednn:linear",
            name="onednn",
            dtypes=FLOAT32,
            conditions=(ON_CPU, package("torch")),
            requires_layout=ONEDNN,
            numerics=Numerics.NATIVE,
            graph_safe=False,
            cost=_packed,
        ),
        portable(
            "linear",
            "linear.torch_dense:linear",
            requires_layout=DENSE,
            native_when=(_own_library,),
            numerics=Numerics.NATIVE,
            cost=_library,
        ),
        portable(
            "linear",
            "linear.torch_stored:linear",
            name="recipe",
            conditions=RECIPE,
            requires_layout=STORED,
            numerics=Numerics.NATIVE,
            graph_safe=False,
            cost=_recipe,
        ),
        reference("linear", "linear.ref:linear", requires_layout=DENSE, cost=_widened),
        compiled_c(
            "linear_f32",
            "linear.cpu_c:linear",
            conditions=_IN_BLOCKS,
            requires_layout=ROWS16,
            cost=_streamed,
        ),
        portable(
            "linear_f32",
            "linear.cpu_onednn:linear",
            name="onednn",
            dtypes=FLOAT32,
            conditions=(ON_CPU, package("torch")),
            requires_layout=ONEDNN,
            numerics=Numerics.NATIVE,
            graph_safe=False,
            cost=_packed,
        ),
        portable(
            "linear_f32",
            "linear.torch_dense:linear_f32",
            requires_layout=DENSE,
            numerics=Numerics.NATIVE,
            cost=lambda c: _library(c) if _keeps_sums(c) else _widened(c),
        ),
        portable(
            "linear_f32",
            "linear.torch_stored:linear_f32",
            name="recipe",
            conditions=RECIPE,
            requires_layout=STORED,
            numerics=Numerics.NATIVE,
            graph_safe=False,
            cost=_recipe,
        ),
        portable(
            "linear_f32",
            "linear.torch_dense:linear_f32",
            name="library",
            dtypes=frozenset({"bfloat16"}),
            conditions=(ON_EITHER, weight_schemes("BF16")),
            requires_layout=STORED,
            native_when=(own_matrix_unit,),
            numerics=Numerics.NATIVE,
            cost=lambda c: _library(c) if _keeps_sums(c) else _widened(c),
        ),
        reference("linear_f32", "linear.ref:linear_f32", requires_layout=DENSE, cost=_widened),
    )
)
