"""The data test between GPUs: what it proves, and children that hang, crash or lie (B-15, B-18)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_driver import FakeCuda

from metainfer.doctor import peer_child
from metainfer.doctor.peer_child import PTX, Driver, DriverError, run
from metainfer.doctor.peer_test import PeerProof, prove_peers, tasks


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_child, "WORDS", 5003)


def outcomes(cuda: FakeCuda) -> dict[tuple[int, int, str], tuple[str, str]]:
    lines = [line for line in run(tasks(2), lambda: Driver(cuda)) if line["verdict"] != "begin"]
    return {
        (line["source"], line["target"], line["kind"]): (line["verdict"], line["detail"])  # type: ignore[misc]
        for line in lines
    }


def test_b15_a_right_transfer_is_proven_both_ways() -> None:
    cuda = FakeCuda()
    found = outcomes(cuda)
    assert set(found) == {(i, 1 - i, kind) for i in (0, 1) for kind in ("write", "read", "copy")}
    assert set(found.values()) == {("right", "20,012 bytes equal")}
    assert cuda.memory == {} and cuda.freed == 12


@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        ("corrupt", "wrong", "1 of 5,003 words differ, the first at byte 4,096"),
        ("nothing", "wrong", "words differ, the first at byte 0"),
        ("refuse", "refused", "cuCtxEnablePeerAccess failed with CUDA error 217"),
        ("error", "failed", "CUDA error 700"),
    ],
)
def test_b15_a_fault_is_told_on_its_pair_only(fault: str, verdict: str, words: str) -> None:
    cuda = FakeCuda(faults={(0, 1): fault})
    found = outcomes(cuda)
    for (source, _, _), (seen, detail) in found.items():
        if source == 0:
            assert seen == verdict and words in detail
        else:
            assert seen == "right"
    assert cuda.memory == {}


def test_a_driver_that_does_not_open_fails_every_test() -> None:
    def broken() -> Driver:
        raise DriverError("cuInit failed with CUDA error 999")

    lines = [line for line in run(tasks(2), broken) if line["verdict"] != "begin"]
    assert len(lines) == 6 and all("cuInit" in str(line["detail"]) for line in lines)


def test_the_kernel_assembles_for_every_card_that_we_name(tmp_path: Path) -> None:
    nvidia = pytest.importorskip("triton.backends.nvidia")
    tool = Path(nvidia.__file__).parent / "bin" / "ptxas-blackwell"
    source = tmp_path / "move.ptx"
    source.write_bytes(PTX.rstrip(b"\0"))
    for target in ("sm_80", "sm_89", "sm_90", "sm_120"):
        done = subprocess.run(
            [tool, f"-arch={target}", str(source), "-o", str(tmp_path / "out")],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


# the watchdog


def child(body: str) -> list[str]:
    """A child that gets the tasks as `left`."""
    head = "import json, os, sys, time\nleft = json.loads(sys.argv[1])\n"
    helper = (
        "def say(task, verdict, detail='d'):\n"
        "    print(json.dumps(dict(zip(('source','target','kind'), task), verdict=verdict,"
        " detail=detail)), flush=True)\n"
    )
    return [sys.executable, "-c", head + helper + body]


GOOD = "for t in left:\n    say(t, 'begin')\n    say(t, 'right')\n"


def verdicts(body: str, step: float = 60.0, total: float = 600.0) -> list[tuple[str, str]]:
    found = prove_peers(2, child(body), step, total)
    assert [(p.source, p.target, p.kind) for p in found] == tasks(2)
    return [(p.verdict, p.detail) for p in found]


def test_outcomes_come_through() -> None:
    assert verdicts(GOOD) == [("right", "d")] * 6
    odd = "for t in left:\n    say(t, 'begin')\n    say(t, 'wrong' if t[0] else 'refused')\n"
    assert [v for v, _ in verdicts(odd)] == ["refused"] * 3 + ["wrong"] * 3


def test_b18_a_child_that_hangs_is_killed_and_the_rest_goes_on(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = (
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
        "if len(left) == 6:\n    say(left[0], 'begin'); time.sleep(600)\n" + GOOD
    )
    for step in (1.0, 10.0, 60.0):  # in which a busy machine does start the others
        found = verdicts(body, step=step)
        assert found[0] == ("stuck", f"no answer within {step:.0f} s")
        if found[1][0] == "right":
            break
    assert [verdict for verdict, _ in found[1:]] == ["right"] * 5
    for pid in pids.read_text().split():
        assert not _alive(int(pid))


def test_b18_what_the_child_started_dies_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    body = (
        "import subprocess\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(p.pid))\n"
        "time.sleep(600)\n"
    )
    for step in (2.0, 10.0, 60.0):  # in which a busy machine does start the child's child
        assert verdicts(body, step=step, total=step + 0.5)[0][0] == "stuck"
        if note.exists() and note.read_text():
            break
    ends = time.monotonic() + 120
    while _alive(int(note.read_text())) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not _alive(int(note.read_text()))


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os._exit(3)\n", "status 3"),
        ("os.kill(os.getpid(), 11)\n", "status -11"),
        ("print('hello'); sys.stdout.flush(); time.sleep(600)\n", "printed b'hello'"),
        ("print('[1]', flush=True); time.sleep(600)\n", "printed b'[1]'"),
        ("say((9, 9, 'read'), 'right'); time.sleep(600)\n", "printed"),
        ("say(left[0], 'splendid'); time.sleep(600)\n", "splendid"),
        (
            "sys.stdout.write('x' * 3_000_000); sys.stdout.flush(); time.sleep(600)\n",
            "printed b'xxx",
        ),
        ("print(); time.sleep(600)\n", "printed"),
    ],
)
def test_b18_a_child_that_crashes_or_lies_fails_that_test_only(body: str, words: str) -> None:
    found = verdicts(f"if len(left) == 6:\n    {body}" + GOOD)
    assert found[0][0] == "failed" and words in found[0][1]
    assert [verdict for verdict, _ in found[1:]] == ["right"] * 5


def test_b18_time_is_bounded_as_a_whole() -> None:
    found = verdicts("time.sleep(600)\n", step=1.0, total=2.0)
    assert found[-1][0] == "failed" and "not tested" in found[-1][1]


def test_the_real_child_without_a_driver_fails_and_says_why() -> None:
    if os.path.exists("/usr/lib/x86_64-linux-gnu/libcuda.so.1"):
        pytest.skip("there is a driver here")
    found = prove_peers(2)
    assert {proof.verdict for proof in found} == {"failed"}
    assert all("libcuda" in proof.detail for proof in found)


def test_a_proof_is_data() -> None:
    proof = PeerProof(0, 1, "read", "right", "x")
    assert json.dumps([proof.source, proof.verdict]) == '[0, "right"]'
