"""``metainfer completion``: a script that completes verbs, flags and choices in a shell."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from metainfer.cli.flags import Json
from metainfer.cli.output import Result


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="whose script to print")],
    /,
    *,
    as_json: Json = False,
) -> Result:
    """Print a completion script.

    Example: metainfer completion bash > ~/.local/share/bash-completion/completions/metainfer
    """
    from metainfer.cli.main import build

    script = build().generate_completion(shell=shell)
    return Result({"shell": shell, "script": script}, script)
