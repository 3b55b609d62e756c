"""No request holds up the others: what takes long leaves the interpreter to other threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from metainfer.server.bodies import parse_json
from metainfer.text.tokenizer import Tokenizer


def pause_share(work: Callable[[], object]) -> float:
    """The longest pause of another thread while `work` runs, as a share of its time.

    The best of three: a busy machine pauses threads too.
    """
    shares = []
    for _ in range(3):
        over = threading.Event()
        pauses = [0.0]

        def tick(over: threading.Event = over, pauses: list[float] = pauses) -> None:
            last = time.perf_counter()
            while not over.is_set():
                time.sleep(0.0005)
                now = time.perf_counter()
                pauses.append(now - last)
                last = now

        ticker = threading.Thread(target=tick)
        ticker.start()
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        over.set()
        ticker.join()
        shares.append(max(pauses) / seconds)
    return min(shares)


@pytest.mark.parametrize("number", ["1.5", "7"])
def test_a_body_full_of_numbers(number: str) -> None:
    body = ('{"prompt":[' + ",".join([number] * 800_000) + "]}").encode()
    assert pause_share(lambda: parse_json(body)) < 0.5


def test_a_long_text() -> None:
    from metainfer.engine.model_text import byte_text

    tokenizer: Tokenizer = byte_text(300).tokenizer
    text = "hello world " * 40_000
    assert tokenizer.encode(text) == tokenizer.encode("hello world ") * 40_000
    assert pause_share(lambda: tokenizer.encode(text)) < 0.5
