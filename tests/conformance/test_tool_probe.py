"""canitoolcall's live probe against our server, and `required` beside it.

Behind the server a fake engine answers as a capable model would; where a call is demanded of it
it would rather talk, and is held to the grammar by the real masks.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))

from fake_server import Running, fake_server
from fake_texts import write_script
from transcripts import block, invoke, tool_call

probing = pytest.importorskip("canitoolcall.probe", reason="pip install canitoolcall")

PARIS, TOKYO = {"city": "Paris"}, {"city": "Tokyo", "unit": "c"}
EVENT = {
    "title": "Design review",
    "start": "2026-10-01T15:00:00Z",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
#: what a prompt holds -> what a capable model answers: text, or calls
CUES: dict[str, str | list[tuple[str, dict[str, Any]]]] = {
    "temp_c": "It is 18 degrees and clear in Paris.",
    "17 + 25": "42",
    "Lisbon": "Lisbon lies on seven hills.",
    "Tokyo": [("get_weather", PARIS), ("get_weather", TOKYO)],
    "Design review": [("create_event", EVENT)],
    "Zürich": [("save_note", NOTE)],
    "on the server": [("get_server_time", {})],
    "record_answer": [("record_answer", {"answer": "9.9"})],
    "Paris right now": [("get_weather", PARIS)],
}


def said(family: str, answer: str | list[tuple[str, dict[str, Any]]]) -> str:
    if isinstance(answer, str):
        return answer
    if family == "qwen":
        return "\n".join(tool_call(*made) for made in answer)
    return block(*(invoke(*made) for made in answer))


@pytest.fixture(scope="module", params=["qwen", "deepseek"])
def model(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Running]:
    if request.param == "deepseek":
        pytest.importorskip("deepseek_recipe", reason="tools need pip install deepseek-recipe")
    thought = "<think>Let me see.</think>" if request.param == "qwen" else "Let me see.</think>"
    replies = {cue: thought + said(request.param, answer) for cue, answer in CUES.items()}
    path = tmp_path_factory.mktemp("s") / "script.json"
    script = write_script(path, request.param, replies, {cue: cue for cue in CUES})
    engine = ["--script", str(script), "--held", request.param]
    with fake_server(["--text", request.param], engine) as running:
        yield running


def demanding(choice: Any, tools: slice) -> Any:
    """The probe's case of a named function, as another choice says it."""
    forced = next(case for case in probing.BUILTIN_SCENARIOS if case.id == "forced-tool-choice")
    return dataclasses.replace(
        forced, id=f"{choice} of {tools}", tools=forced.tools[tools], tool_choice=choice
    )


def test_the_probe(model: Running) -> None:
    """llama-server failed where a call is required; a model that would not call must call here."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    cases = [
        *probing.BUILTIN_SCENARIOS,
        demanding("required", slice(1)),
        demanding(allowed, slice(2)),
    ]
    report = probing.probe(f"{model.url}/v1", "fake", scenarios=cases, timeout_s=120.0)
    assert report.summary()["pass"] == 3 * len(cases), report.render_text()
    assert not any(outcome.warnings for outcome in report.outcomes), report.render_text()
