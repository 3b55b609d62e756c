"""A collective that did not happen: which, how large, waiting for whom, and why."""

from __future__ import annotations

from metainfer.core.errors import MetaInferError


class CommError(MetaInferError):
    """The group is broken from here on: close it and start a new one.

    `peer`: the rank that it is about, or None. `secondary`: another rank's trouble was heard of, so
    its own error is the cause.
    """

    default_code = "collective_failed"

    def __init__(self, cause: str, *, peer: int | None = None, secondary: bool = False) -> None:
        super().__init__(cause, "All ranks have to be started again.")
        self.peer = peer
        self.secondary = secondary
