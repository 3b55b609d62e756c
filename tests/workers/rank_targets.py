"""Workers for rank processes: small, without torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from metainfer.core.errors import UserError
from metainfer.workers.wire import RankFacts


class Adder:
    def __init__(self, facts: RankFacts) -> None:
        self.facts = facts
        self.sum = 0
        self.aborted = ""
        if facts.facts.get("fail_at_start") == facts.rank:
            raise ValueError(f"no room on {facts.rank}")
        if facts.facts.get("refuse_at_start") == facts.rank:
            raise UserError("4 B are asked for.", "Free memory.", code="no_memory")
        if facts.facts.get("die_at_start") == facts.rank:
            os.kill(os.getpid(), signal.SIGSEGV)
        if facts.facts.get("hang_at_start") == facts.rank:
            time.sleep(600)

    def who(self) -> list[object]:
        f = self.facts
        return [f.rank, f.world, f.token, f.facts.get("device"), os.environ.get("RANK_MARK")]

    def add(self, amount: int) -> int:
        self.sum += amount
        return self.sum + self.facts.rank

    def echo(self, text: str) -> str:
        return text

    def fail(self, ranks: list[int]) -> None:
        """`ranks` fail in this order, each once the one before has."""
        if self.facts.rank in ranks:
            place = ranks.index(self.facts.rank)
            if place:
                self._after(ranks[place - 1])
            raise ValueError(f"layer 3 is missing on {self.facts.rank}")

    def _after(self, rank: int) -> None:
        """Wait until `rank` has failed."""
        while not Path(self.facts.facts["folder"], f"aborted-{rank}").exists():
            time.sleep(0.01)

    def die(self, rank: int) -> None:
        if self.facts.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)

    def hang(self, rank: int) -> None:
        """One rank never answers; the others fail one after the other, rank 0 first."""
        if self.facts.rank == rank:
            time.sleep(600)
        if self.facts.rank:
            self._after(self.facts.rank - 1)
        raise ValueError("the others go on")

    def hear(self, cause: int) -> None:
        """Everybody fails; all but `cause` say that they only heard of it, and say it earlier."""
        if self.facts.rank == cause:
            time.sleep(0.2)
            raise RuntimeError("the true cause")
        error = RuntimeError(f"rank {cause} gave up")
        error.peer = cause  # type: ignore[attr-defined]
        raise error

    def abort(self, cause: str) -> None:
        folder = self.facts.facts.get("folder")
        if folder:
            Path(folder, f"aborted-{self.facts.rank}").write_text(cause)

    def opaque(self) -> object:
        return object()

    def close(self) -> None:
        folder = self.facts.facts.get("folder")
        if folder:
            Path(folder, f"closed-{self.facts.rank}").write_text("")


def nothing(facts: RankFacts) -> None:
    return None
