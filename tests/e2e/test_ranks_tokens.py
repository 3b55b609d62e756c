"""`benchmarks/ranks_tokens.py` on a host: it says what is the same, and notices what is not.

Ranks are threads; sizes are those of its ``--platform cpu``, fewer layouts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from served import eventually
from thread_ranks import ranks_as_threads

from metainfer.models.common.dealt import Dealt

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import ranks_tokens as script
import sections

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
TINY = {**script.SMALL, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
CPU = replace(script.SIZES["cpu"], prompts=(30, 41), tokens=5, large=TINY)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setitem(script.SIZES, "cpu", CPU)
    monkeypatch.setattr(script, "SMALL", TINY)
    monkeypatch.setattr(script, "speed", lambda *_: {})
    monkeypatch.setattr(script, "DEALT", ("tp2cs2",) * 2)
    monkeypatch.setattr(script, "ADAPTED", ("cp2/dp2",))
    monkeypatch.setattr(script, "DRAFTED", ("cp2/dp2ep2",))
    with ranks_as_threads():
        yield monkeypatch


def ran(section: str, folder: Path) -> dict[str, Any]:
    args = argparse.Namespace(platform="cpu", out=folder, section=section)
    parts = script.Parts(folder, section)
    getattr(script, section)(args, parts, folder / "files")
    return parts.report


def test_sections_compare_ranks_with_one_process(few: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {name: ran(name, tmp_path) for name in ("adapters", "drafts")}
    assert not sections.wrong_in(found)
    for name, layout, answers in (("adapters", "cp2/dp2", 6), ("drafts", "cp2/dp2ep2", 2)):
        said = found[name][layout]
        assert said["same"] == said["answers"] == answers
        assert 0 <= said["worst_nats"] < 1e-4 and said["moved_bytes"][name] > 0
    assert found["adapters"]["cp2/dp2"]["prompts_whose_answers_differ"] == 2
    one, two = found["drafts"]["single"], found["drafts"]["cp2/dp2ep2"]
    assert 0 < one["accepted"] < one["drafted"] and two["accepted"] > 0
    lines = script.table(found)
    assert any("drafts, cp2/dp2ep2: 2 of 2 the same" in line for line in lines)


def test_parts_that_count_alike_are_noticed(few: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = ran("dealt", tmp_path)
    assert not sections.wrong_in(right) and right["tp2cs2, float32"]["moved_bytes"]["logs"] > 0
    logs = Dealt.logs
    few.setattr(Dealt, "logs", lambda self, part: torch.zeros_like(logs(self, part)))
    wrong = sections.wrong_in(ran("dealt", tmp_path)["tp2cs2, float32"])
    assert any("nats apart" in text for text in wrong)


def test_adapters_that_do_nothing_are_noticed(few: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few.setitem(script.SIZES, "cpu", replace(CPU, size=0.0))
    wrong = sections.wrong_in(ran("adapters", tmp_path))
    assert wrong == ["adapters give one prompt the same answer"] * 2


def test_where_answers_part_is_said() -> None:
    one = script.Answer([5, 6, 7], [-1.0, -2.0, -3.0])
    for tokens, logs, wrong in (
        ([5, 6, 7], [-1.0, -2.0, -3.0], []),
        ([5, 6, 7], [-1.0, -2.125, -3.0], ["scores are 1.2e-01 nats apart"]),
        ([5, 9, 7], [-1.0, -7.0, -8.0], ["answer 0 parts at token 1"]),
        ([5, 6], [-1.0, -2.0], ["answer 0 parts at token 2"]),
        ([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0], ["answer 0 parts at token 3"]),
    ):
        said = script.agreement([script.Answer(tokens, logs)], [one])
        assert said["wrong"] == wrong and said["same"] == ("parts" not in str(wrong))


def test_without_answers_of_one_card_nobody_is_judged(
    few: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next layout is no reference for those after it, nor for itself."""
    started = script.started

    def fails(args: Any, model: Any, **wish: Any) -> Any:
        if wish["parallel"] == "single" and wish.get("draft", "off") == "off":
            raise RuntimeError("no card")
        return started(args, model, **wish)

    few.setattr(script, "started", fails)
    for section in ("dealt", "drafts"):
        first, *others = (said for said in ran(section, tmp_path).values() if "part_s" in said)
        assert "no card" in first["wrong"][0] and others
        assert all("unjudged" in said and "same" not in said for said in others)
        assert any("not judged" in line for line in script.table({section: {"a": others[0]}}))


SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import sections
sections.keep(Path({out!r}), 3, {{"begun": sys.argv[-1], "told": os.environ["TOLD"]}})
if sys.argv[-1] == "hangs":
    time.sleep(600)
sys.exit("a word" if sys.argv[-1] == "fails" else 0)
"""


def begun_in(part: Path) -> type[subprocess.Popen[bytes]]:
    class Begun(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            eventually(part.exists)
            return super().wait(timeout)

    return Begun


@pytest.mark.parametrize("name", ["ends", "fails", "hangs"])
def test_what_a_section_has_is_kept(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(benchmarks=BENCHMARKS, out=str(tmp_path)))
    monkeypatch.setattr(sys, "argv", [str(script)])
    sections.keep(tmp_path, 3, {"begun": "another run"})
    limit = 1.0 if name == "hangs" else 300.0
    if name == "hangs":  # it is not ended before it has begun
        monkeypatch.setattr(sections.subprocess, "Popen", begun_in(tmp_path / ".3.json"))
    found = sections.child(name, tmp_path, 3, limit, {"TOLD": "so"})
    assert found["begun"] == name and found["told"] == "so"
    failed = {"ends": [], "fails": ["status 1"], "hangs": ["no end after 1 s"]}[name]
    assert sections.wrong_in(found) == failed
    assert ("a word" in found.get("said", "")) == (name == "fails")


def test_what_a_run_before_had_is_not_this_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(sys, "argv", [str(script)])
    sections.keep(tmp_path, 3, {"begun": "before"})
    found = sections.child("a", tmp_path, 3, 300.0)
    assert "begun" not in found and found["failed"] == "status 3"


def test_who_is_ended_while_it_writes_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(self: Path, text: str) -> None:
        with self.open("w") as out:
            out.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    sections.keep(tmp_path, 3, {"rows": [1, 2]})
    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        sections.keep(tmp_path, 3, {"rows": [1, 2, 3]})
    assert json.loads((tmp_path / ".3.json").read_text()) == {"rows": [1, 2]}


def test_every_wrong_word_is_found() -> None:
    found = {"a": {"wrong": ["x"]}, "b": [{"c": {"failed": "y", "wrong": ["z"]}}, 1], "wrong": []}
    assert sections.wrong_in(found) == ["x", "y", "z"] and sections.wrong_in(None) == []
