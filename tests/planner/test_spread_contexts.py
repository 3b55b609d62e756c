"""Prompts whose rows ranks share, caches dealt over ranks: named, held, priced, chosen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.comm.model import broadcast, copied_gather, copied_scatter, direct
from metainfer.comm.topology import from_facts
from metainfer.core.errors import UsageError
from metainfer.core.intent import Intent
from metainfer.core.step import Phase, RankTokens, Segment, TokenRun
from metainfer.engine.elsewhere import describe
from metainfer.kv.book.spec import GroupKind
from metainfer.planner.candidate import Candidate
from metainfer.planner.exchange import AROUND_US
from metainfer.planner.layouts import enumerate_layouts, named
from metainfer.planner.opening import open_model
from metainfer.planner.resolve import Resolved
from metainfer.planner.steps import StepCost
from metainfer.platform.facts import Facts
from metainfer.simulator.run import simulate
from metainfer.simulator.workload import draw
from metainfer.simulator.world import world_of

FLASH, QWEN = "random:deepseek-v4-flash?layers=8", "random:qwen3-8b?layers=4"
EIGHT = "8x-rtx-pro-6000d"
CONTEXT = 131_072


@cache
def planned(model: str = FLASH, machine: str = EIGHT, **wishes: Any) -> Resolved:
    """With a matrix rate, so that prompts have a price."""
    intent = Intent(model=model, **{"context": CONTEXT, "concurrency": 8, **wishes})
    there = replace(describe(machine), facts=known_rate(machine))
    return there.resolve(open_model(model), intent)


def known_rate(machine: str = EIGHT) -> Facts:
    facts = describe(machine).facts
    device = replace(facts.device, dot_flops={"bfloat16": 200e12})
    return replace(facts, devices=(device,) * len(facts.devices))


def of(name: str, found: Resolved | None = None) -> Candidate:
    (only,) = [each for each in (found or planned()).layouts if each.layout.name == name]
    return only


def cost(name: str, found: Resolved | None = None) -> StepCost:
    priced = of(name, found).cost
    assert priced is not None
    return priced


def ledger(name: str) -> dict[str, int]:
    held = of(name).held
    assert held is not None
    return {row.item: row.bytes for row in held.ledger()}


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "means"),
    [
        ("dp8ep8", "ep8"),
        ("dp8", "8x"),
        ("tp2dp4ep8", "tp2ep8"),
        ("tp4dp2ep8cs2", "tp4ep8cs2"),
        ("cp8/ep8", "cp8/dp8ep8"),
        ("cp8ep8/dp8ep8", "cp8/dp8ep8"),
        ("cp8/tp8ep8", "cp8/tp8"),
        ("cp8ep8/tp8ep8cs4", "cp8/tp8cs4"),
    ],
)
def test_layouts_are_found_by_other_spellings(asked: str, means: str) -> None:
    found = named(asked, enumerate_layouts(8, 256))
    assert found is not None and found.name == means


@given(st.integers(1, 16), st.sampled_from((0, 8)))
def test_no_spelling_means_two_layouts(devices: int, experts: int) -> None:
    layouts = enumerate_layouts(devices, experts)
    for each in layouts:
        found = named(each.name, layouts)
        assert found is each
    assert named("tp3cp2", layouts) is None and named("", layouts) is None


def test_a_spelling_is_planned_by_its_name() -> None:
    assert planned(parallel="cp8ep8/dp8ep8").plan.layouts[0].name == "cp8/dp8ep8"
    with pytest.raises(UsageError, match="cp8/dp4"):
        planned(parallel="cp8/dp4")


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_dealt_pages_cost_their_part_and_windows_stay_whole(shards: int) -> None:
    whole, dealt = of("tp8").held, of(f"tp8cs{shards}").held
    assert whole is not None and dealt is not None
    for mine, theirs in zip(dealt.groups, whole.groups, strict=True):
        # HCA has one entry for 128 tokens: too few to be dealt.
        dealt_ones = mine.kind is GroupKind.PAGED and mine.tokens_per_entry < 128
        part, form, layers = shards if dealt_ones else 1, mine.form, len(mine.layers)
        assert mine.page_bytes == form.page_bytes(theirs.page_entries // part) * layers, mine.name
        assert (mine.slot_bytes, mine.page_tokens) == (theirs.slot_bytes, theirs.page_tokens)
    rows = {row.item: row for row in dealt.ledger() if row.kind == "kv"}
    assert all(row.bytes >= (row.logical_bytes or 0) for row in rows.values())


def test_a_pair_holds_what_its_wider_half_needs() -> None:
    """Attention whole, experts over all: the weights of ``ep8``, also where decodes cut them."""
    apart = ledger("ep8")
    for name in ("cp8/dp8ep8", "cp8/tp8", "cp8/tp8cs8"):
        found = ledger(name)
        for site in ("linear.wq_b", "linear.wo_b", "experts.w13", "experts.w2"):
            assert found[site] == apart[site], (name, site)


def test_what_prompts_fetch_of_one_layer_is_in_the_ledger() -> None:
    """Of a layer with index keys: an entry and a key for four tokens, in the layout's own form.
    Where each rank has the cache nothing is fetched."""
    item = "a layer's cache, fetched for prompts"
    for name in ("tp8cs8", "cp8/dp8ep8", "cp8/tp8cs8"):
        held = of(name).held
        assert held is not None
        sizes = {spec.name: spec.form.bytes for spec in held.specs if spec.tokens_per_entry == 4}
        each = (sizes["entries"] + sizes["index"]) / 4
        assert ledger(name)[item] == int(each * CONTEXT), name
    for name in ("tp8", "ep8", "cp8/tp8"):
        assert item not in ledger(name), name


def test_heads_that_a_rank_does_not_keep_are_fetched_for_its_rows() -> None:
    """A dense model in ``cp8/tp8``: a rank keeps one KV head of eight, and attends with all."""
    found = planned(QWEN, context=8192)
    pair = of("cp8/tp8", found).held
    assert pair is not None
    assert pair.specs[0].form.bytes * 8 == pair.prompt_specs[0].form.bytes
    rows = {row.item: row.bytes for row in pair.ledger()}
    assert rows["a layer's cache, fetched for prompts"] == 8 * 128 * 2 * 2 * 8192
    assert cost("cp8/tp8", found).prompts is not None


# -- time ------------------------------------------------------------------------------------------


def test_a_chunk_over_eight_ranks_by_hand() -> None:
    """An eighth of the FLOPs on each rank; entries gathered, experts' tokens sent, nothing else."""
    one, pair = cost("ep8"), cost("cp8/tp8")
    assert pair.prompts is not None
    whole, part = one.prefill(4096, 4096), pair.prefill(4096, 4096)
    assert part.rows == 512 and part.flops == pytest.approx(whole.flops / 8)
    assert part.attention == pytest.approx(whole.attention / 8)
    work, tree = pair.prompts.work, from_facts(describe(EIGHT).facts)
    paged = [s for s in work.specs if s.kind is GroupKind.PAGED]
    rest = [s for s in work.specs if s.kind is not GroupKind.PAGED]
    each = sum(s.form.bytes / s.tokens_per_entry for s in paged)
    edges = sum(s.state_bytes or s.window * s.form.bytes for s in rest)
    layers = len({s.layer for s in paged})
    assert not tree.peer
    entries, rows = int((4096 * each + 8 * edges) / layers), 8 * 512 * 4096 * 2
    gather = layers * min(direct(tree, entries, through_host=True), copied_gather(tree, entries))
    there, back = copied_gather(tree, rows // 2), copied_scatter(tree, rows)  # rounded; their sums
    assert max(there, back) < direct(tree, rows, through_host=True)  # long: by copy engines
    # Numbers of experts with their weights, and a scale of four bytes for 128 channels.
    told = 8 * 512 * (work.costs.experts_per_token * 8 + 32 * 4)
    small = min(direct(tree, told, through_host=True), copied_gather(tree, told))
    around = (layers + 3 * 8) * AROUND_US
    assert part.sent * 1e6 == pytest.approx(gather + 8 * (there + small + back) + around, rel=1e-6)


def test_later_chunks_fetch_what_lies_before_them() -> None:
    """By ranks that lack it: lent by its keeper, gathered from parts, not where it is."""
    first, later = [(0, 4096)], [(65_536, 4096)]

    def more(name: str) -> float:
        priced = cost(name).prompts or cost(name)
        return priced.runs(later, scored=1).sent - priced.runs(first, scored=1).sent

    assert more("cp8/tp8") == more("tp8") == 0.0
    assert more("cp8/tp8cs8") > 0 and more("tp8cs8") == pytest.approx(more("cp8/tp8cs8"))
    tree = from_facts(describe(EIGHT).facts)
    assert not tree.peer

    def layers_of(name: str) -> tuple[int, int]:
        """Layers with pages, and the bytes of one that lie before, in the layout's own form."""
        pair = cost(name).prompts
        assert pair is not None
        layers = pair.work.paged_layers
        return layers, int(65_536 * pair.work.token_bytes / layers)

    layers, layer = layers_of("cp8/dp8ep8")
    lent = layers * (AROUND_US + broadcast(tree, layer, through_host=True))
    assert more("cp8/dp8ep8") * 1e6 == pytest.approx(lent)
    pair = cost("cp8/tp8cs8").prompts
    assert pair is not None
    layers = pair.work.dealt_layers
    layer = int(65_536 * pair.work.dealt_bytes / layers)
    gathered = layers * (AROUND_US + copied_gather(tree, layer))
    assert more("cp8/tp8cs8") * 1e6 == pytest.approx(gathered)


def test_a_dealt_cache_is_read_in_parts_and_merged() -> None:
    whole, dealt = cost("tp8"), cost("tp8cs8")
    reads, specs = whole.work.costs.cache_reads, dealt.work.specs
    paged = [s for s in specs if s.kind is GroupKind.PAGED and s.tokens_per_entry < 128]
    saved = reads(whole.work.specs, CONTEXT) - reads(specs, CONTEXT)  # by another form, or none
    saved += reads(paged, CONTEXT) * (1 - 1 / 8)
    before, after = whole.decode(4, CONTEXT), dealt.decode(4, CONTEXT)
    assert before.moved - after.moved == pytest.approx(4 * saved)
    assert after.flops == before.flops and after.attention < before.attention
    tree = from_facts(describe(EIGHT).facts)
    heads = direct(tree, 4 * 64 * 512 * 2, through_host=not tree.peer)
    chosen = direct(tree, 4 * 8 * 4096, through_host=not tree.peer)
    logs = direct(tree, 4 * 8 * (64 + 8) * 4, through_host=not tree.peer)
    layers, choosing = dealt.work.dealt_layers, dealt.work.choosing_layers
    assert (layers, choosing) == (3, 3)  # of six with pages
    sent = (after.sent - before.sent) * 1e6
    around = (3 * layers + choosing) * AROUND_US
    assert sent == pytest.approx(layers * (2 * heads + logs) + choosing * chosen + around)


def test_a_segment_of_a_pair_is_priced_by_its_phase() -> None:
    """Chunks: all domains' rows over all ranks. Anything else: the busiest domain's."""

    def segment(phase: Phase, counts: list[int]) -> Segment:
        ranks = tuple(
            RankTokens((TokenRun(i, 0, (1,) * n, logits=1),) if n else (), padding=0 if n else 1)
            for i, n in enumerate(counts)
        )
        return Segment(phase, "any", ranks)

    pair, apart = cost("cp8/dp8ep8"), cost("ep8")
    one = [4096, 0, 0, 0, 0, 0, 0, 0]
    chunk, alone = segment(Phase.CHUNK, one), apart.segment(segment(Phase.CHUNK, one))
    assert pair.segment(chunk).rows == -(-4103 // 8) and alone.rows == 4096
    assert pair.segment(chunk).flops < alone.flops / 7
    assert pair.segment(chunk).attention == pytest.approx(alone.attention / 8, rel=0.01)
    mixed = segment(Phase.MIXED, one)
    assert pair.segment(mixed) == apart.segment(mixed)


def test_half_of_a_pair_that_cuts_further_reads_its_part() -> None:
    """Decodes of ``cp8/tp8`` read what ``tp8ep8`` reads, of weights that are held whole."""
    pair, cut = cost("cp8/tp8").work, cost("tp8ep8").work
    assert pair.dense_bytes == pytest.approx(cut.dense_bytes, rel=0.01)
    assert pair.expert_bytes == cut.expert_bytes and pair.dense == cut.dense


def test_prompts_over_ranks_are_first_and_decodes_keep_their_rate() -> None:
    """The first token of a lone prompt comes four times sooner than from one domain of eight."""
    pair, apart = of("cp8/dp8ep8").prediction, of("ep8").prediction
    assert pair is not None and apart is not None and pair.first_token_s and apart.first_token_s
    assert pair.first_token_s < apart.first_token_s / 4
    assert pair.decode_tok_s == apart.decode_tok_s
    small = planned("random:qwen3-8b?layers=4", machine="2x-rtx-pro-6000", context=8192)
    cp, tp = of("cp2/dp2", small).prediction, of("tp2", small).prediction
    assert cp is not None and tp is not None and cp.first_token_s and tp.first_token_s
    assert cp.first_token_s < tp.first_token_s  # the field: 1.44 times TP2 at 8K on two cards


def test_a_simulated_pair_shares_the_rows_of_a_lone_prompt() -> None:
    """The real scheduler on both: one client, whose prompt is one domain's or all ranks'."""
    load = draw("closed:concurrency=1,requests=2,prompt=4000,output=4", 1000)
    firsts = {}
    for name in ("ep8", "cp8/dp8ep8"):
        found = planned(parallel=name)
        assert found.chosen.cost is not None
        world = world_of(found, known_rate())
        served = simulate(world, load).served
        firsts[name] = served[0].times[0]
        assert all(each.output == 4 for each in served)
    assert firsts["cp8/dp8ep8"] < firsts["ep8"] / 4


# -- choice ----------------------------------------------------------------------------------------


def test_b26_four_million_cached_tokens_take_the_highest_sharding() -> None:
    """The field: decodes 88 to 68 tokens a second for 0.56 to 3.96 million cached tokens as one
    latent head, copied to each of eight cards, is dealt over them; prompts about as fast."""
    model = "random:glm-5.3?layers=47"
    wishes = {"machine": "8x-rtx-pro-6000", "concurrency": 40}
    found = {goal: planned(model, goal=goal, **wishes) for goal in ("context", "latency")}
    roomy = {e.layout.name: e for e in found["context"].layouts if e.held is not None}
    enough = [n for n, e in roomy.items() if e.held is not None and e.held.kv_tokens >= 4_000_000]
    assert found["context"].plan.layouts[0].name == "tp8cs8" and "tp8cs8" in enough
    assert {roomy[name].layout.shards for name in enough} == {8}
    assert found["latency"].plan.layouts[0].shards == 1
    rates = [roomy[f"tp8{part}"].prediction for part in ("", "cs2", "cs4", "cs8")]
    ones = [each.one_tok_s for each in rates if each is not None and each.one_tok_s]
    assert len(ones) == 4 and ones == sorted(ones, reverse=True)
    assert 0.68 < ones[-1] / ones[0] < 0.9  # 68 of 88 in the field
    firsts = [each.prefill_tok_s for each in rates if each is not None and each.prefill_tok_s]
    assert min(firsts) > 0.9 * max(firsts)


def test_b26_each_phase_names_its_half() -> None:
    found = planned(context=8192, concurrency=64)
    decided = {each.key: each for each in found.plan.decisions}
    rated = {e.layout.name: e.prediction for e in found.layouts if e.prediction is not None}
    for key, at, rate in (
        ("prefill_layout", Phase.CHUNK, "prefill_tok_s"),
        ("decode_layout", Phase.DECODE, "decode_tok_s"),
    ):
        best = max(getattr(each, rate) for each in rated.values())
        names = {
            e.layout.phase_name(at) for e in found.layouts
            if e.prediction is not None and getattr(e.prediction, rate) == best
        }  # fmt: skip
        assert decided[key].value in names
        told = [loser.value for loser in decided[key].losers]
        assert len(told) == len(set(told)) and decided[key].value not in told
        assert any(str(name).startswith("cp8") for name in told) is (key == "prefill_layout")
    assert "/" in " ".join(str(loser.value) for loser in decided["joint_layout"].losers)


def test_heads_of_their_own_are_not_dealt() -> None:
    """GQA heads are cut by tensor ranks: nothing is held twice, and the plan says so."""
    found = planned(QWEN, context=8192)
    (reason,) = of("tp8cs8", found).reasons
    assert reason.code == "shards" and "nothing is held twice" in reason.message


@cache
def sixteen() -> Resolved:
    """Qwen3-8B, 8 KV heads of 128 channels with 4 query heads each, on sixteen cards."""
    facts = known_rate()
    facts = replace(facts, devices=facts.devices[:1] * 16)
    intent = Intent(model=QWEN, context=8192, concurrency=8)
    return replace(describe(EIGHT), facts=facts).resolve(open_model(QWEN), intent)


def test_copied_heads_are_dealt_over_those_that_hold_them() -> None:
    whole, dealt = of("tp16", sixteen()).held, of("tp16cs2", sixteen()).held
    assert whole is not None and dealt is not None
    assert 2 * dealt.groups[0].page_bytes == whole.groups[0].page_bytes
    (fewer, more) = (of(name, sixteen()).pairs[-1] for name in ("tp16", "tp16cs2"))
    assert fewer[0] == more[0] == 40_960 and more[1] > 1.9 * fewer[1]
    for name, said in (
        ("tp16cs4", "2 ranks hold each KV head, which are not groups of 4"),
        ("2xtp8cs2", "8 tensor ranks keep KV heads of their own: nothing is held twice"),
        ("cp16/tp16cs2", "2 ranks hold copies of each KV head, and a pair's chunks would compute "
         "them 2 times"),
    ):  # fmt: skip
        assert said in [reason.message for reason in of(name, sixteen()).reasons], name


def test_steps_over_parts_are_captured_where_kernels_read_by_length() -> None:
    """Keys of heads are; what chooses over parts reads all that a table has room for."""
    heads, latents = of("tp16cs2", sixteen()).held, of("tp8cs8").held
    assert heads is not None and latents is not None
    assert {shape.phase for shape in heads.wanted} == {"decode"} and latents.wanted == ()
    dealt = planned(parallel="tp8cs8")
    (told,) = (each for each in dealt.plan.decisions if each.key == "graph_buckets")
    (reading,) = (loser for loser in told.losers if loser.value == "decode graphs")
    used = {c.impl.id for c in dealt.selection.bundle.choices if c.impl.by_table}
    said = "{} reads all that a page table has room for".format
    assert used and {reason.message for reason in reading.reasons} == set(map(said, used))
    assert told.value == "none" and "share a cache" not in told.why


def test_every_reason_against_a_dealt_cache_of_heads_is_told_at_once() -> None:
    """Windows bound each layer's cache, one query head cannot be cut, eight are no part of two."""
    found = planned("random:tiny-mistral", context=256)
    messages = [reason.message for reason in of("tp8cs8", found).reasons]
    assert messages == [
        "3 query heads of a KV head over 4 ranks, 1 each, leave a rank without any",
        "4 ranks hold each KV head, which are not groups of 8",
        "every layer has a window: no cache grows with the context, nothing is dealt",
    ]


def test_dealt_heads_are_priced_by_hand() -> None:
    """A decode step: half of the keys are read; queries and outputs of four heads pass in each
    layer, and logarithms, priced as those of 512 channels with a window beside."""
    whole, dealt = cost("tp16", sixteen()), cost("tp16cs2", sixteen())
    before, after = whole.decode(4, 8000), dealt.decode(4, 8000)
    keys = 4 * 4 * 8000 * 2 * 128 * 2  # layers, tokens, keys, K and V of one head
    assert before.moved - after.moved == keys / 2
    assert (after.flops, after.attention) == (before.flops, before.attention)
    tree = from_facts(replace(known_rate(), devices=known_rate().devices[:1] * 16)).group(2, 16)
    heads = direct(tree, 4 * 4 * 128 * 2, through_host=not tree.peer)
    logs = direct(tree, 4 * (2 + 1) * 4 * 128 * 2 // 256, through_host=not tree.peer)
    sent = (after.sent - before.sent) * 1e6
    assert sent == pytest.approx(4 * (2 * heads + logs + 3 * AROUND_US))


@pytest.mark.parametrize("name", ["tp8cs8", "cp8/tp8cs4"])
def test_a_dealt_cache_runs_where_it_is_asked_for(name: str) -> None:
    assert planned(parallel=name).refusal() is None
    ops = {choice.request.op for choice in planned(parallel=name).selection.bundle.choices}
    assert {"attn_part", "attn_weigh", "index_part", "index_merge"} <= ops


def test_pages_that_ranks_do_not_divide_are_refused_before_anything_loads() -> None:
    """A page of 128 tokens holds 32 entries of one for four; of 16 tokens, four."""
    found = planned("random:tiny-deepseek-v4", context=256, page_tokens=16)
    reasons = [reason.message for reason in of("tp8cs8", found).reasons]
    assert "a page holds 4 entries of index-1of4, which 8 ranks do not divide" in reasons
