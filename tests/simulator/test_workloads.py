"""What arrives is a function of specification, seed and vocabulary; bad specifications are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import UsageError
from metainfer.simulator.workload import Job, Release, Workload, draw

SPECS = (
    "closed:concurrency=3,requests=7,prompt=5-20,output=2-6",
    "poisson:rate=4,requests=9,prompt=5,output=3",
    "shared:concurrency=2,requests=6,prefix=30,groups=2,prompt=4,output=3",
    "agentic:concurrency=2,turns=3,prompt=40,step=7,output=5,think=0.5",
)


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_seed_draws_the_same(spec: str) -> None:
    once, again = draw(spec, 500, 3), draw(spec, 500, 3)
    assert once == again != draw(spec, 500, 4)
    assert all(job.output >= 1 and job.prompt for job in once.jobs)
    assert all(0 <= token < 500 for job in once.jobs for token in job.prompt)


def test_lengths_and_times_are_those_asked_for() -> None:
    closed = draw(SPECS[0], 500)
    assert len(closed.jobs) == 7 and closed.concurrency == 3
    assert {len(job.prompt) for job in closed.jobs} <= set(range(5, 21))
    times = [job.at_s for job in draw("poisson:rate=10,requests=400,prompt=1,output=1", 500).jobs]
    assert times == sorted(times) and 30 < times[-1] < 50  # type: ignore[type-var, operator]
    heads = {job.prompt[:30] for job in draw(SPECS[2], 500).jobs}
    assert len(heads) == 2


@given(st.integers(1, 5), st.integers(1, 20), st.randoms())
@settings(max_examples=50)
def test_never_more_than_the_places_are_taken(places: int, count: int, order: object) -> None:
    jobs = tuple(Job(prompt=(i + 1,), output=1) for i in range(count))
    release = Release(Workload(spec="", seed=0, jobs=jobs, concurrency=places))
    running: list[int] = []
    seen: list[int] = []
    while True:
        arrived = [index for index, _, _ in release.ready(0.0)]
        seen += arrived
        running += arrived
        assert len(running) <= places
        if not running:
            break
        assert len(running) == min(places, count - len(seen) + len(running))
        order.shuffle(running)  # type: ignore[attr-defined]
        release.ended(running.pop(), (9,), 0.0)
    assert seen == list(range(count))


def test_a_turn_stands_behind_all_before_it() -> None:
    jobs = (
        Job(prompt=(1, 2), output=2, at_s=0.0),
        Job(prompt=(3,), output=1, after=0, think_s=2.0, extends=True),
    )
    release = Release(Workload(spec="", seed=0, jobs=jobs))
    assert release.ready(0.0) == [(0, 0.0, (1, 2))]
    assert release.next_at() is None
    release.ended(0, (7, 8), 5.0)
    assert release.ready(6.9) == [] and release.next_at() == 7.0
    assert release.ready(7.0) == [(1, 7.0, (1, 2, 7, 8, 3))]
    assert Workload(spec="", seed=0, jobs=jobs).longest == 6


def test_clients_think_between_requests() -> None:
    found = draw("closed:concurrency=2,requests=5,prompt=3,output=1,think=4", 500)
    assert [job.after for job in found.jobs] == [None, None, 0, 1, 2] and not found.concurrency
    release = Release(found)
    assert [index for index, _, _ in release.ready(0.0)] == [0, 1]
    release.ended(1, (9,), 2.0)
    assert release.ready(5.9) == [] and release.ready(6.0) == [(3, 6.0, found.jobs[3].prompt)]


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at_s": 0, "prompt": [4, 5], "output_tokens": 2}\n\n'
        '{"at_s": 1.5, "prompt_tokens": 30, "output_tokens": 1}\n'
    )
    found = draw(f"file:{path}", 100)
    assert [(job.at_s, len(job.prompt), job.output) for job in found.jobs] == [
        (0, 2, 2),
        (1.5, 30, 1),
    ]
    assert found.jobs[0].prompt == (4, 5)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no request"),
        ("[]", "no request"),
        ('{"at_s": 0, "output_tokens": 2}', "no request"),
        ('{"at_s": 0, "prompt": [], "output_tokens": 2}', "0 prompt tokens"),
        ('{"at_s": 0, "prompt_tokens": 5, "output_tokens": 0}', "0 of answer"),
        ('{"at_s": -1, "prompt_tokens": 5, "output_tokens": 1}', "times do not fall"),
        ('{"at_s": NaN, "prompt_tokens": 5, "output_tokens": 1}', "times do not fall"),
        ('{"at_s": 0, "prompt": [100], "output_tokens": 1}', "outside the vocabulary"),
        ("", "no request"),
    ],
)
def test_a_bad_file_names_its_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=said):
        draw(f"file:{path}", 100)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("burst:rate=1", "'burst' is not known"),
        ("closed:speed=3", "unknown speed"),
        ("closed:concurrency=0", "at least 1"),
        ("closed:concurrency=2.5", "no whole number"),
        ("closed:prompt=9-3", "no range"),
        ("closed:prompt=x", "neither a length"),
        ("closed:concurrency=2,concurrency=3", "not one KEY=VALUE"),
        ("closed:concurrency", "not one KEY=VALUE"),
        ("poisson:rate=nan", "it must be at least"),
        ("poisson:rate=fast", "no number"),
        ("file:/does/not/exist", "cannot be read"),
    ],
)
def test_a_bad_specification_is_told(spec: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        draw(spec, 100)
