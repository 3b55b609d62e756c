"""schemathesis against ``/openapi.json``: declared answers only, no 5xx, bad data refused.

Left out: "valid data is accepted". JSON Schema cannot say that two fields must agree
(`top_logprobs` and `logprobs`, prompt and `max_tokens` against the context).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fake_server import Running, call, fake_server

#: 413: a list beyond its bound may be a body beyond its own.
REFUSALS = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 404, 405, 413, 415, 429, 503]
"""


def test_schemathesis(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(REFUSALS)
    st = Path(sys.executable).with_name("st")
    command = [str(st), "run", "--phases", "coverage,fuzzing", "--max-examples", "10"]
    command += ["--seed", "1", "--exclude-checks", "positive_data_acceptance"]
    command += ["--request-timeout", "120", "--suppress-health-check", "too_slow"]
    command += ["--exclude-path", "/v1/messages/count_tokens"]  # a part of /v1/messages
    command += ["--exclude-path", "/debug/report"]  # 403 to all without an admin key
    # It sends lists just beyond their bounds: small bounds are tested as well, and faster.
    with fake_server(["--limit", "messages=40", "--limit", "tools=20"]) as running:
        command.append(f"{running.url}/openapi.json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]


def test_document_describes_what_it_must(server: Running) -> None:
    document = call(server.port, "GET", "/openapi.json").json
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        answers = document["paths"][path]["post"]["responses"]
        assert "text/event-stream" in answers["200"]["content"]
        assert {"400", "404", "413", "415", "429", "503"} <= set(answers)
        assert "422" not in answers
    refused = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]
    assert refused["application/json"]["schema"]["$ref"].endswith("/AnthropicError")
    assert "type" not in document["components"]["schemas"]["MessageItem"]["required"]
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["additionalProperties"] is False
    bounds = {option.get("maximum") for option in chat["properties"]["n"]["anyOf"]}
    assert 16 in bounds
    assert chat["properties"]["messages"]["maxItems"] == 4096
