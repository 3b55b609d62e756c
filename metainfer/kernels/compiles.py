"""Kernels that are compiled after ready: there should be none, and each is told (B-30). No torch.

Triton compiles a kernel at the first call with new types, constants or alignments; such a call
stands still for up to minutes. Its hooks say when that begins and ends.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

COMPILED_LATE = "compiled_late"
"""Kind of the fault."""


class CompileWatch:
    """Tells of each kernel that Triton compiles, or fetches from its cache on disk, while open.

    `count`: how many. Hooks that others have set are called as before.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.count = 0
        self._tell = tell
        self._begun: dict[str, float] = {}
        self._undo: Callable[[], None] = lambda: None

    def open(self) -> None:
        """Watch from now on. Where Triton was never loaded nothing of its can be compiled."""
        triton: Any = sys.modules.get("triton")
        if triton is None:
            return
        runtime = triton.knobs.runtime
        before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

        def begin(**info: Any) -> Any:
            self._begun[str(info["key"])] = time.perf_counter()
            return before(**info) if before is not None else None

        def end(**info: Any) -> Any:
            self._note(info)
            return after(**info) if after is not None else None

        def undo() -> None:
            runtime.jit_cache_hook, runtime.jit_post_compile_hook = before, after

        runtime.jit_cache_hook, runtime.jit_post_compile_hook = begin, end
        self._undo = undo

    def close(self) -> None:
        self._undo()
        self._undo = lambda: None

    def _note(self, info: Any) -> None:
        self.count += 1
        begun = self._begun.pop(str(info["key"]), None)
        seconds = "" if begun is None else f" in {time.perf_counter() - begun:.2f} s"
        self._tell(f"kernel {info['fn'].name} was compiled after ready{seconds}: {info['repr']}")
