"""The clients for Node (openai, @anthropic-ai/sdk, the AI SDK) against scripted answers.

`make test` installs them where npm is there (``npm ci``, without scripts); without them the test is
skipped and says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import Running, fake_server
from fake_texts import write_script

NODE = Path(__file__).with_name("node")
SCRIPTS = sorted(NODE.glob("*.mjs"))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call>'
SAID = {
    "call": f"<think>\nI must look.\n</think>\n\nOne moment.\n{CALL}",
    "json": '{"city": "Łódź"}',
    "text": "It rains.",
}
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE / "node_modules").is_dir(),
    reason="needs node and `npm ci` in tests/conformance/node",
)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: Any) -> Iterator[Running]:
    script = write_script(tmp_path_factory.mktemp("s") / "script.json", "qwen", SAID)
    steps = ["--script", str(script), "--tokens-per-step", "2"]
    with fake_server(["--text", "qwen"], steps) as running:
        yield running


def test_there_is_one_script_for_each_client() -> None:
    assert [path.stem for path in SCRIPTS] == ["ai", "anthropic", "openai"]


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_client(scripted: Running, script: Path) -> None:
    done = subprocess.run(
        ["node", script.name],
        cwd=NODE,
        env=os.environ | {"CHECK_URL": scripted.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:] + done.stdout
