"""Memory that the processes of a group share, and that nobody can leave behind.

Rank 0 makes it complete, without a name in any file system, and hands its descriptor to whoever of
its user asks at a socket. The socket's name follows from the group's token, in Linux's abstract
namespace: it goes with the socket, as the memory does with the last process. So there is nothing to
sweep after a kill, and no limit but the memory that the processes may have; ``/dev/shm``, which
containers give 64 MiB by default, is not used (ADR 0056).

What others on the host can do: see the socket's name in ``/proc/net/unix``, connect and get
nothing, or take a name before rank 0 does, where they know the token.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import socket
import struct
import time
from collections.abc import Callable

from metainfer.core.errors import UserError
from metainfer.platform.probe_host import memory_room

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOEXEC_SEAL = (
    0x8  # MFD_NOEXEC_SEAL: asked for where vm.memfd_noexec is 2, unknown before Linux 6.3
)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_QUEUE = 128
_AGAIN_S = 0.002
_LOOK_S = 0.05
_CREDENTIALS = struct.Struct("iII")  # pid, user, group

_SHORT = (
    "Free memory of the host, raise the container's limit, or ask for shorter steps "
    "(--chunk-tokens)."
)
_FORBIDDEN = (
    "See what forbids Unix sockets or memory without a name here: a seccomp profile, a sandbox or "
    "a security module (AppArmor, SELinux)."
)
_REMEDIES: dict[int | None, str] = {
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the host's limit of open files (sysctl fs.file-max).",
    errno.EPERM: _FORBIDDEN,
    errno.EACCES: _FORBIDDEN,
}


class Segment:
    """`size` bytes at `address`, shared by all that asked for `token`."""

    def __init__(
        self, descriptor: int, size: int, desk: tuple[socket.socket, int] | None = None
    ) -> None:
        self._map = mmap.mmap(descriptor, size)
        self._held = ctypes.c_char.from_buffer(self._map)
        self._desk = desk  # of rank 0: where others ask, and what they get
        self.address = ctypes.addressof(self._held)
        self.size = size

    @classmethod
    def create(
        cls, token: str, size: int, fill: Callable[[int], None] = lambda address: None
    ) -> Segment:
        """Make the memory; `fill(address)` puts it in order before anyone can ask for it. Others
        get it while this rank calls `hand_out`, until `withdraw`.

        Raises:
            UserError: there is not so much memory, no descriptor or no leave for it, or the token
                is in use.
        """
        name = socket_name(token)
        short = shortage(size, *memory_room())
        if short:
            raise _refused(short)
        with contextlib.ExitStack() as undone:
            try:
                desk = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                desk.bind(name)
                descriptor = _anonymous()
                undone.callback(os.close, descriptor)
                os.posix_fallocate(descriptor, 0, size)  # what is missing is no bus error later
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
                segment = cls(descriptor, size, (desk, descriptor))
                undone.pop_all()
                undone.callback(segment.close)  # and with it the two above
                fill(segment.address)
                desk.setblocking(False)
                desk.listen(_QUEUE)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise UserError(
                        f"another group of ranks meets under the token {token!r}.",
                        "Give every group a token of its own.",
                        code="token_in_use",
                    ) from error
                text = f"{size:,} B of shared memory cannot be had: {error.strerror}."
                raise _refused(text, error.errno) from error
            undone.pop_all()
        return segment

    @classmethod
    def open(cls, token: str, size: int, deadline: float) -> Segment:
        """Wait until `deadline` (monotonic seconds) for the memory to be handed out, and map it.

        Raises:
            UserError: it was not made in time, is another user's, or has another size.
        """
        return Asked(token, deadline).take(size)

    def hand_out(self) -> None:
        """Give the memory to all that have asked by now. Never waits.

        Raises:
            UserError: this process has no descriptor left for one more connection.
        """
        while self._desk is not None:
            desk, descriptor = self._desk
            try:
                asking, _ = desk.accept()
            except BlockingIOError:
                return
            except OSError as error:
                text = f"the ranks' shared memory cannot be handed out: {error.strerror}."
                raise _refused(text, error.errno) from error
            with asking:
                if _user_of(asking) == os.geteuid():
                    with contextlib.suppress(OSError):  # it has hung up
                        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                        socket.send_fds(asking, [b"x"], [descriptor], flags)

    def withdraw(self) -> None:
        """Hand out no more; the memory stays until the last process lets go. Idempotent."""
        if self._desk is not None:
            (desk, descriptor), self._desk = self._desk, None
            desk.close()
            os.close(descriptor)

    def close(self) -> None:
        """Unmap. No address into it may be used afterwards."""
        self.withdraw()
        del self._held
        with contextlib.suppress(BufferError):  # someone still holds a view; it goes with that
            self._map.close()


class Asked:
    """A place in the line for the memory of `token`: the constructor waits for rank 0 to have made
    it, `take` for being handed it. `look` is called again and again meanwhile; what it raises ends
    the wait.

    Raises:
        UserError: neither was done by `deadline` (monotonic seconds), or by another user, or this
            process can have no socket.
    """

    def __init__(
        self, token: str, deadline: float, look: Callable[[], None] = lambda: None
    ) -> None:
        self._name, self._deadline, self._look = socket_name(token), deadline, look
        self._line = self._stand()

    def take(self, size: int) -> Segment:
        """Wait for the memory, which is to have `size` bytes, and map it."""
        while True:
            with self._line as line:
                said, given = self._heard(line)
            if given:
                return _mapped(given[0], size)
            if said:
                text = "no descriptor is left for the ranks' shared memory."
                raise _refused(text, errno.EMFILE)
            self._pause()  # rank 0 went away with all that stood there
            self._line = self._stand()

    def close(self) -> None:
        """Leave the line. Idempotent."""
        self._line.close()

    def _heard(self, line: socket.socket) -> tuple[bytes, list[int]]:
        """What is handed over; nothing where rank 0 went away."""
        while True:
            self._look()
            left = self._deadline - time.monotonic()
            line.settimeout(max(_AGAIN_S, min(left, _LOOK_S)))
            try:
                said, given, *_ = socket.recv_fds(line, 1, 1, socket.MSG_CMSG_CLOEXEC)
            except TimeoutError:
                if left <= _LOOK_S:
                    raise _missing() from None
            except ConnectionResetError:
                return b"", []
            else:
                return said, given

    def _stand(self) -> socket.socket:
        while True:
            with contextlib.ExitStack() as undone:
                try:
                    line = undone.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                    line.setblocking(False)
                    line.connect(self._name)
                    theirs, ours = _user_of(line), os.geteuid()
                except (ConnectionRefusedError, BlockingIOError):  # not made yet, or many ask
                    self._pause()
                    continue
                except OSError as error:
                    text = f"rank 0 cannot be asked for the ranks' memory: {error.strerror}."
                    raise _refused(text, error.errno) from error
                if theirs == ours:
                    undone.pop_all()
                    return line
            raise UserError(
                f"the shared memory of the group is offered by user {theirs}, and its ranks are "
                f"user {ours}'s.",
                "Start all ranks as one user.",
                code="foreign_rank",
            )

    def _pause(self) -> None:
        self._look()
        if time.monotonic() > self._deadline:
            raise _missing()
        time.sleep(_AGAIN_S)


def shortage(size: int, room: int | None, source: str) -> str:
    """What is wrong with taking `size` bytes where `room` can be had, as `source` says; empty where
    nothing is. Asked before, for the kernel gives more than there is and kills later."""
    if room is None or size <= room:
        return ""
    return f"the ranks share {size:,} B of host memory, and {room:,} B can be had ({source})."


def _mapped(descriptor: int, size: int) -> Segment:
    try:
        found = os.fstat(descriptor).st_size
        if found != size:
            raise UserError(
                f"rank 0 made {found} B of shared memory where {size} B were expected.",
                "Start all ranks with the same settings.",
                code="ranks_disagree",
            )
        return Segment(descriptor, size)
    except OSError as error:
        text = f"{size:,} B of shared memory cannot be mapped: {error.strerror}."
        raise _refused(text, error.errno) from error
    finally:
        os.close(descriptor)


def _missing() -> UserError:
    return UserError(
        "rank 0 did not set up the shared memory of the group in time.",
        "See why it did not start.",
        code="rank_missing",
    )


def _anonymous() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("metainfer", flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create("metainfer", flags)


def _user_of(connected: socket.socket) -> int:
    """The user at the other end, by the kernel's word: who connected, or who listens."""
    said = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(said)[1])


def socket_name(token: str) -> str:
    """Where a group meets. Its token cannot be read from it, so nobody knows the next group's."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{token!r} is no token for shared memory")
    return f"\0metainfer-{hashlib.sha256(token.encode()).hexdigest()[:32]}"


def _refused(cause: str, number: int | None = None) -> UserError:
    return UserError(cause, _REMEDIES.get(number, _SHORT), code="no_shared_memory")
