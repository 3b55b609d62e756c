"""Variants of the compressor's kernel that are compiled for every target."""

from metainfer.kernels.variant import Variant
from metainfer.kv.book.form import (
    EntryForm,
    index_fp4,
    index_fp8,
    index_plain,
    latent_fp8,
    latent_plain,
)
from metainfer.ops.compress.tiles import tile_for

R, ROOM = 64, 8


def _variant(op: str, form: EntryForm, number: int, ratio: int, overlap: bool) -> Variant:
    """Pages of 64 entries; a ring with room for eight drafts."""
    halves, d = 1 + overlap, form.width
    slots = ratio * halves
    kind = form.layout.removesuffix("@1").partition("-")[2]
    name = f"{op}/triton{'-' * bool(kind)}{kind}"
    tile = tile_for(slots, d)
    values = {1: d + form.tail, 2: d, 3: d // 2}.get(number, 0)
    args: dict[str, str | int | bool] = {
        **dict.fromkeys(("kv", "gate", "ape", "weight", "cos_sin", "ring"), "*fp32"),
        "lines": "*i64", "data": "*u8" if number else "*bf16", "slots": "*i64",
        "query_start": "*i32", "context_lens": "*i32", "kv_stride": "i32:16",
        "gate_stride": "i32:16", "sequences": "i32", "eps": "fp32",
        "parts": "*fp32", "counters": "*i32", "each": "i32",
        "RATIO": ratio, "HALVES": halves, "D": d, "LANES": d, "SLICE": tile.slice, "R": R,
        "L": slots + ROOM, "ROWS": tile.rows, "HADAMARD": form.hadamard, "FORM": number,
        "GROUP": form.group, "TAIL": form.tail, "SCALES": form.bytes - values if number else 0,
        "PAGE": 64, "STRIDE": form.page_bytes(64) if number else 64 * d,
    }  # fmt: skip
    return Variant(
        impl=name,
        name=f"{op.replace('_', '-')}{'-' * bool(kind)}{kind}-{ratio}",
        kernel="metainfer.ops.compress.triton:compress_kernel",
        args=args,
        warps=tile.warps,
        shape={"rows": 8, "seqs": 8, "d": d, "rotated": R, "ratio": ratio},
    )


VARIANTS = (
    *(
        _variant("compress", form, number, ratio, overlap)
        for number, form in enumerate((latent_plain(512, R, "bfloat16"), latent_fp8(512, R)))
        for ratio, overlap in ((4, True), (128, False))
    ),
    *(
        _variant("compress_index", form, number, 4, True)
        for form, number in (
            (index_plain(128, "bfloat16"), 0),
            (index_fp8(128), 2),
            (index_fp4(128), 3),
        )
    ),
)
