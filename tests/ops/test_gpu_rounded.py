"""On a card: experts that are given rounded rows do not differ in a bit, by every tile."""

from __future__ import annotations

import pytest
import torch

from metainfer.formats.activation import activation_fp8
from metainfer.formats.block_codecs import encode
from metainfer.formats.blocks import FORMATS

pytestmark = pytest.mark.gpu
D, F, E, TOP = 1024, 256, 16, 4


@pytest.mark.parametrize("name", ["wgmma", "portable"])
@pytest.mark.parametrize("tokens", [1, 5, 33, 200, 1500])
def test_rounded_rows_give_the_same_bits(name: str, tokens: int) -> None:
    from metainfer.ops.moe_experts import mxfp4
    from metainfer.ops.moe_experts.layouts import pack_stored

    if name == "wgmma" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("products of Hopper")
    drawn = torch.Generator().manual_seed(tokens)

    def experts(count: int, rows: int, width: int) -> object:
        raws = [
            encode(torch.randn(rows, width, generator=drawn) * width**-0.5, FORMATS["mxfp4"])
            for _ in range(count)
        ]
        return pack_stored(raws, dtype=torch.bfloat16, device="cuda")

    w13, w2 = experts(2 * E, F, D), experts(E, D, F)
    x = (torch.randn(tokens, D, generator=drawn) * 3).to("cuda", torch.bfloat16)
    x[0, 5] = 1e4
    ids = torch.stack([torch.randperm(E, generator=drawn)[:TOP] for _ in range(tokens)])
    ids = ids.int().where(torch.rand(tokens, TOP, generator=drawn) > 0.3, -1).cuda()
    weights = torch.rand(tokens, TOP, generator=drawn).cuda()
    run, sent = getattr(mxfp4, name), mxfp4.rounded(x, w13)  # type: ignore[arg-type]
    found, given = (run(rows, ids, weights, w13, w2, limit=1.0) for rows in (x, sent))
    assert torch.equal(found, given) and found.isfinite().all() and bool(found.abs().sum() > 0)
    assert torch.equal(sent.read(), activation_fp8(x))
