"""The small process between a parent and its child: it outlives neither. Standard library only.

Run as ``python -I -S guardian.py PARENT_PID STATUS_FD [PASSED_FD ...] -- PROGRAM ARG ...``. It is
single-threaded, starts the program and waits, with four duties:

* the parent dies, in whatever way: kill the program and every descendant at once;
* the program ends: kill what it left behind, then end in the same way (status or signal);
* TERM, INT, HUP: hand them to the program, which may clean up;
* QUIT: kill everything now.

How "no orphan, ever" is reached. The guardian asks the kernel for a signal on the parent's death,
then compares its parent's id with the expected one, which closes the window in which the parent
died before the request. The kernel sends that signal also when only the *thread* that spawned us
ends, so the signal is a hint and the parent's id decides. The program asks for SIGKILL on the
guardian's death. The guardian is a child subreaper: descendants whose parents die, even those in
sessions of their own, become its children, and it kills children until none is left. What remains
open: someone kills the guardian itself with SIGKILL; the program then dies by its own death signal,
and descendants that were started without a guardian are left. A guardian inside the program (a
nested spawn) sees its parent die and clears its own part, so chains of spawns hold even then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PARENT_DIED = signal.SIGUSR1
FORWARDED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
WATCHED = FORWARDED | {signal.SIGCHLD, signal.SIGQUIT, PARENT_DIED}
EXIT_ORPHANED = 113  # the parent was dead before the program started
EXIT_NOT_STARTED = 127


def prctl(option: int, value: int) -> None:
    """Set a process attribute; Linux only.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(arguments: list[str]) -> int:
    """Guard one program; returns its exit status, or dies of the signal that it died of."""
    split = arguments.index("--")
    parent, status_fd, *passed = (int(text) for text in arguments[:split])
    command = arguments[split + 1 :]
    os.setsid()  # one group for guardian and program: a last-resort kill of the group hits both
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    for number in WATCHED:  # an ignored CHLD, inherited, would hide every death from us
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, PARENT_DIED)
    if os.getppid() != parent:
        return EXIT_ORPHANED
    os.set_inheritable(status_fd, False)
    child = _start(command, passed)
    for descriptor in passed:
        os.close(descriptor)  # or the parent would never see the program's end of a pipe close
    os.write(status_fd, f"{child}\n".encode())
    os.close(status_fd)
    code = _watch(child, parent)
    kill_children()
    if code < 0:
        _die_of(-code)
    return code


def _start(command: list[str], passed: list[int]) -> int:
    guardian = os.getpid()
    child = os.fork()  # safe: this process has one thread
    if child:
        return child
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(EXIT_ORPHANED)
        for descriptor in passed:
            os.set_inheritable(descriptor, True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec would pass it on
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(EXIT_NOT_STARTED)


def _watch(child: int, parent: int) -> int:
    """Wait for the program; returns its status, negative for a signal."""
    while True:
        number = signal.sigwait(WATCHED)
        code = _reap(child)
        if code is not None:
            return code
        if os.getppid() != parent or number == signal.SIGQUIT:
            _kill(child, signal.SIGKILL)
        elif number in FORWARDED:
            _kill(child, number)


def _reap(child: int) -> int | None:
    """Collect every ended child; the program's status if it was among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
    return code


def kill_children() -> None:
    """Kill this process's children until there is none; orphans of the killed become children."""
    while True:
        for pid in _children():
            _kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Direct children, from the kernel's list, else by asking every process for its parent."""
    try:
        own = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        return [int(word) for word in own.split()]
    except OSError:
        pass
    me, found = os.getpid(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = (folder / "stat").read_text()
            if int(stat.rpartition(")")[2].split()[1]) == me:
                found.append(int(folder.name))
    return found


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _die_of(number: int) -> None:
    """End by the same signal, without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
