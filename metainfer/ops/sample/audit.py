"""Variants of the sampling kernels that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.ops.sample.tiles import BINS, BLOCK, TILE

MODULE = "metainfer.ops.sample.triton"
SHAPE = {"rows": 8, "v": 129280}

_POINTERS = {
    **dict.fromkeys(("logits", "best", "temperature", "top_p", "min_p"), "*fp32"),
    **dict.fromkeys(("keys", "top_k", "seed", "index", "tokens"), "*i64"),
    **dict.fromkeys(("counts", "offsets", "limits", "numbers", "ids"), "*i32"),
    "sums": "*fp64", "weights": "*fp64", "bad": "*i1",
}  # fmt: skip
_SIZES = {"PART": TILE.part, "PARTS": 128, "BINS": BINS, "BLOCK": BLOCK, "LANES": TILE.lanes}


def _variant(name: str, pointers: str, numbers: str, sizes: str, warps: int) -> Variant:
    """A kernel `<name>_kernel`; its parameters in the order in which it takes them."""
    module = f"{MODULE}_kept" if name in ("gather", "choose") else MODULE
    return Variant(
        impl="sample/triton",
        name=f"sample-{name}",
        kernel=f"{module}:{name}_kernel",
        args={
            **{each: _POINTERS[each] for each in pointers.split()},
            **dict.fromkeys(numbers.split(), "i32"),
            **{each: _SIZES[each] for each in sizes.split()},
        },
        warps=warps,
        shape=SHAPE,
    )


VARIANTS = (
    _variant("best", "logits keys", "vocab stride", "PART", TILE.warps),
    _variant("pick", "keys tokens bad", "vocab parts zero", "PARTS", 1),
    _variant(
        "weigh",
        "logits keys temperature top_k top_p min_p best sums counts tokens bad",
        "vocab stride has_k has_p has_min",
        "PART PARTS BINS",
        TILE.warps,
    ),
    _variant(
        "draw",
        "logits best temperature top_k top_p min_p seed index sums counts offsets limits tokens",
        "vocab stride parts has_k has_p has_min",
        "PART PARTS BINS BLOCK",
        TILE.warps,
    ),
    _variant(
        "gather",
        "logits best temperature offsets limits numbers ids",
        "vocab stride",
        "PART BINS",
        TILE.warps,
    ),
    _variant(
        "choose",
        "top_k top_p min_p seed index sums offsets limits numbers ids weights tokens",
        "vocab parts has_k has_p has_min",
        "PARTS LANES",
        TILE.row_warps,
    ),
)
