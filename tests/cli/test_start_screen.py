"""What `serve` says: settings with their authors, then what requests meet."""

from __future__ import annotations

from typing import Any

from metainfer.cli import start_screen
from metainfer.cli.settings import Setting, Settings
from metainfer.core.ledger import Origin
from metainfer.engine.protocol import EngineInfo


def info(**changes: Any) -> EngineInfo:
    plan = {
        "device": "Card", "platform": "cuda", "threads": 4, "fingerprint": "f00d",
        "model": {"dtype": "bfloat16"}, "layouts": [{"name": "single"}],
        "ops": {
            "linear.qkv@decode": {"impl": "linear/fast", "quality": "native"},
            "attn@decode": {"impl": "attn/torch", "quality": "reference"},
            "attn@chunk": {"impl": "attn/torch", "quality": "reference"},
        },
        **changes,
    }  # fmt: skip
    document = {"plan": plan, "decisions": [{"key": "collectives.all_reduce", "value": "slab"}]}
    return EngineInfo("m", 300, 8192, 65536, 64, (1,), document, (("a", 1.5), ("b", 2.0)))


def test_the_settings_with_their_authors_and_no_secrets() -> None:
    made = Settings()
    for name, value, origin, said in (
        ("--port", "9", Origin.FLAG, "the command line"),
        ("--context", "99", Origin.FILE, "--config s.toml line 2"),
        ("--api-key", "hunter2", Origin.ENV, "the environment's METAINFER_API_KEY"),
    ):
        made.given[name] = Setting(name, (value,), origin, said)
    lines = start_screen.opening("m", made)
    assert "serve m" in lines[0] and lines[0].split()[1][0].isdigit()
    assert lines[1:] == [
        "  --port 9  (the command line)",
        "  --context 99  (--config s.toml line 2)",
        "  --api-key (secret)  (the environment's METAINFER_API_KEY)",
    ]


def test_the_summary_says_what_requests_meet() -> None:
    text = "\n".join(start_screen.summary(info(), "http://h:1", ("a", "b")))
    assert text.startswith("Ready after 3.5 s: http://h:1/v1  (model a, b)")
    for part in (
        "context 8192 tokens, cache 65536 tokens: about 16 concurrent requests of 4096 tokens",
        "device Card (cuda), 4 threads, bfloat16, plan f00d",
        "layout single; collectives.all_reduce: slab",
        "ops: linear/fast, attn/torch",
        "not native: attn attn/torch (reference); why: metainfer doctor",
        "verification: none on record",
    ):
        assert part in text, part
    several = [{"name": "tp2"}]
    bare = EngineInfo("m", 3, 64, 64, 1, (1,), {"plan": {"layouts": several}})
    assert any(
        "tp2; collectives: see the plan" in line for line in start_screen.summary(bare, "u", ("m",))
    )
    fake = EngineInfo("m", 3, 64, 64, 1, (1,), {})
    assert len(start_screen.summary(fake, "u", ("m",))) == 4
