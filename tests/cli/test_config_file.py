"""``--config FILE``: the command line over the environment over the file, each with its line."""

from __future__ import annotations

import json
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_line import cli, document
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from metainfer.cli import config_file, settings
from metainfer.cli.declared import Verbs
from metainfer.cli.main import build
from metainfer.cli.server_flags import ServerFlags
from metainfer.core.errors import UsageError
from metainfer.core.ledger import Origin

APP = build()
VERBS = Verbs(APP)

TOML = """\
# how this machine serves
port = 8001
context = 4096   # tokens
max-num-seqs = 3
no_prefix_cache = true
served-model-name = ["a", "b"]
keep-alive = 2.5

[op]
linear = "linear/torch"
"""
YAML = """\
port: 8001
context: 4096
max-num-seqs: 3
no_prefix_cache: true
served-model-name: [a, b]
keep-alive: 2.5

op: {linear: linear/torch}
"""


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("METAINFER_API_KEY", "METAINFER_PLATFORM", "METAINFER_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


def bound(made: settings.Settings) -> dict[str, Any]:
    """What the parser makes of it: every field by name, those of the two groups of flags too."""
    _, found, _ = APP.parse_args(made.words, exit_on_error=False, print_error=False)
    fields: dict[str, Any] = {}
    for name, value in ({"server": ServerFlags()} | found.arguments).items():
        fields |= vars(value) if name in ("engine", "server") else {name: value}
    return fields


@pytest.mark.parametrize(("name", "text"), [("s.toml", TOML), ("s.yaml", YAML)])
def test_a_file_sets_flags_and_every_value_knows_its_line(
    tmp_path: Path, name: str, text: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    made = settings.gather(["serve", "m", "--config", str(path), "--port", "9"], VERBS)
    found = bound(made)
    assert (found["port"], found["keep_alive"]) == (9, 2.5)
    assert found["served_model_name"] == ("a", "b")
    assert (found["context"], found["concurrency"], found["no_prefix_cache"]) == (4096, 3, True)
    assert found["op"] == ("linear=linear/torch",)
    lines = text.splitlines()
    for flag, key in (
        ("--context", "context"), ("--concurrency", "max-num-seqs"), ("--op", "op"),
        ("--served-model-name", "served-model-name"),
    ):  # fmt: skip
        setting = made.given[flag]
        line = next(n for n, said in enumerate(lines, 1) if said.lstrip("[").startswith(key))
        assert setting.origin is Origin.FILE
        assert setting.said.startswith(f"--config {path} line {line}"), setting
    assert made.given["--port"].origin is Origin.FLAG
    assert "max-num-seqs" in made.given["--concurrency"].said


def test_the_parts_of_a_layout_are_one_flag(tmp_path: Path) -> None:
    path = tmp_path / "v.yaml"
    path.write_text("tensor-parallel-size: 2\nport: 1\ndata-parallel-size: 4\n")
    made = settings.gather(["serve", "m", "--config", str(path)], VERBS)
    assert bound(made)["parallel"] == "4xtp2"
    assert made.given["--parallel"].said.startswith(f"--config {path} line 1, 3 (")


def test_the_plan_says_who_set_it(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("\ncontext = 64\nport = 1\n")
    done = cli("plan", "--model", "random:tiny-llama", "--config", str(path), "--json")
    rows = {row["key"]: row for row in document(done)["decisions"]}
    row = rows["limits.max_context"]
    assert (row["value"], row["origin"]) == (64, "file")
    assert row["why"].endswith(f"--context set by --config {path} line 2")
    assert f"--config {path}: port not used by plan" in done.stderr.splitlines()


def test_the_environment_is_between_file_and_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.toml"
    path.write_text('api-key = "of the file"\nplatform = "cuda"\n')
    words = ["serve", "m", "--config", str(path)]
    assert bound(settings.gather(words, VERBS))["api_key"] == ("of the file",)
    monkeypatch.setenv("METAINFER_API_KEY", "of the environment")
    made = settings.gather(words, VERBS)
    assert bound(made)["api_key"] == ()  # `serve` reads the variable
    setting = made.given["--api-key"]
    assert (setting.origin, setting.shown) == (Origin.ENV, "(secret)")
    made = settings.gather([*words, "--api-key", "mine"], VERBS)
    assert bound(made)["api_key"] == ("mine",)
    assert made.given["--api-key"].origin is Origin.FLAG
    assert made.given["--platform"].origin is Origin.FILE


def test_a_model_in_the_file_gives_way_to_one_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('model = "of-the-file"\n')
    for verb, model in (("serve", "model"), ("plan", "model")):
        made = settings.gather([verb, "--config", str(path)], VERBS)
        assert bound(made)[model] == "of-the-file"
        made = settings.gather([verb, "mine", "--config", str(path)], VERBS)
        assert bound(made)[model] == "mine"


WRONG = [
    ("contxt = 1\n", "Did you mean context"),
    ("port = 1\ncontext = true\n", "line 2"),
    ("context = [1, 2]\n", "2 values"),
    ("no-prefix-cache = 1\n", "true or false"),
    ("context = {a = {b = 1}}\n", "neither a text nor a number"),
    ('config = "other.toml"\n', "another file"),
    ("context = 1\nmax-model-len = 2\n", "both are given"),
    ('quantization = "awq"\n', "cannot be honoured"),
    ("context = 1\ncontext = 2\n", "not TOML"),
    ("= 1\n", "not TOML"),
    ("a_b = 1\na-b = 2\n", "lines 1 and 2"),
]


@pytest.mark.parametrize(("text", "hint"), WRONG)
def test_what_is_wrong_is_refused(tmp_path: Path, text: str, hint: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        settings.gather(["serve", "m", "--config", str(path)], VERBS)
    assert hint in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("name", "data", "hint"),
    [
        ("s.yaml", b"context: 1\ncontext: 2\n", "lines 1 and 2"),
        ("s.yaml", b"- a\n", "no mapping"),
        ("s.yaml", b"a: [\n", "not YAML"),
        ("s.yaml", b"a: !!python/object/apply:os.getcwd []\n", "not YAML"),
        ("s.ini", b"", "neither"),
        ("s.toml", b"\xff", "cannot be read"),
        ("s.toml", b"#" * (2 << 20), "no file of flags"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, data: bytes, hint: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(UsageError, match=hint):
        config_file.read(path)
    with pytest.raises(UsageError, match="cannot be read"):
        config_file.read(tmp_path / "absent.toml")


def test_from_the_outside(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('port = "eight"\n')
    done = cli("serve", "m", "--config", str(path), "--json")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"--port was set by --config {path} line 1" in json.loads(done.stdout)["error"]["remedy"]


FLAGS = [
    flag
    for flag in VERBS[("serve",)].flags
    if flag.name not in ("--config", "--json", "--metrics-compat") and not flag.choices
]
TEXT = st.text(string.ascii_letters + string.digits + " =:,-", min_size=1, max_size=12)


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    chosen = draw(st.lists(st.sampled_from(FLAGS), unique=True, max_size=6))
    made: dict[str, Any] = {}
    for flag in chosen:
        if not flag.value:
            made[flag.name] = draw(st.booleans())
        elif flag.value == "INT":
            made[flag.name] = draw(st.integers(1, 10**6))
        elif flag.value == "FLOAT":
            made[flag.name] = draw(st.floats(0, 1e6, allow_nan=False))
        elif flag.repeatable:
            made[flag.name] = draw(st.lists(TEXT, max_size=3))
        else:
            made[flag.name] = draw(TEXT)
    return made


@hypothesis_settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(files(), st.booleans())
def test_every_value_arrives_as_if_it_were_typed(
    tmp_path: Path, wanted: dict[str, Any], underscores: bool
) -> None:
    path = tmp_path / "any.toml"
    keys = {name: name[2:].replace("-", "_") if underscores else name[2:] for name in wanted}
    body = "".join(f"{keys[name]} = {json.dumps(value)}\n" for name, value in wanted.items())
    assert tomllib.loads(body) == {keys[name]: value for name, value in wanted.items()}
    path.write_text(body)
    made = settings.gather(["serve", "m", "--config", str(path)], VERBS)
    arguments = bound(made)
    for flag in FLAGS:
        if flag.name in wanted and wanted[flag.name] not in (False, []):
            found = arguments[flag.field]
            value = wanted[flag.name]
            typed = tuple(value) if isinstance(value, list) else value
            assert found == typed or str(found) == typed, flag.name


def test_the_example_is_taken() -> None:
    path = Path(__file__).parents[2] / "examples" / "serve.toml"
    found = bound(settings.gather(["serve", "m", "--config", str(path)], VERBS))
    assert found["limit"] == ("messages=512", "n=4") and found["max_pending"] == 256
    config = ServerFlags(**{f: found[f] for f in ServerFlags.__dataclass_fields__}).config("m")
    assert (config.bounds["messages"], config.request_timeout_s) == (512, 300.0)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({"port": 70000}, "no port"), ({"keep_alive": 0.0}, "--keep-alive"),
        ({"request_timeout": float("nan")}, "--request-timeout"),
        ({"drain_grace": -1.0}, "0 or more"),
        ({"root_path": "llm"}, "Begin it"), ({"ssl_keyfile": Path("k")}, "--ssl-certfile"),
        ({"limit": ("n=x",)}, "no number"), ({"limit": ("m=1",)}, "--limit"),
        ({"api_key_file": Path("/no/such")}, "cannot be read"), ({"max_body": "much"}, "no size"),
    ],
)  # fmt: skip
def test_server_flags_out_of_range(flags: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        ServerFlags(**flags).config("m")


def test_keys_of_a_file_join_the_others_and_an_empty_file_opens_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n one \n\ntwo\n")
    assert ServerFlags(api_key=("zero",), api_key_file=path).config("m").api_keys == (
        "zero", "one", "two",
    )  # fmt: skip
    path.write_text("# none yet\n")
    with pytest.raises(UsageError, match="holds no key"):
        ServerFlags(api_key_file=path).config("m")
