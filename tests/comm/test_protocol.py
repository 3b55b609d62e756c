"""The protocol as host threads: 10^5 calls with random delays, race checks, the counter's wrap."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from metainfer.comm import layout
from metainfer.comm.backends import slabs
from metainfer.kernels.native import find_compiler

SOURCE = Path(__file__).with_name("protocol_stress.c")
WRAP = 1 << 40


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    compiler = find_compiler()
    assert compiler is not None
    built = {}
    for name, flags in (("plain", ["-O2"]), ("checked", ["-O1", "-g", "-fsanitize=thread"])):
        target = tmp_path_factory.mktemp("stress") / name
        common = ["-std=gnu11", "-pthread", "-fno-math-errno", "-Wno-psabi", *compiler.flags]
        subprocess.run(
            [*compiler.command, *flags, *common, str(SOURCE), "-o", str(target), "-lm"], check=True
        )
        built[name] = target
    return built


def run(program: Path, *arguments: int, timeout: float = 240) -> tuple[int, str]:
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_t1_a_hundred_thousand_calls_with_random_delays(programs: dict[str, Path]) -> None:
    assert run(programs["plain"], 2, 1, 100_000, 11, WRAP - 50_000, 1) == (0, "100000 0\n")


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(("world", "blocks"), [(4, 1), (3, 4), (8, 2)])
def test_t1_worlds_and_blocks(
    programs: dict[str, Path], world: int, blocks: int, shared: int
) -> None:
    calls = 3000 // world
    found = run(programs["plain"], world, blocks, calls, world, WRAP - calls // 2, shared)
    assert found == (0, f"{calls} 0\n")


@pytest.mark.parametrize(("world", "blocks", "shared"), [(2, 2, 0), (4, 1, 1), (3, 3, 0)])
def test_t1_no_race_under_the_thread_sanitizer(
    programs: dict[str, Path], world: int, blocks: int, shared: int
) -> None:
    assert run(programs["checked"], world, blocks, 600, 5, WRAP - 300, shared) == (0, "600 0\n")


def test_t1_a_skipped_call_is_reported_by_every_waiting_rank(programs: dict[str, Path]) -> None:
    assert run(programs["plain"], 4, 2, 100, 9, 0, 1, 40) == (2, "40 3\n")


def test_the_layout_in_c_is_the_layout_in_python() -> None:
    numbers = (ctypes.c_uint64 * len(layout.CHECKED))()
    slabs.library().mi_layout(numbers)
    assert tuple(numbers) == layout.CHECKED
