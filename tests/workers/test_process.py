"""No orphan, ever: whatever dies, and whenever, nothing that was started is left."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import FAMILY, eventually, marked

from metainfer.core.errors import UserError
from metainfer.workers import guardian
from metainfer.workers.process import Child, spawn, spawn_python, terminate_all

SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def mark() -> Iterator[str]:
    """A word for command lines; whatever a failing test leaves behind is killed."""
    word = f"mark-{uuid.uuid4().hex}"
    yield word
    for pid in marked(word):
        os.kill(pid, signal.SIGKILL)


def python(code: str, *arguments: str, **options: object) -> Child:
    return spawn([sys.executable, "-I", "-S", "-c", code, *arguments], **options)  # type: ignore[arg-type]


def start_family(mark: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", FAMILY, "parent", mark, FAMILY]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def family_is_complete(mark: str) -> bool:
    # parent; guardian and program of child and nested; 2 x (two sleepers and a re-parented one)
    return len(marked(mark)) >= 1 + 4 + 6


def test_everything_dies_with_a_killed_parent(mark: str) -> None:
    parent = start_family(mark)
    assert eventually(lambda: family_is_complete(mark))
    parent.kill()
    parent.wait()
    assert eventually(lambda: not marked(mark)), marked(mark)


def test_everything_dies_when_the_parent_is_killed_at_a_random_moment(mark: str) -> None:
    rng = random.Random("killed at a random moment")
    for _ in range(10):
        parent = start_family(mark)
        time.sleep(rng.uniform(0.02, 0.4))
        parent.kill()
        parent.wait()
        assert eventually(lambda: not marked(mark)), marked(mark)


def test_everything_dies_when_the_parent_just_ends(mark: str) -> None:
    code = FAMILY.replace("time.sleep(600)\n", "time.sleep(1)\n")
    command = [sys.executable, "-c", code, "parent", mark, FAMILY]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    assert eventually(lambda: not marked(mark)), marked(mark)


def test_descendants_die_when_the_program_crashes(mark: str) -> None:
    code = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-I", "-S", "-c", {SLEEP!r}, {mark!r}], start_new_session=True)
os.abort()
"""
    child = python(code)
    assert child.wait(120) == -signal.SIGABRT
    assert child.describe_exit() == f"{child.name} was killed by SIGABRT"
    assert not marked(mark)  # at once: the guardian ends only when nothing is left


def test_a_killed_guardian_takes_its_program_along(mark: str) -> None:
    with python(SLEEP, mark) as child:
        assert child.pid is not None
        os.kill(child.guardian_pid, signal.SIGKILL)
        assert eventually(lambda: not marked(mark))


def test_a_guardian_whose_parent_is_already_dead_starts_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    proof = tmp_path / "started"
    command = [sys.executable, "-I", "-S", guardian.__file__, "999999999", str(writing), "--"]
    done = subprocess.run([*command, "touch", str(proof)], pass_fds=(writing,), check=False)
    os.close(writing)
    assert done.returncode == guardian.EXIT_ORPHANED
    assert os.read(reading, 10) == b""
    os.close(reading)
    assert not proof.exists()


def test_a_child_outlives_the_thread_that_spawned_it() -> None:
    # The kernel reports a parent's death when the spawning *thread* ends.
    children: list[Child] = []

    def start() -> None:
        children.append(python(SLEEP))
        assert children[0].pid is not None  # from here on the guardian listens

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with children[0] as child:
        assert child.wait(0.3) is None
        assert child.alive


@pytest.mark.parametrize("status", [0, 3, 113, 255])
def test_exit_status_is_the_programs(status: int) -> None:
    child = python(f"raise SystemExit({status})")
    assert child.wait(120) == status
    assert child.describe_exit() == f"{child.name} exited with status {status}"
    assert child.terminate() == status


def test_terminate_lets_the_program_clean_up(tmp_path: Path) -> None:
    note, ready = tmp_path / "note", tmp_path / "ready"
    code = f"""
import pathlib, signal, sys, time
def stop(*_):
    time.sleep(0.1)
    pathlib.Path({str(note)!r}).write_text("clean")
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(ready)!r}).touch()
time.sleep(600)
"""
    child = python(code)
    assert eventually(ready.exists)
    assert child.terminate(grace_s=120) == 7
    assert note.read_text() == "clean"
    assert child.terminate() == 7


def test_terminate_kills_a_program_that_ignores_it(mark: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"""
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-I", "-S", "-c", {SLEEP!r}, {mark!r}], start_new_session=True)
pathlib.Path({str(ready)!r}).touch()
time.sleep(600)
"""
    child = python(code, mark)
    assert eventually(ready.exists)
    begin = time.monotonic()
    assert child.terminate(grace_s=0.2) == -signal.SIGKILL
    assert time.monotonic() - begin >= 0.2
    assert not marked(mark)


def test_terminate_works_on_a_stopped_guardian(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child = python(SLEEP, mark)
    assert child.pid is not None
    plain, waits = Child.wait, iter((0.1, 0.3, 120.0))  # for TERM, the guardian's kill, our own
    monkeypatch.setattr(Child, "wait", lambda self, timeout_s: plain(self, next(waits)))
    os.kill(child.guardian_pid, signal.SIGSTOP)
    assert child.terminate() == -signal.SIGKILL
    assert eventually(lambda: not marked(mark))


def test_the_descriptor_is_readable_exactly_after_the_end() -> None:
    reading, writing = os.pipe()
    child = python(f"import os; os.read({reading}, 1)", pass_fds=[reading])
    os.close(reading)
    assert select.select([child], [], [], 0.05)[0] == []
    os.close(writing)
    assert select.select([child], [], [], 120)[0] == [child]
    assert child.poll() == 0
    child.terminate()


def test_an_interrupt_at_the_terminal_does_not_reach_the_program() -> None:
    with python(SLEEP) as child:
        assert child.pid is not None
        assert os.getpgid(child.pid) == os.getpgid(child.guardian_pid) == child.guardian_pid
        assert os.getsid(child.pid) != os.getsid(0)


def test_output_and_errors_go_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    log.write_text("before\n")
    child = python("import sys; print('out'); print('err', file=sys.stderr)", log=log)
    assert child.wait(120) == 0
    first, *rest = log.read_text().splitlines()
    assert first == "before" and sorted(rest) == ["err", "out"]
    child.terminate()


def test_output_does_not_reach_our_standard_output() -> None:
    code = """
import sys
from metainfer.workers.process import spawn
with spawn([sys.executable, "-I", "-S", "-c", "print('noise')"]) as child:
    child.wait(120)
print("{}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n" and done.stderr == "noise\n"


def test_passed_descriptors_arrive_and_end_with_the_program() -> None:
    reading, writing = os.pipe()
    code = f"import os; os.write({writing}, b'hello'); os.close({writing}); " + SLEEP
    with python(code, pass_fds=[writing]) as child:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert pipe.read() == b"hello"  # end of file although guardian and program live
        assert child.alive


def test_the_process_id_is_known_while_the_program_runs() -> None:
    with python(SLEEP) as child:
        assert child.pid is not None and child.pid != child.guardian_pid
        assert child.alive


def test_a_broken_pipe_ends_a_program_as_it_would_in_a_shell(tmp_path: Path) -> None:
    # Python ignores the signal, and exec hands that on; ask the kernel what came through.
    log = tmp_path / "log"
    with spawn(["grep", "SigIgn", "/proc/self/status"], log=log) as child:
        assert child.wait(120) == 0
    ignored = int(log.read_text().split()[1], 16)
    # Only what Python ignores: the C library's own signals come ignored from `make`.
    assert not any(ignored >> (number - 1) & 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))


def test_deaths_are_seen_under_a_parent_that_ignores_them(mark: str) -> None:
    ignoring = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + FAMILY
    command = [sys.executable, "-c", ignoring, "parent", mark, FAMILY]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert eventually(lambda: family_is_complete(mark))
    parent.kill()
    parent.wait()
    assert eventually(lambda: not marked(mark)), marked(mark)


def test_a_program_that_does_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    child = spawn(["/no/such/program"], name="engine")
    assert child.wait(120) == guardian.EXIT_NOT_STARTED
    assert "could not be started" in child.describe_exit()
    assert "cannot start /no/such/program" in capfd.readouterr().err
    child.terminate()


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match="log file"):
        python("pass", log=tmp_path / "none" / "log")
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        python("pass").terminate()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_error_leaves_the_block_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metainfer.workers.process.GRACE_S", 3600.0)
    ready = tmp_path / "ready"
    code = f"""
import pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(ready)!r}).touch()
time.sleep(600)
"""
    with pytest.raises(RuntimeError), python(code) as child:
        assert eventually(ready.exists)
        raise RuntimeError
    assert child.poll() == -signal.SIGKILL


def test_terminate_all_shares_one_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""
    ready = [tmp_path / str(index) for index in range(3)]
    children = [python(code, str(path)) for path in ready]
    assert eventually(lambda: all(path.exists() for path in ready))
    plain, graces = Child.wait, list[float]()

    def wait(self: Child, timeout_s: float) -> int | None:
        if len(graces) < 3:
            graces.append(max(timeout_s, 0.0))
        return plain(self, timeout_s)

    monkeypatch.setattr(Child, "wait", wait)
    assert terminate_all(children, grace_s=0.5) == [-signal.SIGKILL] * 3
    assert sum(graces) < 0.75  # three periods would be 1.5


def test_only_forwarded_signals_are_sent() -> None:
    with python(SLEEP) as child, pytest.raises(ValueError, match="not forwarded"):
        child.signal(signal.SIGUSR1)


def test_spawn_python_runs_a_module(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with spawn_python("platform", ["--help"], log=log) as child:
        assert child.wait(120) == 0
    assert log.read_text().strip()


def test_environment_is_replaced_when_given(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with python(
        "import os; print(os.environ.get('HOME'), os.environ['ONLY'])",
        log=log,
        environ={"ONLY": "this"},
    ) as child:
        assert child.wait(120) == 0
    assert log.read_text() == "None this\n"


@pytest.mark.parametrize("content", [b"", b"{}\n", b"x" * 1_000_000], ids=len)
def test_standard_input_is_what_was_given(content: bytes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys; print(len(sys.stdin.buffer.read()))"
    with python(code, stdin=content, log=log) as child:
        assert child.wait(120) == 0
    assert int(log.read_text()) == len(content)


def test_a_kernel_without_pidfd_is_a_user_error_and_leaves_nothing(
    mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError, match="Function not implemented"):
        python(SLEEP, mark)
    assert len(os.listdir("/proc/self/fd")) == before
    assert eventually(lambda: not marked(mark))
