"""``metainfer report``: one archive for whoever helps. A thin caller of the doctor's room."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from metainfer.cli.flags import Json
from metainfer.cli.output import Result
from metainfer.core import env


def report(
    out: Annotated[Path, Parameter(help="the archive to write, FILE.zip")],
    /,
    *,
    url: Annotated[
        str | None,
        Parameter(name="--url", help="a server that runs, like http://localhost:8000"),
    ] = None,
    admin_key: Annotated[
        str | None,
        Parameter(name="--admin-key", help="its admin key; better: METAINFER_ADMIN_KEY"),
    ] = None,
    as_json: Json = False,
) -> Result:
    """Pack machine, plan, records, log and the engine's last steps; no prompt, answer or key.

    Without --url the last dump that an engine left stands for the server.

    Example: metainfer report trouble.zip --url http://localhost:8000
    """
    from metainfer.doctor.archive import pack

    made = pack(out, url, admin_key or env.get("METAINFER_ADMIN_KEY"))
    lines = [f"{made.file}: {len(made.parts)} parts, from the {made.source}"]
    lines += [f"  without {part}: {why}" for part, why in made.missing.items()]
    return Result(asdict(made), "\n".join(lines))
