"""Figures that others published, as rows; nothing here is ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One published figure. `low`, `high`: its ends (equal for a single number), in `unit`.

    `machine`, `model`, `layout`, `phase`: what is asked of the cost model; `n`: tokens of the
    prompt (prefill), or sequences (decode), or tokens of context (capacity). `kind`: ``tuned``,
    ``day-0`` or ``fallback``. `why`: why nothing is predicted, if so.
    """

    box: str
    what: str
    low: float
    high: float
    unit: str
    machine: str = ""
    model: str = ""
    layout: str = ""
    phase: str = ""
    n: int = 0
    kind: str = "tuned"
    why: str = ""


EIGHT_D, FOUR, TWO = "8x-rtx-pro-6000d", "4x-rtx-pro-6000", "2x-rtx-pro-6000"
EIGHT, H200 = "8x-rtx-pro-6000", "1x-h200"
BOX, TOK = "8 PCIe-only cards", "tok/s"


def _rate(
    box: str, what: str, low: float, high: float, *place: str, n: int = 8192, kind: str = "tuned"
) -> Row:
    machine, model, layout, phase = place
    unit = "s" if phase == "ttft" else TOK
    return Row(box, what, low, high, unit, machine, model, layout, phase, n, kind)


BOXES = (
    _rate(BOX, "V4.1-Flash, day-0", 1932, 1932, EIGHT_D, "v4.1", "tp8", "prefill", kind="day-0"),
    _rate(BOX, "V4.1-Flash, after kernels", 5850, 5850, EIGHT_D, "v4.1", "tp8", "prefill"),
    _rate(
        BOX, "V4.1-Flash, after communication and layout", 13274, 13274,
        EIGHT_D, "v4.1", "tp8", "prefill",
    ),
    _rate(BOX, "V4-Flash, before", 14546, 14546, EIGHT_D, "v4", "best", "prefill", kind="day-0"),
    _rate(BOX, "V4-Flash, after", 22584, 22584, EIGHT_D, "v4", "best", "prefill"),
    _rate(BOX, "GLM-5.3, before", 3237, 3237, EIGHT_D, "glm", "tp8", "prefill", kind="day-0"),
    _rate(BOX, "GLM-5.3, after", 6223, 6223, EIGHT_D, "glm", "tp8", "prefill"),
    Row(
        BOX, "GLM-5.3, context, BF16 cache on each card", 270e3, 270e3, "tokens",
        EIGHT_D, "glm-bf16", "tp8", "capacity", 1,
    ),
    Row(
        BOX, "GLM-5.3, context, FP8 cache over 8 cards", 1.05e6, 1.05e6, "tokens",
        EIGHT_D, "glm", "tp8", "limit", 8,
    ),
    Row(
        BOX, "GLM-5.3, P95 first token", 141.6, 141.6, "s",
        why="its load is not published; see the closed loop below",
    ),
    Row(
        BOX, "shared and routed experts on two streams", 11.26, 11.26, "%",
        why="the cost model overlaps nothing",
    ),
    _rate("4x RTX PRO 6000", "V4-Flash, 8K prompts", 14e3, 15e3, FOUR, "v4", "tp4", "prefill"),
    _rate(
        "4x RTX PRO 6000", "V4-Flash, 128K prompts", 13e3, 14e3, FOUR, "v4", "tp4", "prefill",
        n=131_072,
    ),
    _rate("4x RTX PRO 6000", "V4-Flash, decode of 1", 176, 176, FOUR, "v4", "tp4", "decode", n=1),
    _rate(
        "4x RTX PRO 6000", "V4-Flash, decode of 64", 2690, 2690, FOUR, "v4", "tp4", "decode", n=64
    ),
    _rate("2x RTX PRO 6000", "V4-Flash", 12e3, 13e3, TWO, "v4", "tp2", "prefill"),
    _rate("2x RTX PRO 6000", "V4-Flash, decode of 1", 143, 143, TWO, "v4", "tp2", "decode", n=1),
    _rate(
        "2x RTX PRO 6000", "V4-Flash, decode of 64", 1887, 1887, TWO, "v4", "tp2", "decode", n=64
    ),
    _rate(
        "4 cards, reference paths", "V4-Flash", 702, 702, FOUR, "v4", "tp4", "prefill",
        kind="fallback",
    ),
    _rate(
        "4 cards, reference paths", "V4-Flash, decode of 1", 38, 38, FOUR, "v4", "tp4", "decode",
        n=1, kind="fallback",
    ),
    _rate(
        "4x RTX PRO 6000", "V4.1-Flash, 32K prompt", 12e3, 21e3, FOUR, "v4.1", "tp4", "prefill",
        n=32_768,
    ),
    _rate(
        "4x RTX PRO 6000", "V4.1-Flash, 1M prompt", 310, 322, FOUR, "v4.1", "tp4", "ttft",
        n=1 << 20,
    ),
    _rate(
        "8x RTX PRO 6000", "GLM-5.2 NVFP4, 64K prompts", 5.7e3, 6.2e3, EIGHT, "glm", "tp8",
        "prefill", n=65_536,
    ),
    _rate(
        "8x RTX PRO 6000", "GLM-5.2 NVFP4, cache on each card, decode of 1", 88, 88, EIGHT, "glm",
        "tp8", "decode", n=1,
    ),
    _rate(
        "8x RTX PRO 6000", "GLM-5.2 NVFP4, cache over 8 cards, decode of 1", 68, 68, EIGHT, "glm",
        "tp8cs8", "decode", n=1,
    ),
    Row(
        "8x RTX PRO 6000", "GLM-5.2 NVFP4, cache of one card's worth", 0.56e6, 0.56e6, "tokens",
        EIGHT, "glm", "tp8", "capacity", 1,
    ),
    Row(
        "8x RTX PRO 6000", "GLM-5.2 NVFP4, cache over 8 cards", 3.96e6, 3.96e6, "tokens",
        EIGHT, "glm", "tp8", "capacity", 8,
    ),
    _rate(
        "8x RTX 6000D", "H3 video, 15 s, 4 forwards, TP2 x Ulysses 4", 48.2, 48.2,
        EIGHT_D, "h3", "", "ttft",
    ),
    _rate(
        "8x RTX 6000D", "H3 video, 15 s, 4 forwards, TP4 x Ulysses 2", 54.0, 54.0,
        EIGHT_D, "h3", "", "ttft",
    ),
)  # fmt: skip

TWELVE = "v4?layers=12"
ENGINE = tuple(
    Row(
        "H200, vLLM 0.26", f"V4-Flash, 12 layers, {what}", value, value, "ms",
        H200, TWELVE, "single", phase, n,
    )
    for what, value, phase, n in (
        ("prefill of 2,048", 55.0, "chunks", 2048),
        ("prefill of 8,192", 203.0, "chunks", 8192),
        ("prefill of 32,768", 756.0, "chunks", 32_768),
        ("prefill of 8 x 8,192", 65536 / 42.1, "chunks8", 8192),
        ("decode of 1", 4.05, "step", 1),
        ("decode of 8", 5.02, "step", 8),
        ("decode of 32", 7.02, "step", 32),
        ("decode of 128", 13.0, "step", 128),
    )
)  # fmt: skip

GEMMS = tuple(
    Row("H200, DeepGEMM FP8", f"{name}, {m} rows", us, us, "us", H200, f"{n}x{k}", "", "gemm", m)
    for name, n, k, row in (
        ("wq_b", 32_768, 1024, (20.3, 20.3, 20.9, 116, 476)),
        ("wo_b", 4096, 8192, (23.0, 20.5, 21.7, 106, 438)),
        ("wq_a + wkv", 1536, 4096, (12.9, 12.9, 13.3, 26.8, 81)),
        ("shared up and gate", 4096, 4096, (15.0, 14.6, 14.9, 56, 199)),
        ("shared down", 4096, 2048, (29.0, 28.1, 11.9, 34, 114)),
        ("indexer wq_b", 8192, 1024, (11.2, 11.2, 11.0, 36, 125)),
    )
    for m, us in zip((1, 16, 128, 2048, 8192), row, strict=True)
)
ATTENTION = tuple(
    Row(
        "H200, FlashMLA sparse", f"{queries:,} queries over {entries:,}", us, us, "us",
        H200, "", "", "sparse", queries,
    )
    for queries, entries, us in (
        (8192, 10_240, 1396), (2048, 10_240, 364), (8192, 131_072, 1698), (64, 131_072, 33)
    )
)  # fmt: skip
NCCL = tuple(
    Row(
        "2x H200, NCCL, P2P off", f"all-reduce of {size >> 10:,} K", us, us, "us",
        "", "", "", "nccl", size,
    )
    for size, us in (
        (8 << 10, 31.5), (64 << 10, 32.5), (256 << 10, 35.2), (1 << 20, 62.6),
        (4 << 20, 165.9), (16 << 20, 595.0), (64 << 20, 2342.0),
    )
)  # fmt: skip

ALL = (*BOXES, *ENGINE, *GEMMS, *ATTENTION, *NCCL)
