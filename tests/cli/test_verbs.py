"""generate, chat and serve over the fake engine."""

from __future__ import annotations

import http.client
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from command_line import HERE, cli, document, environ, fake
from fake_engine import reply_text
from fake_server import descendants, eventually, is_alive

from metainfer.cli.session import Answer


def test_generate_json() -> None:
    done = fake("generate", "m", "--prompt", "hello", "--max-tokens", "7", "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    got = document(done)
    assert got["text"] == reply_text("hello", 7, 3)
    assert bytes(got["token_ids"]).decode() == got["text"]
    assert got["finish_reason"] == "length"
    assert got["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert got["timing"]["ttft_s"] > 0 and got["timing"]["decode_tok_s"] > 0


def test_generate_streams_text() -> None:
    done = fake("generate", "m", "--prompt", "say:héllo", "--stop", "lo")
    assert (done.returncode, done.stdout) == (0, "hél\n")
    piped = fake("generate", "m", "--prompt", "-", "--max-tokens", "5", stdin="from stdin")
    assert piped.stdout == reply_text("from stdin", 5) + "\n"
    dashed = fake("generate", "m", "--prompt", "- item", "--max-tokens", "5")
    assert dashed.stdout == reply_text("- item", 5) + "\n"
    chat = fake("generate", "m", "--prompt", "hi", "--chat", "--max-tokens", "5")
    assert chat.stdout == reply_text("user: hi\nassistant: ", 5) + "\n"


def test_generate_one_token_has_no_decode_speed() -> None:
    got = document(fake("generate", "m", "--prompt", "x", "--max-tokens", "1", "--json"))
    assert got["timing"]["decode_tok_s"] is None


def test_generate_into_a_closed_pipe(tmp_path: Path) -> None:
    """The rest of the answer comes once nobody reads it any more."""
    go_on = tmp_path / "go on"
    command = [sys.executable, str(HERE / "run_fake.py"), "--hold-at", "3", "--release", str(go_on)]
    command += ["--", "generate", "m", "--prompt", "x", "--max-tokens", "2000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ()
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(3)
    process.stdout.close()
    go_on.touch()
    assert process.wait(120) == 1
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


def test_chat_reads_a_pipe() -> None:
    done = fake("chat", "m", "--max-tokens", "50", stdin="say:one\n\nsay:two")
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n")
    got = document(fake("chat", "m", "--system", "be brief", "--json", stdin="say:one\n"))
    assert got["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say:one"},
        {"role": "assistant", "content": "one"},
    ]


def test_reasoning_is_no_part_of_the_answer(tmp_path: Path) -> None:
    """Nor of the history: the second prompt holds the first answer's content alone."""
    from fake_texts import write_script

    replies = {"one": "hm <b></think>One.", "two": "</think>Two."}
    script = write_script(tmp_path / "script.json", "deepseek", replies)
    log = tmp_path / "log"
    flags = ["--script", str(script), "--log", str(log), "--", "chat", "m"]
    command = [sys.executable, str(HERE / "run_fake.py"), *flags]
    lines = "play:one;\nplay:two;\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environ())
    assert (done.returncode, done.stdout) == (0, "One.\nTwo.\n"), done.stderr
    prompts = [line for line in log.read_text().splitlines() if line.startswith("prompt ")]
    tokens = json.loads(prompts[-1].removeprefix("prompt "))
    said = bytes(token - 9 for token in tokens if 9 <= token < 265).decode()
    assert said == "play:one;One.play:two;"
    command[-2:] = ["generate", "m", "--chat", "--prompt", "play:one;", "--json"]
    got = document(subprocess.run(command, capture_output=True, text=True, env=environ()))
    assert (got["text"], got["reasoning"]) == ("One.", "hm <b>")
    command[-1:] = []
    done = subprocess.run(command, capture_output=True, text=True, env=environ())
    assert done.stdout == "One.\n"


def _read_until(terminal: int, word: bytes, seconds: float = 240.0) -> bytes:
    seen, until = b"", time.monotonic() + seconds
    while word not in seen:
        left = until - time.monotonic()
        assert left > 0, seen
        if select.select([terminal], [], [], left)[0]:
            seen += os.read(terminal, 4096)
    return seen


def heed_interrupts() -> None:
    """What a shell runs in the background ignores them, and so would our children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_chat() -> None:
    command = [sys.executable, str(HERE / "run_fake.py"), "--hold-at", "8", "--", "chat", "m"]
    pid, terminal = pty.fork()
    if pid == 0:
        heed_interrupts()
        os.execve(sys.executable, command, environ(TERM="dumb"))
    try:
        _read_until(terminal, b"> ")
        os.write(terminal, b"go on\n")
        begun = reply_text("user: go on\nassistant: ", 8).encode()
        _read_until(terminal, begun)
        os.write(terminal, b"\x03")
        _read_until(terminal, b"[stopped]\r\n> ")
        os.write(terminal, b"say:again\n")
        _read_until(terminal, b"again\r\n> ")
        os.write(terminal, b"\x04")
        children = descendants(pid)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert eventually(lambda: not any(map(is_alive, children)))
    finally:
        os.close(terminal)


def test_ctrl_c_in_generate_leaves_nothing() -> None:
    command = [sys.executable, str(HERE / "run_fake.py"), "--hold-at", "3", "--"]
    command += ["generate", "m", "--prompt", "x", "--max-tokens", "2000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environ(), text=True, preexec_fn=heed_interrupts
    )
    assert process.stdout is not None
    process.stdout.read(3)
    children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    assert eventually(lambda: not any(map(is_alive, children)))
    process.stdout.close()


def test_serve_prints_phases_and_one_summary() -> None:
    command = [sys.executable, "-u", str(HERE / "run_fake.py"), "--", "serve", "m", "--port", "0"]
    command += ["--served-model-name", "name", "--max-model-len", "1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ())
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    while "ops:" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    text = "".join(lines)
    assert "weights" in text and "0.25 s" in text
    assert "about 32 concurrent requests of 2048 tokens" in text
    assert "linear/fake" in text
    port = int(text.partition("127.0.0.1:")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/plan")
    plan = json.loads(connection.getresponse().read())
    assert plan["intent"]["context"] == 1000
    connection.close()
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 0
    process.stdout.close()


def test_serve_json_is_one_document() -> None:
    command = [sys.executable, str(HERE / "run_fake.py"), "--", "serve", "m", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, text=True, env=environ()
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert ready["url"].startswith("http://127.0.0.1:") and ready["max_context"] == 2048
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == ""
    assert process.wait(120) == 0
    process.stdout.close()


def test_json_verbs_print_one_document() -> None:
    for words in (["version"], ["kernels", "list"]):
        done = cli(*words, "--json")
        assert done.returncode == 0, done.stderr
        assert document(done)


def test_decode_speed_leaves_out_the_first_output() -> None:
    answer = Answer(5, token_ids=[1, 2, 3, 4, 5], first_tokens=2, began=0.5, first=1.0, last=2.5)
    assert answer.ttft_s == 0.5
    assert answer.decode_tok_s == 2.0
