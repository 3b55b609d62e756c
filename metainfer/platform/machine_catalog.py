"""Machines by name or file: the shipped ones are planned for without owning one."""

from __future__ import annotations

import difflib
import re
from functools import cache
from importlib import resources
from pathlib import Path

from metainfer.core.errors import UsageError, UserError
from metainfer.platform.machine_file import MachineFile, parse, render

#: What `--machine` takes beside a file; one file each in ``machines/``.
SHIPPED = (
    "8x-rtx-pro-6000d",
    "8x-rtx-pro-6000",
    "4x-rtx-pro-6000",
    "2x-rtx-pro-6000",
    "8x-l20",
    "8x-l40s",
    "8x-4090",
    "8x-5090",
    "8x-a800-pcie",
    "8x-b300",
    "1x-h200",
    "2x-h200-nop2p",
    "cpu",
)
SUFFIX = ".toml"


def find_machine(reference: str) -> MachineFile:
    """The machine of a shipped name, or of a file whose name ends in ``.toml``.

    Raises:
        UsageError: no such name or file, or the file is malformed.
    """
    if reference.endswith(SUFFIX):
        return _from_file(Path(reference))
    if reference in SHIPPED:
        return _shipped(reference)
    near = difflib.get_close_matches(reference.lower(), SHIPPED, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise UsageError(
        f"Machine {reference!r} is not known.",
        f"{hint}There is: {', '.join(SHIPPED)}; or a FILE{SUFFIX}, "
        f"as written by metainfer doctor --save-machine.",
        code="unknown_machine",
    )


def save_machine(machine: MachineFile, path: Path) -> None:
    """Write the file; what was written reads back as exactly this machine.

    Raises:
        UsageError: the name does not end in ``.toml``.
        UserError: it cannot be written.
    """
    if path.suffix != SUFFIX:
        raise UsageError(
            f"{str(path)!r} is no name for a machine file.",
            f"Let it end in {SUFFIX}, so that --machine takes it.",
            code="bad_machine_file",
        )
    try:
        path.write_text(render(machine), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror or error}.",
            "Choose a folder that can be written.",
            code="not_writable",
        ) from error


def machine_name(path: Path) -> str:
    """A name for this machine's file: the file's, without a claim about how many devices."""
    return re.sub(r"^\d+x-", "", path.stem) or "machine"


@cache
def _shipped(name: str) -> MachineFile:
    file = resources.files("metainfer.platform") / "machines" / f"{name}{SUFFIX}"
    return parse(file.read_text(encoding="utf-8"), f"machines/{name}{SUFFIX}")


def _from_file(path: Path) -> MachineFile:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(
            f"There is no machine file {path}.",
            f"Shipped machines go without {SUFFIX}: {', '.join(SHIPPED)}.",
            code="unknown_machine",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}.", "Give a TOML file.", code="bad_machine_file"
        ) from error
    return parse(text, str(path))
