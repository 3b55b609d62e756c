"""The document, its summary line, its text and the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from sample_machines import healthy, processor, with_software

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.doctor import report, text_report
from metainfer.doctor.finding import blocker, information
from metainfer.kernels.choice import Policy, Selection
from metainfer.kernels.impl import Evidence, Impl, OpRequest
from metainfer.kernels.registry import Registry
from metainfer.kernels.select import select

OPS = ("norm", "attend", "moe", "sample")


def impl(op: str, name: str, seconds: float | None, phases: frozenset[Phase] | None = None) -> Impl:
    return Impl(
        op=op,
        name=name,
        load="x:y",
        provider="reference" if name == "ref" else "torch",
        dtypes=frozenset({"float32"}),
        phases=phases or frozenset({Phase.CHUNK, Phase.DECODE}),
        native_when=(),
        cost=None if seconds is None else lambda context: seconds,
    )


def selection(
    *without: str, costs: Mapping[str, float | None] | None = None, count: int = 1
) -> Selection:
    """All ops at 1 s (fast) and 10 s (ref); `without` removes fast kernels."""
    known = costs or {}
    fast = [impl(op, "fast", known.get(op, 1.0)) for op in OPS]
    slow = [impl(op, "ref", known.get(f"{op}/ref", 10.0)) for op in OPS]
    evidence = {i.id: Evidence.THIS_CARD for i in (*fast, *slow)}
    for op in without:  # there is a fast one, and it is refused here
        evidence[f"{op}/fast"] = Evidence.NONE
    requests = [
        OpRequest(op, op, phase, "float32", {}, count=count if op == "moe" else 1)
        for op in OPS
        for phase in (Phase.CHUNK, Phase.DECODE)
    ]
    policy = Policy(evidence=evidence, allow_fallback=frozenset({"all"}))
    return select(Registry([*fast, *slow]), requests, healthy().facts, policy)


def test_the_document_has_its_five_keys_and_is_json() -> None:
    document = report.document(healthy(), selection())
    assert list(document)[:3] == ["machine", "software", "findings"]
    assert {"machine", "software", "findings", "ops", "summary"} <= set(document)
    again = json.loads(json.dumps(document))
    assert again["ops"][0]["chosen"] == {
        "impl": "norm/fast",
        "quality": "compatible",
        "evidence": "ran on this card",
    }
    keys = {"id", "severity", "where", "what", "remedy", "evidence", "risk"}
    assert set(again["findings"][0]) == keys
    assert again["machine"]["devices"][0]["capability"] == [12, 0]
    assert again["software"]["torch"] == "2.12.0"


@pytest.mark.parametrize(
    ("removed", "line"),
    [
        ((), "8 of 8 operations are on compatible paths"),
        (
            ("moe",),
            # (1 + 1 + 1 + 1) / (1 + 1 + 10 + 1)
            "2 of 8 operations are on reference paths; 6 of 8 operations are on compatible paths; "
            "estimated prefill ×0.31; estimated decode ×0.31",
        ),
        (
            ("attend", "moe", "norm", "sample"),
            "8 of 8 operations are on reference paths; estimated prefill ×0.10; "
            "estimated decode ×0.10",
        ),
    ],
)
def test_b05_every_removed_kernel_is_counted_and_priced(
    removed: tuple[str, ...], line: str
) -> None:
    chosen = selection(*removed)
    assert report.operations_line(chosen.bundle.choices) == line
    summary = report.document(healthy(), chosen)["summary"]
    assert isinstance(summary, str) and summary.startswith(line + "; 0 blockers")


def test_b05_one_pass_lists_them_all_in_a_stable_order() -> None:
    for removed in (("moe",), ("moe", "norm"), ("sample", "norm", "moe")):
        rows = report.document(healthy(), selection(*removed))["ops"]
        assert isinstance(rows, list)
        slow = [row["op"] for row in rows if row["chosen"]["quality"] == "reference"]
        assert slow == [op for op in OPS if op in removed for _ in range(2)]
        assert report.document(healthy(), selection(*removed))["ops"] == rows


def test_b05_calls_per_step_weigh() -> None:
    # One moe call among three others, and sixty of them: (3 + 60) / (3 + 600).
    few, many = selection("moe"), selection("moe", count=60)
    assert "×0.31" in report.operations_line(few.bundle.choices)
    assert "×0.10" in report.operations_line(many.bundle.choices)


@pytest.mark.parametrize("unknown", [{"moe": None, "moe/ref": None}, {"norm": None}])
def test_a_price_comes_from_numbers_or_not_at_all(unknown: dict[str, float | None]) -> None:
    chosen = selection("moe", costs=unknown)
    line = report.operations_line(chosen.bundle.choices)
    if "norm" in unknown:  # norm/ref is then the only one with a cost, and norm itself is unknown
        assert "estimated prefill ×" not in line
    assert "prefill not estimated" in line


def test_b05_the_exit_status_follows_the_blockers() -> None:
    assert report.exit_status(report.document(healthy(), selection("moe"))) == 0
    assert report.exit_status(report.document(healthy())) == 0
    assert report.exit_status(report.document(with_software(healthy(), torch=None))) == 1
    stop = [blocker("x", "here", "stop", "go")]
    assert report.exit_status(report.document(healthy(), None, stop)) == 1
    note = [information("x", "here", "so")]
    assert report.exit_status(report.document(healthy(), None, note)) == 0


def test_a_refusal_lists_every_reason_as_a_blocker() -> None:
    error = RefusedError(
        "no combination of kernels serves this model.",
        "See doctor.",
        reasons=[
            Reason("device", "attend/a: runs on cpu", {"sites": ["attend@chunk", "attend@decode"]}),
            Reason("device", "moe/b: runs on cpu", {"sites": ["moe.up@chunk", "moe.down@chunk"]}),
            Reason("weight-scheme", "a@1 does not pack Q4_0", {"sites": []}),
        ],
        code="no_bundle",
    )
    document = report.document(healthy(), error)
    found = document["findings"]
    assert isinstance(found, list)
    blockers = [f for f in found if f["severity"] == "blocker"]
    assert [(f["where"], f["what"]) for f in blockers] == [
        ("attend", "attend/a: runs on cpu"),
        ("moe.up, moe.down", "moe/b: runs on cpu"),
        ("model", "a@1 does not pack Q4_0"),
    ]
    assert found[:3] == blockers  # worst first
    assert document["ops"] == [] and report.exit_status(document) == 1
    assert "3 blockers" in str(document["summary"])


def test_a_refusal_without_reasons_is_still_a_blocker() -> None:
    error = RefusedError("a context of 9 tokens exceeds the model's 8.", "Less.", code="too_long")
    found = report.document(healthy(), error)["findings"]
    assert isinstance(found, list) and found[0]["id"] == "ops.too_long"


def test_what_serve_would_refuse_here_is_a_blocker_here() -> None:
    """A family that is planned only has kernels for every op that is asked for: that alone must
    not read as health."""
    document = report.doctor(Intent(model="random:tiny-glm-5.3", platform="cpu", context=64))
    found: Any = document["findings"]
    blockers = [each for each in found if each["severity"] == "blocker"]
    assert {each["id"] for each in blockers} == {"ops.not-built"} and len(blockers) == 4
    assert document["ops"] and report.exit_status(document) == 1
    served = report.doctor(Intent(model="random:tiny-llama", platform="cpu", context=64))
    assert report.exit_status(served) == 0


def test_the_text_says_everything_that_the_document_says() -> None:
    document = report.document(with_software(healthy(), torch="2.12.0+cpu"), selection("moe"))
    text = " ".join(text_report.text(document).split())
    assert "RTX 6000D, capability 12.0, 156 multiprocessors, 84.0 GiB" in text
    found = document["findings"]
    assert isinstance(found, list)
    for finding in found:
        for part in (finding[key] for key in ("where", "what", "remedy", "evidence")):
            assert " ".join(part.split()) in text
    assert "moe chunk, decode moe/ref reference" in text
    assert "not fast: evidence is 'none', auto needs 'ran on another architecture'" in text
    assert "×10.00" in text and str(document["summary"]) in text
    assert "\x1b" not in text_report.text(document)


def test_the_text_reads_markup_as_text() -> None:
    note = [information("x", "[bold]", "see [link] and /path/[never]")]
    text = text_report.text(report.document(processor(), None, note))
    assert "[bold]" in text and "see [link] and /path/[never]" in text


def test_unknown_is_said_in_the_text() -> None:
    bare = report.document(processor(units=None, memory_bytes=None))
    assert "unknown number of cores, memory unknown" in text_report.text(bare)


def test_an_unknown_machine_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="8x-4090"):
        report.doctor(machine="8x-4091")


def test_doctor_examines_this_machine_without_torch() -> None:
    code = """
import json, sys
from metainfer.doctor import report, text_report
document = report.doctor()
shown = text_report.text(document)
print(json.dumps([document["machine"]["platform"], "torch" in sys.modules, shown]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    platform, torch_loaded, text = json.loads(done.stdout)
    assert platform in ("cpu", "cuda") and torch_loaded is False and text
