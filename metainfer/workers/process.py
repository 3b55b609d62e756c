"""Child processes that never outlive their parent. Linux; imports without torch.

`spawn` puts a guardian (`guardian.py`) between us and the program: a new session with guardian and
program in one process group, so that a terminal's Ctrl-C reaches only the front process, which
then stops its children in order. If we die, by ``kill -9`` too, the guardian kills the program and
all its descendants. Nothing runs between fork and exec in our own process, so spawning is safe
from any thread and under any number of threads.

Liveness comes from the kernel: `Child.fileno` is a pidfd that turns readable when the child has
ended, for ``select``, ``poll`` or an event loop. No heartbeat thread can stall or lie.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from metainfer.core.errors import InternalError, UserError
from metainfer.workers import guardian

GRACE_S = 10.0
KILL_S = 5.0
_GUARDIAN = Path(guardian.__file__)


class Child:
    """A running program with its guardian. Closing it ends it; use as a context manager.

    `guardian_pid` is also the process group. `name` is for messages.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], status: int) -> None:
        self.name = name
        self._process = process
        self._status = status
        self._pid: int | None = None
        self._pidfd = os.pidfd_open(process.pid)

    @property
    def guardian_pid(self) -> int:
        return self._process.pid

    @property
    def pid(self) -> int | None:
        """The program's own process id; waits for the guardian to start it (some 20 ms).

        None when the program was never started.
        """
        if self._status >= 0:
            with os.fdopen(self._status, "rb") as pipe:
                self._status = -1
                text = pipe.read().strip()
            self._pid = int(text) if text else None
        return self._pid

    def fileno(self) -> int:
        """A pidfd: readable once the child has ended. Valid until `close`."""
        return self._pidfd

    def poll(self) -> int | None:
        """Exit status (negative: the signal), or None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self.poll() is None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end; None when it still runs after `timeout_s` seconds."""
        if self._pidfd >= 0:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3)
        return self.poll()

    def signal(self, number: int) -> None:
        """Send TERM, INT or HUP to the program, or QUIT to kill it with all descendants."""
        if number not in guardian.FORWARDED and number != signal.SIGQUIT:
            raise ValueError(f"signal {number} is not forwarded")
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self, grace_s: float = GRACE_S) -> int:
        """End it: TERM, `grace_s` seconds to clean up, then KILL for it and all descendants.

        Returns its exit status. Idempotent; nothing of it is left when this returns.

        Raises:
            InternalError: the kernel does not end it (a process stuck in a driver call).
        """
        code = self.poll()
        if code is None and grace_s > 0:
            self.signal(signal.SIGTERM)
            code = self.wait(grace_s)
        if code is None:
            self.signal(signal.SIGQUIT)
            code = self.wait(KILL_S)
        if code is None:  # the guardian itself is stopped or stuck
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.guardian_pid, signal.SIGKILL)
            code = self.wait(KILL_S)
        self.close_descriptors(ended=code is not None)
        if code is None:
            raise InternalError(f"{self.name} (process {self.pid}) does not die after SIGKILL")
        return code

    def close_descriptors(self, *, ended: bool) -> None:
        """Give back the pidfd and the status pipe of a child that has ended."""
        if not ended:
            return
        _ = self.pid
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def describe_exit(self) -> str:
        """How it ended, for a message: ``exited with status 3``, ``was killed by SIGSEGV``."""
        code = self.poll()
        if code is None:
            return f"{self.name} is running"
        if code == guardian.EXIT_NOT_STARTED and self.pid is not None:
            return f"{self.name} could not be started, or exited with status {code}"
        if code >= 0:
            return f"{self.name} exited with status {code}"
        try:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"{self.name} was killed by signal {-code}"

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An error on its way out must not be kept waiting by a child that ignores TERM.
        self.terminate(GRACE_S if kind is None else 0.0)


def spawn(
    command: Sequence[str],
    *,
    name: str = "",
    environ: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stdin: bytes = b"",
    log: Path | None = None,
    folder: Path | None = None,
) -> Child:
    """Start `command` so that it cannot outlive this process.

    Standard input holds `stdin`, then ends; secrets belong there and not into the arguments, which
    every user of the machine can read. Output and errors both go to our standard error, because
    standard output belongs to the one document that a verb prints; or to the end of the file `log`.
    `pass_fds` keep their numbers in the program; close our copies after the call.

    Raises:
        UserError: this is not Linux 5.3 or newer, or the log file cannot be written.
    """
    if not sys.platform.startswith("linux"):
        raise UserError(
            "child processes are supervised by Linux calls that this system lacks.",
            "Run on Linux.",
            code="linux_only",
        )
    reading, writing = os.pipe()
    with contextlib.ExitStack() as held:
        held.callback(os.close, writing)
        failed = held.enter_context(contextlib.ExitStack())
        failed.callback(os.close, reading)
        out = 2 if log is None else _open_log(log)
        if log is not None:
            held.callback(os.close, out)
        given = _filled(stdin)
        held.callback(os.close, given)
        process = subprocess.Popen(
            _guarded(command, writing, pass_fds),
            stdin=given,
            stdout=out,
            stderr=out,
            env=None if environ is None else dict(environ),
            pass_fds=(writing, *pass_fds),
            cwd=folder,
        )
        try:
            child = Child(name or Path(command[0]).name, process, reading)
        except OSError as error:
            process.kill()
            process.wait()
            raise UserError(
                f"this kernel gives no descriptor of a process: {error.strerror}.",
                "Run on Linux 5.3 or newer.",
                code="no_pidfd",
            ) from error
        failed.pop_all()  # the child owns `reading` from here
    return child


def spawn_python(
    module: str,
    arguments: Sequence[str] = (),
    *,
    name: str = "",
    environ: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    stdin: bytes = b"",
    log: Path | None = None,
) -> Child:
    """`spawn` of ``python -m module arguments`` with this interpreter."""
    command = [sys.executable, "-m", module, *arguments]
    return spawn(
        command,
        name=name or module,
        environ=environ,
        pass_fds=pass_fds,
        stdin=stdin,
        log=log,
    )


def terminate_all(children: Sequence[Child], grace_s: float = GRACE_S) -> list[int]:
    """End several children under one common grace period; statuses in the given order."""
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        child.wait(deadline - time.monotonic())
    return [child.terminate(0.0) for child in children]


def _guarded(command: Sequence[str], status: int, passed: Sequence[int]) -> list[str]:
    # -I -S: no user site, no path hooks: the guardian must start fast and the same everywhere.
    numbers = [str(number) for number in (os.getpid(), status, *passed)]
    return [sys.executable, "-I", "-S", str(_GUARDIAN), *numbers, "--", *command]


def _filled(content: bytes) -> int:
    """A descriptor that reads as `content`; held in memory, so any length fits and no one waits."""
    descriptor = os.memfd_create("stdin")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _open_log(log: Path) -> int:
    try:
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(
            f"the log file {log} cannot be written: {error.strerror}.",
            "Choose another folder.",
            code="bad_log",
        ) from error
