"""The plan against what happens: the ledger against bytes held, refusals against limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import FAMILIES, save_tiny, start

from metainfer.core.errors import ModelError, RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.engine.engine import Engine
from metainfer.planner.opening import open_model

LAYOUTS = ("dense@1", "onednn-f32@1")


def ledger(engine: Engine, kind: str) -> int:
    assert engine.resolved is not None
    return sum(row.bytes for row in engine.resolved.plan.ledger if row.kind == kind)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_b20_ledger_equals_what_is_held(
    family: str, layout: str, tmp_path: Path, seed: int
) -> None:
    save_tiny(family, tmp_path, seed)
    engine = start(tmp_path, layouts={"weight": layout}, context=128)
    for kind, held in engine.held_bytes.items():
        assert ledger(engine, kind) == held, kind


def test_b20_ledger_of_blocks_left_in_the_file_s_own_form() -> None:
    engine = start("smollm2-135m", context=512, concurrency=2)
    assert engine.resolved is not None
    assert engine.resolved.plan.bundle["weight"] == "c-rows16@1"
    assert ledger(engine, "weights") == pytest.approx(engine.held_bytes["weights"], rel=0.01)


def test_every_value_of_the_plan_has_an_author() -> None:
    engine = start("random:tiny-qwen3")
    assert engine.resolved is not None
    plan = engine.resolved.plan
    plan.check_origins()
    keys = {decision.key for decision in plan.decisions}
    assert {"limits.max_context", "bundle", "threads", "kv_tokens"} <= keys


def test_the_fingerprint_follows_the_values() -> None:
    def fingerprint(**intent: object) -> str:
        engine = start("random:tiny-qwen3", **intent)
        assert engine.resolved is not None
        return engine.resolved.plan.fingerprint

    assert fingerprint(concurrency=4) == fingerprint(concurrency=4)
    assert fingerprint(concurrency=4) != fingerprint(concurrency=5)


def refusal(kind: type[Exception], **intent: object) -> str:
    with pytest.raises(kind) as raised:
        start(str(intent.pop("model", "random:tiny-llama")), **intent)
    return str(raised.value)


def test_a_context_beyond_the_model_is_refused() -> None:
    assert "512" in refusal(RefusedError, context=513)


def test_a_cache_that_cannot_hold_one_sequence_is_refused_with_what_would() -> None:
    text = refusal(RefusedError, context=512, kv_bytes=200_000, chunk_tokens=64)
    advised = int(text.split("--context to ")[1].split(",")[0].split(" ")[0].replace(",", ""))
    assert 0 < advised < 512
    start("random:tiny-llama", context=advised, kv_bytes=200_000, chunk_tokens=64)
    text = refusal(RefusedError, context=512, kv_bytes=1, chunk_tokens=64)
    assert "--context" not in text
    enough = int(text.split("--kv-memory to ")[1].split("MiB")[0]) << 20
    start("random:tiny-llama", context=512, kv_bytes=enough, chunk_tokens=64)


def test_a_pin_that_cannot_run_is_an_error_with_all_reasons() -> None:
    with pytest.raises(RefusedError) as raised:
        start("random:tiny-llama", ops={"attn_paged": "triton"})
    codes = [reason.code for reason in raised.value.reasons]
    assert "device" in codes and "capability" in codes
    assert "device" in json.dumps(raised.value.to_json())


@pytest.mark.parametrize(
    ("intent", "word"),
    [
        ({"ops": {"attn_paged": "nonsense"}}, "nonsense"),
        ({"ops": {"nonsense": "torch"}}, "nonsense"),
        ({"allow_fallback": ("rope", "nonsense")}, "nonsense"),
        ({"layouts": {"weight": "nonsense"}}, "nonsense"),
        ({"dtype": "int3"}, "int3"),
        ({"goal": "speed"}, "speed"),
        ({"concurrency": 0}, "concurrency"),
        ({"chunk_tokens": 2, "concurrency": 8}, "--chunk-tokens"),
        ({"platform": "abacus"}, "abacus"),
    ],
)
def test_malformed_wishes_name_the_word(intent: dict[str, object], word: str) -> None:
    assert word in refusal(UsageError, **intent)


class TestConfig:
    """Config keys that change meaning and are not known are refused by name."""

    def folder(self, tmp_path: Path, **changes: object) -> Path:
        save_tiny("llama", tmp_path, 1)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        config.update(changes)
        path.write_text(json.dumps({k: v for k, v in config.items() if v != "REMOVE"}))
        return tmp_path

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
            ({"hidden_act": "gelu"}, "gelu"),
            ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
            ({"num_hidden_layers": "REMOVE"}, "num_hidden_layers"),
            ({"hidden_size": "wide"}, "hidden_size"),
            ({"num_key_value_heads": 4}, "4"),
            ({"model_type": "gpt9"}, "gpt9"),
            ({"intermediate_size": 81}, "shape"),
            ({"num_hidden_layers": 4}, "lacks"),
            ({"num_hidden_layers": 2}, "does not use"),
        ],
    )
    def test_refused_by_name(self, tmp_path: Path, changes: dict[str, object], word: str) -> None:
        with pytest.raises(ModelError) as raised:
            open_model(str(self.folder(tmp_path, **changes)))
        assert word in str(raised.value)

    def test_untouched_config_passes(self, tmp_path: Path) -> None:
        assert open_model(str(self.folder(tmp_path))).arch.family == "llama"


@pytest.mark.parametrize("reference", ["random:nonsense", "random:tiny-llama?layers=0", "random:"])
def test_bad_random_references(reference: str) -> None:
    with pytest.raises((ModelError, UsageError)):
        open_model(reference)


def test_random_weights_follow_the_seed() -> None:
    from harness import ask

    from metainfer.core.request import SamplingParams

    def answer(seed: int) -> list[int]:
        engine = Engine(Intent(model=f"random:tiny-llama?seed={seed}&layers=2", threads=1))
        engine.start()
        return ask(engine, [[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=12))[0].tokens

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_b25_a_cache_that_never_hits_is_told_to_the_server() -> None:
    engine = Engine(Intent(model="random:tiny-qwen3", context=128))
    engine.start()
    assert engine.stats().cache_alarms == ()
    engine.scheduler.domains[0].kv.watch.eligible = 10_000
    (alarm,) = engine.stats().cache_alarms
    assert "0 of 10000 eligible look-ups hit" in alarm
    engine.close()


def test_b20_what_is_held_and_the_links_reach_the_server() -> None:
    engine = Engine(Intent(model="random:tiny-qwen3", context=128))
    info = engine.start()
    assert info.held_bytes == engine.held_bytes != {}
    for kind, held in info.held_bytes.items():
        assert sum(row["bytes"] for row in info.plan["ledger"] if row["kind"] == kind) == held
    assert info.links == ()  # nothing stands between a processor and its memory
    engine.close()
