"""The process that tries grammars out: ``python -m metainfer.grammar.check_main LIBRARY FD``.

Over the socket FD comes one JSON line per grammar, [kind, text]; back goes one JSON line, the
library's cause or an empty text. The operating system bounds each compile: a signal ends this
process after `CPU_S` seconds of processor time, a limit on memory at `MEMORY`. Whoever asked then
sees the socket close, and starts another process.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np

from metainfer.core.request import GrammarSpec
from metainfer.grammar.backend import Backend, GrammarError, Matcher, Vocabulary
from metainfer.grammar.backends import opened

CPU_S = 0.5
MASK_S = 0.02
STEPS = 24
MARKS, MOST_MARKS = 257, 16  # ids that stand for a family's marker tokens
MEMORY = 4 << 30  # of address space, beyond what the library takes


def bytes_backend(name: str) -> Backend:
    """A library over single bytes, one end and some markers: enough to say whether a grammar can
    be had."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"<end>", *[b"<mark>"] * MOST_MARKS]
    return opened(name, Vocabulary(pieces, (256,), tuple(range(256, len(pieces)))))


def _walk(matcher: Matcher, vocabulary: Vocabulary) -> None:
    """Follow a grammar for some steps and look at what its masks cost.

    Text that a grammar forces is spelled anew for every mask, so a forced text of a megabyte, which
    ``x{2}{2}{2}...`` makes, would hold each step of the engine up.

    Raises:
        GrammarError: a mask takes longer than `MASK_S`.
    """
    words = np.zeros(-(-vocabulary.size // 32), np.int32)
    for _ in range(STEPS):
        begin = time.process_time()
        matcher.fill(words)
        if time.process_time() - begin > MASK_S:
            raise GrammarError(f"a step under it takes more than {1e3 * MASK_S:.0f} ms")
        ids = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
        if not len(ids) or int(ids[-1]) in vocabulary.ends or not matcher.consume([int(ids[-1])]):
            return


def main() -> None:
    """Answer until the other side closes."""
    backend = bytes_backend(sys.argv[1])
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with socket.socket(fileno=int(sys.argv[2])) as other, other.makefile("rwb") as stream:
        stream.write(b'""\n')  # ready
        stream.flush()
        for line in stream:
            spec = GrammarSpec(*json.loads(line))
            cause = ""
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            try:
                _walk(backend.compile(spec).start(), backend.vocabulary)
            except GrammarError as error:
                cause = error.cause
            signal.setitimer(signal.ITIMER_PROF, 0)
            stream.write(json.dumps(cause).encode() + b"\n")
            stream.flush()


if __name__ == "__main__":
    main()
