"""`make demo`: start the server on SmolLM2-135M, stream an answer through the openai client.

Prints the answer as it arrives, its speed, and which implementation the plan chose for each op.
Exits 0 only if an answer came.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France? Answer in one sentence."


def main() -> int:
    began = time.monotonic()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "metainfer.cli.main", "serve", MODEL, "--port", str(port)]
    print(f"$ metainfer serve {MODEL} --port {port}", flush=True)
    server = subprocess.Popen(command)
    try:
        if not wait_ready(base, server):
            return 1
        print(f"\n> {QUESTION}")
        if not ask(f"{base}/v1"):
            return 1
        show_choices(base)
        print(f"\nDone in {time.monotonic() - began:.1f} s, install apart.")
        return 0
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)


def wait_ready(base: str, server: subprocess.Popen[bytes], limit_s: float = 240.0) -> bool:
    """Poll ``/ready`` until it says yes, the server dies or time is up."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{base}/ready", timeout=2) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    print("the server did not become ready; its last lines are above", file=sys.stderr)
    return False


def ask(base_url: str) -> bool:
    """Stream one chat answer and say how fast it came."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=os.environ.get("METAINFER_API_KEY", "none"))
    begin = time.perf_counter()
    first = last = begin
    text, usage = "", None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        if chunk.choices and chunk.choices[0].delta.content:
            last = time.perf_counter()
            first = first if text else last
            text += chunk.choices[0].delta.content
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()
    if usage is None or not text:
        print("no answer came", file=sys.stderr)
        return False
    speed = (usage.completion_tokens - 1) / (last - first) if last > first else float("nan")
    print(
        f"\nfirst token {1e3 * (first - begin):.0f} ms, then {speed:.1f} tokens/s; "
        f"{usage.prompt_tokens} prompt and {usage.completion_tokens} answer tokens"
    )
    return True


def show_choices(base: str) -> None:
    """The plan's choice for each op, decode and prefill."""
    with urllib.request.urlopen(f"{base}/plan", timeout=10) as answer:
        plan = json.load(answer)
    ops = plan["plan"]["ops"] if "plan" in plan else plan["ops"]
    print("\nchosen implementations (all losers and reasons: metainfer doctor --model", MODEL + ")")
    sites = dict.fromkeys(key.split("@")[0] for key in ops)
    for site in sites:
        chosen = {phase: ops[f"{site}@{phase}"] for phase in ("chunk", "decode")}
        print(
            f"  {site:16s} prefill {chosen['chunk']['impl']:20s} "
            f"decode {chosen['decode']['impl']:20s} {chosen['decode']['quality']}"
        )


if __name__ == "__main__":
    sys.exit(main())
