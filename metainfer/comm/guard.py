"""One thread per rank that watches its peers, so that a wait for the dead ends in milliseconds.

It sleeps on the peers' pidfds: the kernel says that a peer has ended, however it did. Ten times a
second it also writes this rank's heartbeat, which is read only to say of a peer that never answers
whether its process still runs or is stopped. A peer's end sets this rank's abort word, which every
wait looks at; a peer that left in order set its heartbeat to `CLOSED` first, and whoever waits for
it sees that itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping

BEAT_S = 0.1


class Guard:
    """Watches `pids` (peer -> process id) until `close`. `beat(now_ns)` writes the heartbeat,
    `closed(peer)` says whether a peer left in order, `died(peer)` is told when one did not."""

    def __init__(
        self,
        pids: Mapping[int, int],
        beat: Callable[[int], None],
        closed: Callable[[int], bool],
        died: Callable[[int], None],
    ) -> None:
        self._beat, self._closed, self._died = beat, closed, died
        self._peers: dict[int, int] = {}  # descriptor -> peer
        self._wake, self._woken = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        for peer, pid in pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended(peer)
                continue
            self._peers[descriptor] = peer
            self._poll.register(descriptor, select.POLLIN)
        beat(time.monotonic_ns())
        self._thread = threading.Thread(target=self._run, name="comm-guard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll(BEAT_S * 1e3):
                if descriptor == self._wake:
                    return
                self._poll.unregister(descriptor)
                self._ended(self._peers[descriptor])
            self._beat(time.monotonic_ns())

    def _ended(self, peer: int) -> None:
        if not self._closed(peer):
            self._died(peer)

    def close(self) -> None:
        """Stop watching; the slabs may be unmapped afterwards."""
        if self._woken < 0:
            return
        os.write(self._woken, b"x")
        self._thread.join()
        for descriptor in (*self._peers, self._wake, self._woken):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._woken = -1
