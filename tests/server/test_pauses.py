"""No request holds up the others: what takes long leaves the interpreter to other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from metainfer.server.bodies import parse_json
from metainfer.text.tokenizer import Tokenizer


def others_run(work: Callable[[], object]) -> bool:
    """Whether another thread got its turns while `work` ran.

    Measured in the processor time of the working thread: what it spent between two turns of the
    other one, against all it spent. A busy machine may keep the other from its turns, so one
    success in twenty will do; work that holds the interpreter's lock has none.
    """
    clock = time.pthread_getcpuclockid(threading.get_ident())

    def longest_share() -> float:
        over = threading.Event()
        begin = time.clock_gettime(clock)
        turns = [begin]

        def tick() -> None:
            while not over.wait(0.0005):
                turns.append(time.clock_gettime(clock))

        ticker = threading.Thread(target=tick)
        ticker.start()
        work()
        turns.append(time.clock_gettime(clock))
        over.set()
        ticker.join()
        turns.sort()
        longest = max(later - sooner for sooner, later in pairwise(turns))
        return longest / (max(turns) - begin)

    return any(longest_share() < 0.5 for _ in range(20))


@pytest.mark.parametrize("number", ["1.5", "7"])
def test_a_body_full_of_numbers(number: str) -> None:
    body = ('{"prompt":[' + ",".join([number] * 800_000) + "]}").encode()
    assert others_run(lambda: parse_json(body))


def test_a_long_text() -> None:
    from metainfer.engine.model_text import byte_text

    tokenizer: Tokenizer = byte_text(300).tokenizer
    text = "hello world " * 40_000
    assert tokenizer.encode(text) == tokenizer.encode("hello world ") * 40_000
    assert others_run(lambda: tokenizer.encode(text))


def test_work_that_holds_the_lock_is_seen() -> None:
    numbers = [1] * 3_000_000
    assert not others_run(lambda: sum(numbers))
