"""Cases of `linear`: odd sizes, few and many rows, bias, joined parts, block-quantised weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.formats.block_codecs import BlockTensor, encode
from metainfer.formats.blocks import FORMATS
from metainfer.formats.quant import TORCH_DTYPES, RawTensor, Stored, quantise
from metainfer.formats.schemes import is_quantised
from metainfer.kernels.impl import OpRequest
from metainfer.ops.case import Case, Weight, generator, normal
from metainfer.ops.linear.packed import PackedWeight
from metainfer.ops.linear.ref import linear, linear_f32, linear_f32_rounded, linear_rounded
from metainfer.ops.linear.rounding import activation_group, round_activations


def stored(values: Tensor, scheme: str) -> Stored:
    """`values` as a checkpoint would hold them."""
    if scheme in FORMATS:
        return encode(values.float(), FORMATS[scheme])
    if is_quantised(scheme):
        return quantise(values, scheme)
    return RawTensor(scheme, tuple(values.shape), values.to(TORCH_DTYPES[scheme]))


#: (rows, N parts, K, scheme, bias)
SIZES: tuple[tuple[int, tuple[int, ...], int, str, bool], ...] = (
    (0, (48,), 64, "F32", False),
    (1, (1,), 1, "F32", True),
    (1, (960,), 576, "F32", False),
    (2, (64, 32, 32), 64, "F32", True),
    (3, (7, 5), 33, "F32", True),
    (8, (200,), 129, "F32", False),
    (17, (100,), 96, "F32", True),
    (64, (96,), 256, "F32", False),
    (130, (70,), 64, "F32", True),
    (1, (48,), 64, "Q8_0", True),
    (5, (33, 31), 96, "Q8_0", False),
    (1, (64,), 576, "Q4_1", False),
    (9, (40,), 64, "Q4_1", True),
    (4, (48, 17), 128, "Q4_0", True),
    (33, (32,), 64, "Q4_0", False),
    (2, (24, 40), 96, "BF16", True),
    (0, (128,), 128, "fp8_128", False),
    (1, (256, 128), 384, "fp8_128", True),
    (5, (40, 24), 96, "fp8_128", False),
    (16, (256,), 512, "fp8_128", False),
    (70, (256, 128), 512, "fp8_128", False),
    (40, (128,), 2048, "fp8_128", False),
    (130, (128,), 1024, "fp8_128_f32", False),
    (3, (130, 60), 200, "fp8_128", True),
    (2, (64,), 96, "fp8_32", False),
    (3, (128,), 256, "fp8_128_f32", False),
    (4, (40, 16), 160, "mxfp4", False),
    (2, (16, 24), 96, "nvfp4", False),
)


def cases(seed: int, op: str = "linear") -> list[Case]:
    g = generator(seed)
    found = []
    for rows, parts, k, scheme, biased in SIZES:
        n = sum(parts)
        values = [normal(g, part, k, scale=k**-0.5) for part in parts]
        bias = normal(g, n) if biased else None
        x = normal(g, rows, k)
        if rows > 1:
            x[0] = 0  # a padded row
        if scheme in FORMATS:
            _outlier(x, values)
        raws = tuple(stored(part, scheme) for part in values)
        found.append(
            Case(
                op=op,
                name=f"{scheme}-{rows}x{'+'.join(map(str, parts))}x{k}{'-bias' * biased}",
                args=(x, Weight(raws, bias)),
                shape={"rows": rows, "n": n, "k": k},
                semantics=frozenset({"bias"} if biased else ()),
                schemes=(scheme,),
            )
        )
    mixed = (stored(normal(g, 32, 64), "Q8_0"), stored(normal(g, 16, 64), "Q4_1"))
    found.append(
        Case(
            op=op,
            name="mixed-schemes",
            args=(normal(g, 3, 64), Weight(mixed)),
            shape={"rows": 3, "n": 48, "k": 64},
            schemes=("Q8_0", "Q4_1"),
        )
    )
    found += [_sloped(g, op, scheme) for scheme in ("fp8_128", "fp8_32", "mxfp4")]
    return found


def _sloped(g: torch.Generator, op: str, scheme: str) -> Case:
    """Blocks of very different sizes, the last one not full: each column of scales matters."""
    width = FORMATS[scheme].block[1]
    k = 3 * width + width // 2
    slope = 4.0 ** -(torch.arange(k) // width)
    weight = Weight((stored(normal(g, 48, k, scale=k**-0.5) * slope, scheme),))
    return Case(
        op=op,
        name=f"{scheme}-4x48x{k}-sloped",
        args=(normal(g, 4, k) / slope, weight),
        shape={"rows": 4, "n": 48, "k": k},
        schemes=(scheme,),
    )


def _outlier(x: Tensor, weights: list[Tensor]) -> None:
    """A large channel that no weight reads: the others of its group are rounded coarsely, which
    tells groups of one width from another."""
    x[-1:, 5] = 12288.0
    for weight in weights:
        weight[:, 5] = 0


def cases_f32(seed: int) -> list[Case]:
    return cases(seed, "linear_f32")


def recipe(x: Tensor, weight: PackedWeight) -> Tensor:
    """What `torch.nn.Linear` does in the model's dtype."""
    return F.linear(x, weight.data["weight"].to(x.dtype), weight.bias)


def rounded_recipe(x: Tensor, weight: PackedWeight) -> Tensor:
    """DeepSeek's linear layer on block-scaled weights: the bias comes to the rounded product."""
    out = linear_f32_rounded(x, dataclasses.replace(weight, bias=None)).to(x.dtype)
    return out if weight.bias is None else out + weight.bias.to(x.dtype)


def shaped(request: OpRequest, rows: int, seed: int) -> Case:
    """The request's matrix in its scheme, at `rows` rows."""
    g, (n, k) = generator(seed), (request.shape["n"], request.shape["k"])
    raws = (stored(normal(g, n, k, scale=k**-0.5), request.schemes[0]),)
    return Case(
        op=request.op,
        name=f"{request.schemes[0]}-{rows}x{n}x{k}",
        args=(normal(g, rows, k), Weight(raws)),
        shape={"rows": rows, "n": n, "k": k},
        schemes=request.schemes[:1],
    )


def foreign_cases(seed: int) -> list[Case]:
    """For libraries of others: 1, 64 and 256 rows, where their forms differ."""
    found = []
    for index, (rows, n, k) in enumerate(((1, 256, 512), (64, 384, 1024), (256, 512, 384))):
        for scheme in ("fp8_128", "fp8_128_f32"):
            request = OpRequest(
                "linear", "linear", Phase.CHUNK, "", {"n": n, "k": k}, schemes=(scheme,)
            )
            found.append(shaped(request, rows, seed + index))
    return found


SHAPED = {"linear": shaped}
FOREIGN = {"linear": foreign_cases}
CASES = {"linear": cases, "linear_f32": cases_f32}
REFERENCES = {"linear": linear, "linear_f32": linear_f32}
RECIPES = {"linear": recipe, "linear_f32": linear_f32}
ROUNDED = {
    "linear": (linear_rounded, rounded_recipe),
    "linear_f32": (linear_f32_rounded, linear_f32_rounded),
}


def scale_mistakes() -> dict[str, Callable[[BlockTensor], BlockTensor]]:
    """What kernels do to the scales of a block-scaled matrix, which lie as its blocks do."""

    def changed(change: Callable[[Tensor], Tensor]) -> Callable[[BlockTensor], BlockTensor]:
        def wrong(matrix: BlockTensor) -> BlockTensor:
            return dataclasses.replace(matrix, scale=change(matrix.scale))

        return wrong

    def stale(scale: Tensor) -> Tensor:
        if scale.shape[1] < 2:
            return scale
        return torch.cat((scale[:, :-1], scale[:, -2:-1]), dim=1)

    return {
        "stale scale column": changed(stale),
        "scale group": changed(lambda scale: scale.roll(1, -1)),
    }


def _tail(unit: int) -> Callable[[Tensor, PackedWeight], Tensor]:
    """The last columns of a width that is no multiple of `unit` are not read."""

    def wrong(x: Tensor, weight: PackedWeight) -> Tensor:
        short = x.clone()
        short[:, x.shape[1] // unit * unit :] = 0
        return linear_f32(short, weight)

    return wrong


def _half_group(x: Tensor, weight: PackedWeight) -> Tensor:
    assert weight.format is not None
    group = activation_group(weight.format) // 2
    return linear_f32(round_activations(x, group), weight)


SCALE_MISTAKES = scale_mistakes()
MISTAKES = {
    op: {
        "truncated tail": tuple(_tail(unit) for unit in (4, 8, 16, 32, 64, 128)),
        "bias": (lambda x, weight: linear_f32(x, dataclasses.replace(weight, bias=None)),),
        "activation scale group": (_half_group,),
    }
    for op in CASES
}
