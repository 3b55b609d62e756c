"""Block-scaled formats as data: what a writer and a reader must agree on. No torch.

A `BlockFormat` says how elements are stored, which block shares a scale, how the scale is stored
and where it stands; two formats of equal byte size that differ in any of these are told apart by
`agree`. Shapes follow the published headers of DeepSeek-V4, ModelOpt and compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from metainfer.core.errors import ModelError

#: Largest finite value of an element.
ELEMENT_MAX: Mapping[str, float] = MappingProxyType({"e4m3": 448.0, "e2m1": 6.0})
#: Elements in one stored byte.
PER_BYTE: Mapping[str, int] = MappingProxyType({"e4m3": 1, "e2m1": 2})
#: Stored dtypes that hold an element; the first is the one we write.
ELEMENT_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"e4m3": ("F8_E4M3",), "e2m1": ("I8", "U8")}
)
#: Stored dtypes that hold a scale: e8m0 bytes may come as plain bytes, F32 only as itself.
SCALE_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"F8_E8M0": ("F8_E8M0", "U8"), "F8_E4M3": ("F8_E4M3",), "F32": ("F32",)}
)
#: How a scale of one is stored: the neutral value of padding.
UNIT_SCALE: Mapping[str, float] = MappingProxyType({"F8_E8M0": 127, "F8_E4M3": 0x38, "F32": 1.0})
#: Scales above this stop the start: no trained weight has one (field case B-09).
SANE_SCALE = 1e4


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One way to store a matrix [N, K] in blocks.

    `element`: ``e4m3`` or ``e2m1``. `block`: rows and columns that share a scale. `scale`: its
    stored dtype. `order`: which nibble of a byte is the even column (``low``), or ``byte``.
    `placement`: ``planar`` (scales are a tensor of their own) or ``inline``. `second`: what the
    per-tensor fp32 number does: ``none``, ``multiply`` or ``divide``. `data_dtype`: the dtype we
    write the elements with. The last four are the leaf names that stand for ``weight``.
    """

    name: str
    element: str
    block: tuple[int, int]
    scale: str
    order: str
    data_dtype: str
    placement: str = "planar"
    second: str = "none"
    data_leaf: str = "weight"
    scale_leaf: str = "scale"
    second_leaf: str = ""
    version: int = 1

    @property
    def identifier(self) -> str:
        """Everything that decides what a stored byte means, as one string."""
        rows, columns = self.block
        return (
            f"{self.element}/{self.order}/{rows}x{columns}/{self.scale}/{self.placement}"
            f"/{self.second}/v{self.version}"
        )

    def data_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the stored elements of an [n, k] matrix."""
        per = PER_BYTE[self.element]
        if k % per:
            raise ModelError(
                f"{self.name} packs {per} elements in a byte; {k} columns do not fill whole bytes.",
                "Pad the columns first, or use another format.",
                code="bad_shape",
            )
        return n, k // per

    def scale_shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of the scales: ceil in both directions, so that edge blocks have theirs."""
        return -(-n // self.block[0]), -(-k // self.block[1])

    def logical_shape(self, data: tuple[int, ...]) -> tuple[int, int]:
        """[N, K] of stored elements of shape `data`."""
        if len(data) != 2:
            raise ModelError(
                f"{self.name} stores matrices; this tensor has shape {list(data)}.",
                "The checkpoint does not fit its configuration.",
                code="bad_shape",
            )
        return data[0], data[1] * PER_BYTE[self.element]

    def nbytes(self, n: int, k: int) -> int:
        """Bytes of elements, scales and second scale of an [n, k] matrix."""
        rows, width = self.data_shape(n, k)
        scale_rows, scale_columns = self.scale_shape(n, k)
        itemsize = 4 if self.scale == "F32" else 1
        second = 0 if self.second == "none" else 4
        return rows * width + scale_rows * scale_columns * itemsize + second

    def leaf(self, weight: str, leaf: str) -> str:
        """The name of `leaf` beside ``X.weight``."""
        stem, dot, last = weight.rpartition(".")
        if last != "weight":
            raise ModelError(
                f"Tensor {weight!r} is not a weight matrix.",
                "Pass the name that ends in .weight.",
                code="bad_name",
            )
        return f"{stem}{dot}{leaf}"


_FP8 = BlockFormat("fp8_128", "e4m3", (128, 128), "F8_E8M0", "byte", "F8_E4M3")
_NVFP4 = BlockFormat(
    "nvfp4", "e2m1", (1, 16), "F8_E4M3", "low", "U8", "planar", "multiply", "weight",
    "weight_scale", "weight_scale_2",
)  # fmt: skip

#: DeepSeek-V4 dense weights: 128x128 blocks, power-of-two scales of one byte.
FP8_128 = _FP8
#: DeepSeek-V4.1: 32x32 blocks.
FP8_32 = replace(_FP8, name="fp8_32", block=(32, 32))
#: DeepSeek-V4.1 Engram tables: [rows, 256] with scales [rows, 8].
FP8_ROW_32 = replace(_FP8, name="fp8_row_32", block=(1, 32))
#: DeepSeek-V4-Base and V3.2: the same elements with fp32 scales.
FP8_128_F32 = replace(_FP8, name="fp8_128_f32", scale="F32")
#: DeepSeek-V4 experts: low nibble = even column, a power-of-two scale per 32 columns.
MXFP4 = BlockFormat("mxfp4", "e2m1", (1, 32), "F8_E8M0", "low", "I8")
#: ModelOpt's names: value = e2m1 * (weight_scale * weight_scale_2).
NVFP4 = _NVFP4
#: compressed-tensors' names: value = e2m1 * (weight_scale / weight_global_scale).
NVFP4_COMPRESSED = replace(
    _NVFP4,
    name="nvfp4_compressed",
    second="divide",
    data_leaf="weight_packed",
    second_leaf="weight_global_scale",
)
FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        known.name: known
        for known in (
            FP8_128, FP8_32, FP8_ROW_32, FP8_128_F32, MXFP4, NVFP4, NVFP4_COMPRESSED,
        )
    }
)  # fmt: skip

# Names of tensors and the format's own name do not change what a byte means.
_MEANING = ("element", "order", "block", "scale", "placement", "second", "version")


def fp8_block(block: tuple[int, int], scale: str) -> BlockFormat:
    """The block FP8 format of a config's ``weight_block_size`` and a header's scale dtype."""
    for known in (FP8_128, FP8_32, FP8_ROW_32, FP8_128_F32):
        if known.block == block and known.scale == scale:
            return known
    suffix = "_f32" if scale == "F32" else ""
    name = f"fp8_{block[0]}x{block[1]}{suffix}"
    return replace(_FP8, name=name, block=block, scale=scale)


def agree(writer: BlockFormat, reader: BlockFormat, where: str) -> None:
    """`ModelError` (``layout_mismatch``) naming every property in which the two differ."""
    differing = [
        f"{key} {getattr(writer, key)} against {getattr(reader, key)}"
        for key in _MEANING
        if getattr(writer, key) != getattr(reader, key)
    ]
    if differing:
        raise ModelError(
            f"{where} is written as {writer.identifier} and read as {reader.identifier}: "
            f"{'; '.join(differing)}.",
            "Choose a kernel that reads what is stored, or convert the weights first.",
            code="layout_mismatch",
        )
