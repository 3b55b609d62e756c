"""The figures that this project set out to reproduce, and what a simulated load says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import stated_models

from metainfer.comm.topology import from_facts, tree
from metainfer.core.step import Phase
from metainfer.kv.book.capacity import CacheSizes
from metainfer.kv.book.form import plain
from metainfer.kv.book.spec import CacheSpec, GroupKind, form_groups
from metainfer.planner.bound import HIGH, LOW, Bound, bound
from metainfer.planner.steps import StepCost
from metainfer.platform.facts import Facts
from metainfer.scheduler.config import SchedulerConfig
from metainfer.simulator.outcome import percentile
from metainfer.simulator.run import World, simulate
from metainfer.simulator.workload import draw

BEFORE, AFTER = 3237.0, 6223.0  # tok/s of GLM-5.3
P95_BEFORE, P95_AFTER = 141.6, 46.6
CLIENTS = 64
LEVELS = (8, 16, 32, 64, 128, 256)
PUBLISHED = {"V4-Flash": {8: 33_937, 256: 60_486}, "GLM-5.3": {8: 16_384, 64: 23_503}}
LOAD = "closed:concurrency={},requests={},prompt=4000,output=50"

Assume = Callable[[str], Facts]
Flash = Callable[[str, str, str], StepCost]


def world(cost: StepCost, price: Bound, running: int, context: int) -> World:
    """Room for everything, so that only time decides."""
    spec = CacheSpec(layer=0, name="kv", kind=GroupKind.PAGED, form=plain("seed", 1, "uint8"))
    groups = form_groups((spec,), page_tokens=256)
    pages = running * (context // 256 + 2) + 2
    return World(
        config=SchedulerConfig(
            max_context=context,
            max_running=-(-running // cost.work.layout.data),
            step_tokens=max(8192, running),
            mixed_prefill_tokens=8192,
            max_waiting=1 << 20,
        ),
        sizes=CacheSizes(groups=groups, pages=(pages,), slots=-(-running // cost.work.layout.data)),
        domains=cost.work.layout.data,
        cost=cost,
        price=price,
        caching=False,
    )


def glm_price(facts: Facts, rate: float) -> tuple[StepCost, Bound]:
    """GLM on eight cards, as much slower than predicted as makes it prefill `rate` tok/s."""
    cost = StepCost(stated_models.glm(8), from_facts(facts))
    found = bound(facts, "bfloat16")
    assert found is not None
    amounts = cost.prefill(8192, 8192)
    return cost, replace(found, slower=(8192 / rate) / found(Phase.CHUNK, amounts))


def closed_loop(assume: Assume) -> tuple[list[str], dict[str, object]]:
    """Two unknowns (tokens in flight, seconds that a client spends elsewhere) from both waits."""
    facts = assume("8x-rtx-pro-6000d")
    flight = (P95_BEFORE - P95_AFTER) / (1 / BEFORE - 1 / AFTER)
    elsewhere = flight / BEFORE - P95_BEFORE
    prompt = round(flight / CLIENTS)
    rows, found = [], {}
    for name, rate, think, published in (
        ("before", BEFORE, elsewhere, P95_BEFORE),
        ("after", AFTER, elsewhere, P95_AFTER),
        ("after, if clients spent no time elsewhere", AFTER, 0.0, None),
    ):
        cost, price = glm_price(facts, rate)
        spec = f"closed:concurrency={CLIENTS},requests={6 * CLIENTS},prompt={prompt},output=1"
        load = draw(spec + (f",think={think:.1f}" if think else ""), 1000, 1)
        served = simulate(world(cost, price, CLIENTS, prompt + 64), load).served
        waits = [each.times[0] - each.arrived_s for each in served[2 * CLIENTS :]]
        p95 = percentile(waits, 95)
        assert p95 is not None
        found[name] = p95
        rows.append(
            f"| {name} | {rate:,.0f} | {think:.1f} | {p95:.1f} | "
            f"{'' if published is None else f'{published:.1f}'} |"
        )
    lines = [
        "", "## GLM-5.3: first tokens, 141.6 to 46.6 s", "",
        "Throughput rose 1.92 times, the P95 first token fell 3.04 times. A closed loop does that: "
        "its clients wait for",
        "W = K / X - Z, K prompt tokens in flight, X tokens per second, Z seconds that a client "
        "spends elsewhere (decoding at its",
        f"own pace, tools, reading). Both waits give K = {flight:,.0f} and Z = {elsewhere:.1f} s; "
        f"{CLIENTS} clients then send {prompt:,} tokens each.",
        "The scheduler, simulated with that load and prices that prefill at the two rates, gives "
        "the waits below. Two unknowns from",
        "two figures: the loop explains them, it does not prove itself. Without Z the wait would "
        "fall by the throughput alone.", "",
        "| state | tok/s | Z, s | P95 simulated, s | P95 published, s |", "|---|---|---|---|---|",
        *rows,
    ]  # fmt: skip
    return lines, {"in_flight_tokens": flight, "elsewhere_s": elsewhere, "p95_s": found}


def curve(cost: StepCost, price: Bound) -> dict[int, float]:
    """Input tokens per second of closed loops; half of the requests warm up."""
    found = {}
    for level in LEVELS:
        load = draw(LOAD.format(level, 3 * level), 1000, 1)
        told = simulate(world(cost, price, level, 4096), load).to_json()
        rate = told["input_tok_s"]
        assert isinstance(rate, float)
        found[level] = rate
    return found


def curves(assume: Assume, flash: Flash) -> tuple[list[str], dict[str, object]]:
    """Both machines, both models, by concurrency."""
    cards, big = assume("8x-rtx-pro-6000d"), assume("8x-b300")
    eight, other = bound(cards, "bfloat16"), bound(big, "bfloat16")
    assert eight is not None and other is not None
    v4 = flash("8x-rtx-pro-6000d", "best", "")
    rate = next(link.bytes_s for link in big.links if link.source >= 0 and link.bytes_s)
    wide = tree([""] * 8, [0] * 8, link_bytes_s=rate, dram_bytes_s=1e12)
    v4_big = StepCost(v4.work, wide)
    found = {
        "V4-Flash, 8x B300": curve(v4_big, other),
        "V4-Flash, 8x RTX 6000D": curve(v4, eight),
        "GLM-5.3, 8x B300": curve(StepCost(stated_models.glm(8), wide), other),
        "GLM-5.3, 8x RTX 6000D": curve(StepCost(stated_models.glm(8), from_facts(cards)), eight),
    }
    lines = [
        "", "## B300 beside eight cards: curves, and a contradiction", "",
        "Input tokens per second of closed loops (prompts of 4,000, answers of 50 tokens), "
        "simulated with uncalibrated prices; the",
        "band is 0.4 to 2 times each value. The conditions of the published points are not known. "
        "Of a B300 we have its sheet alone",
        "(`8x-b300`): peaks of 8 TB/s, 2,250 TFLOP/s of bf16 and 900 GB/s a link, which is taken "
        "for a branch of a PCIe tree.",
        "",
        "| | " + " | ".join(f"C{level}" for level in LEVELS) + " |",
        "|---|" + "---|" * len(LEVELS),
        *(
            f"| {name} | " + " | ".join(f"{rate:,.0f}" for rate in row.values()) + " |"
            for name, row in found.items()
        ),
    ]  # fmt: skip
    for model, points in PUBLISHED.items():
        ours = found[f"{model}, 8x B300"]
        for level, rate in points.items():
            inside = LOW * ours[level] <= rate <= HIGH * ours[level]
            lines.append("") if level == min(points) else None
            lines.append(
                f"- {model}, B300, C{level}: published {rate:,}, simulated {ours[level]:,.0f} "
                f"({'in' if inside else 'outside'} the band); B300 over eight cards simulated "
                f"{ours[level] / found[f'{model}, 8x RTX 6000D'][level]:.1f} times."
            )
    low, high = 33_937 / 5.6, 60_486 / 4.9
    lines += [
        "",
        "Published: B300 is 4.9 to 5.6 times the eight cards for V4-Flash. Then the eight cards do",
        f"{low:,.0f} to {33_937 / 4.9:,.0f} tok/s at C8 and {60_486 / 5.6:,.0f} to {high:,.0f} at",
        "C256, and not the 22,584 of the headline: curves and headline come from other conditions.",
    ]
    return lines, {name: {str(k): v for k, v in row.items()} for name, row in found.items()}


def ladder() -> list[str]:
    """What follows from the published figures by arithmetic alone."""
    return [
        "", "## Seed figures by arithmetic", "",
        "| figure | follows |", "|---|---|",
        f"| V4.1-Flash 1,932 to 5,850 to 13,274 | stages of {5850 / 1932:.2f} and "
        f"{13274 / 5850:.2f} times; the whole range lies in one band of the model |",
        f"| V4-Flash 14,546 to 22,584 | {22584 / 14546:.2f} times |",
        f"| GLM-5.3 3,237 to 6,223; 141.6 to 46.6 s | {AFTER / BEFORE:.2f} times the throughput, "
        f"{P95_BEFORE / P95_AFTER:.2f} times the first token: queueing, below |",
        f"| context 270k to 1.05M | {92_628 * 270e3 / 1e9:.1f} GB of BF16 cache on each card; "
        f"{53_940 * 1_048_576 / 8 / 1e9:.1f} GB a card for FP8 over 8 |",
        "| availability above 99.95 % | 21.6 minutes in 30 days: a fault campaign's matter |",
    ]  # fmt: skip


def seed_sections(assume: Assume, flash: Flash) -> tuple[list[str], dict[str, object]]:
    loop, loop_found = closed_loop(assume)
    rows, curves_found = curves(assume, flash)
    return [*ladder(), *loop, *rows], {"closed_loop": loop_found, "curves": curves_found}
