"""Storage schemes of tensors: their names and how many bytes they take. No torch.

Dense names are those of safetensors; quantised names and block sizes are those of ggml
(`ggml-common.h`). The tests compare the block table with the `gguf` library's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from metainfer.core.errors import ModelError

#: Bits per element of the dense schemes (safetensors' dtype names).
DENSE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "F64": 64,
        "F32": 32,
        "F16": 16,
        "BF16": 16,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "F4": 4,
        "I64": 64,
        "I32": 32,
        "I16": 16,
        "I8": 8,
        "U64": 64,
        "U32": 32,
        "U16": 16,
        "U8": 8,
        "BOOL": 8,
    }
)

#: Quantised schemes: (elements, bytes) of one block along K.
BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q5_1": (32, 24),
        "Q8_0": (32, 34),
        "Q8_1": (32, 40),
        "Q2_K": (256, 84),
        "Q3_K": (256, 110),
        "Q4_K": (256, 144),
        "Q5_K": (256, 176),
        "Q6_K": (256, 210),
        "Q8_K": (256, 292),
        "IQ2_XXS": (256, 66),
        "IQ2_XS": (256, 74),
        "IQ3_XXS": (256, 98),
        "IQ1_S": (256, 50),
        "IQ4_NL": (32, 18),
        "IQ3_S": (256, 110),
        "IQ2_S": (256, 82),
        "IQ4_XS": (256, 136),
        "IQ1_M": (256, 56),
        "TQ1_0": (256, 54),
        "TQ2_0": (256, 66),
        "MXFP4": (32, 17),
        "NVFP4": (64, 36),
        "Q1_0": (128, 18),
    }
)

#: ggml's numeric type ids.
GGML_TYPES: Mapping[int, str] = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        6: "Q5_0",
        7: "Q5_1",
        8: "Q8_0",
        9: "Q8_1",
        10: "Q2_K",
        11: "Q3_K",
        12: "Q4_K",
        13: "Q5_K",
        14: "Q6_K",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        30: "BF16",
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
        41: "Q1_0",
    }
)


def is_quantised(scheme: str) -> bool:
    """Whether `scheme` stores blocks rather than one number per element."""
    return scheme in BLOCKS


def bytes_per_row(scheme: str, k: int) -> int:
    """Bytes of one row of `k` elements; `ModelError` when `k` does not fill whole blocks."""
    if scheme in BLOCKS:
        block, size = BLOCKS[scheme]
        if k % block:
            raise ModelError(
                f"A {scheme} row of {k} elements is not a whole number of {block}-element blocks.",
                "The file is damaged or was written by a broken converter; convert it again.",
                code="bad_shape",
            )
        return k // block * size
    if scheme not in DENSE_BITS:
        raise ModelError(
            f"Tensor scheme {scheme!r} is not known.",
            f"Known schemes: {', '.join([*DENSE_BITS, *BLOCKS])}.",
            code="unsupported_scheme",
        )
    bits = DENSE_BITS[scheme] * k
    if bits % 8:
        raise ModelError(
            f"A {scheme} row of {k} elements does not fill whole bytes.",
            "The file is damaged; download or convert it again.",
            code="bad_shape",
        )
    return bits // 8


def tensor_bytes(scheme: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor of `shape` (scalars have shape ``()``)."""
    if scheme in BLOCKS:
        if not shape:
            raise ModelError(
                f"A {scheme} tensor needs at least one dimension.",
                "The file is damaged; convert it again.",
                code="bad_shape",
            )
        return bytes_per_row(scheme, shape[-1]) * prod(shape[:-1])
    return bytes_per_row(scheme, prod(shape))
