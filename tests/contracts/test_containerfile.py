"""The Containerfile is not built here; its syntax and what it refers to are checked."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
KNOWN = {
    "FROM", "RUN", "CMD", "LABEL", "EXPOSE", "ENV", "ADD", "COPY", "ENTRYPOINT", "VOLUME", "USER",
    "WORKDIR", "ARG", "STOPSIGNAL", "HEALTHCHECK", "SHELL",
}  # fmt: skip


def instructions(text: str) -> list[tuple[str, str]]:
    parser = DockerfileParser(fileobj=_file(text))
    return [
        (item["instruction"], item["value"])
        for item in parser.structure
        if item["instruction"] != "COMMENT"
    ]


def _file(text: str):
    import io

    return io.BytesIO(text.encode())


def problems(text: str) -> list[str]:
    """Everything wrong with a container file that can be seen without building it."""
    found = []
    listed = instructions(text)
    if not listed or listed[0][0] not in ("FROM", "ARG"):
        found.append("the first instruction is not FROM")
    for name, value in listed:
        if name not in KNOWN:
            found.append(f"unknown instruction {name}")
        elif not value.strip():
            found.append(f"{name} is empty")
        elif name in ("CMD", "ENTRYPOINT", "VOLUME") and value.lstrip().startswith("["):
            try:
                json.loads(value)
            except ValueError:
                found.append(f"{name} is no JSON list: {value}")
        elif name == "RUN":
            try:
                shlex.split(value)
            except ValueError as error:
                found.append(f"RUN: {error}")
    return found


def test_syntax() -> None:
    assert problems((ROOT / "Containerfile").read_text()) == []


def test_the_check_can_fail() -> None:
    assert problems("RUN true\nFROM x\n") == ["the first instruction is not FROM"]
    assert problems("FROM x\nFRUM y\n") == ["unknown instruction FRUM"]
    assert problems('FROM x\nCMD ["a", ]\n') == ['CMD is no JSON list: ["a", ]']
    assert problems("FROM x\nRUN echo 'open\n") == ["RUN: No closing quotation"]


def test_it_installs_what_make_wheel_builds_and_an_extra_that_exists() -> None:
    import tomllib

    text = (ROOT / "Containerfile").read_text()
    assert "COPY dist/*.whl" in text and "-w dist ." in (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\[(\w+)\]\"? &&", text):
        assert extra in extras["optional-dependencies"]
    assert "metainfer" in extras["scripts"]
