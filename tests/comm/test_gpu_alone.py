"""On a card (``-m gpu``): one rank alone fills what torch would, in the time of its price."""

from __future__ import annotations

import pytest
import torch

from metainfer.comm.backends.emulated import Form, Price, StandIn

pytestmark = pytest.mark.gpu
CARD = "cuda"


def calls() -> list[StandIn]:
    """One of each form, of whole packs and not."""
    found = []
    for width in (4096, 37):
        for kind in (torch.bfloat16, torch.float32):
            x = torch.randn(9, width, device=CARD).to(kind)
            noise = torch.randn(1 << 12, device=CARD).to(kind)
            flat = x.view(-1)[: 1 << 12].contiguous()
            out = torch.full_like(flat, float("nan"))
            found.append(StandIn(Form.NOISY, flat, out, 2, width=flat.numel(), noise=noise))
            gathered = torch.full((4 * 9, width), float("nan"), device=CARD, dtype=kind)
            found.append(StandIn(Form.PARTS, x, gathered, 4, 9, width, width // 4))
        ids = torch.randint(0, 256, (9, width), device=CARD, dtype=torch.int32)
        routes = torch.full((4 * 9, width), -1, device=CARD, dtype=torch.int32)
        found.append(StandIn(Form.IDS, ids, routes, 4, 9, width, experts=256, numbers=6))
        counts = torch.full_like(ids.view(-1), -1)
        found.append(StandIn(Form.TIMES, ids.view(-1), counts, 4, width=ids.numel()))
    return found


def on_host(call: StandIn) -> torch.Tensor:
    """What the definition makes of it."""
    fields = {name: getattr(call, name) for name in StandIn.__slots__}
    there = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in fields.items()}
    copy = StandIn(**there)
    copy.fill()
    return copy.out


@pytest.mark.parametrize("copied", [False, True], ids=["kernel", "engines"])
def test_a_call_fills_and_takes_its_time_eager_and_captured(copied: bool) -> None:
    from metainfer.comm.backends.emulated_card import DeviceWait

    wait = DeviceWait(0)
    assert 0.0 < wait._launch_us < 20.0
    price = Price(2000.0, down=1024, up=1024, copied=copied)
    made = calls()
    before = wait.seen()
    for call in made:
        wait.carry(call, price)
    torch.cuda.synchronize()
    for call in made:
        assert torch.equal(call.out.cpu().view(torch.uint8), on_host(call).view(torch.uint8))
    took = wait.seen() - before
    assert took.calls == len(made)
    assert took.us - took.late_us == pytest.approx(len(made) * 2000.0)
    if copied:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in made:
            wait.carry(call, price)
    for call in made:
        call.out.fill_(0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) * 1e3 >= len(made) * 1990.0
    for call in made:
        assert torch.equal(call.out.cpu().view(torch.uint8), on_host(call).view(torch.uint8))
