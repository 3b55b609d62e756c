"""Model references: every form resolves, every wrong one says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metainfer.core.errors import MetaInferError, ModelError, UsageError
from metainfer.formats import catalogue
from metainfer.formats.source import RandomRef, parse_random, resolve

Write = Callable[..., Path]


def model_folder(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def test_a_folder(tmp_path: Path) -> None:
    model_folder(tmp_path, hidden_size=8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    source = resolve(str(tmp_path))
    assert (source.kind, source.origin, source.path) == ("folder", "path", tmp_path)
    assert source.config == {"model_type": "llama", "hidden_size": 8}
    assert source.generation_config == {"eos_token_id": [1, 2]}


def test_a_gguf_file(gguf_file: Write) -> None:
    path = gguf_file("qwen3")
    source = resolve(str(path))
    assert (source.kind, source.origin, source.path) == ("gguf", "path", path)
    assert source.config["model_type"] == "qwen3"
    assert source.gguf_metadata["general.architecture"] == "qwen3"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_name_in_the_hub_cache(tmp_path: Path, variable: str) -> None:
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    repo = tmp_path / below / "models--org--name-1.5"
    env = {variable: str(tmp_path)}
    model_folder(repo / "snapshots" / "abc123")
    model_folder(repo / "snapshots" / "other")
    with pytest.raises(ModelError, match="no downloaded snapshot"):
        resolve("org/name-1.5", env=env)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123\n")
    source = resolve("org/name-1.5", env=env)
    assert source.path == repo / "snapshots" / "abc123" and source.origin == "hub-cache"
    (repo / "refs" / "main").write_text("../snapshots/other")
    with pytest.raises(ModelError, match="no downloaded snapshot"):
        resolve("org/name-1.5", env=env)


@pytest.mark.parametrize("below", ["models/org/name-1___5", "org/name-1.5", "hub/org/name-1___5"])
def test_a_name_in_the_modelscope_cache(tmp_path: Path, below: str) -> None:
    folder = model_folder(tmp_path / below)
    env = {"MODELSCOPE_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "none")}
    source = resolve("org/name-1.5", env=env)
    assert source.path == folder and source.origin == "modelscope-cache"


def test_random_references() -> None:
    source = resolve("random:deepseek-v4.1-flash?layers=4&seed=7")
    assert source.kind == "random" and source.path is None and source.config == {}
    assert source.random == RandomRef("deepseek-v4.1-flash", {"layers": "4", "seed": "7"})
    assert parse_random("random:tiny-llama") == RandomRef("tiny-llama", {})


@pytest.mark.parametrize(
    "reference",
    [
        "random:",
        "random:Llama",
        "random:llama-",
        "random:llama?",
        "random:llama?seed",
        "random:llama?seed=",
        "random:llama?=1",
        "random:llama?seed=1&",
        "random:llama?seed=1&seed=2",
        "random:llama?seed=1?layers=2",
        "random:llama?se ed=1",
        "random:llama?seed=a=b",
        "random:llama&seed=1",
        "random:../llama",
        "random:llama\n",
    ],
)
def test_malformed_random_references_are_usage_errors(reference: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(reference)
    assert caught.value.exit_code == 2 and "random:<family>" in caught.value.remedy


@settings(max_examples=100, deadline=None)
@given(
    params=st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True),
        st.from_regex(r"[A-Za-z0-9.]{1,6}", fullmatch=True),
        max_size=4,
    )
)
def test_random_references_round_trip(params: dict[str, str]) -> None:
    query = "&".join(f"{k}={v}" for k, v in params.items())
    assert parse_random(f"random:x{'?' * bool(query)}{query}") == RandomRef("x", params)


@settings(max_examples=200, deadline=None)
@given(reference=st.text(max_size=300))
def test_any_text_gives_our_error(reference: str) -> None:
    env = {"HF_HOME": "/nonexistent", "MODELSCOPE_CACHE": "/nonexistent"}
    if reference.strip("./~ ") == "":
        return
    with pytest.raises(MetaInferError) as caught:
        resolve(reference, fetch=False, env=env)
    assert caught.value.cause and caught.value.remedy


def test_unknown_references(tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path), "MODELSCOPE_CACHE": str(tmp_path)}
    with pytest.raises(ModelError, match=r"Did you mean smollm2-135m\?") as caught:
        resolve("SmolLM2-135", env=env)
    assert caught.value.code == "model_not_found"
    with pytest.raises(ModelError) as caught:
        resolve("org/nothing-like-it", env=env)
    assert "Did you mean" not in str(caught.value) and "smollm2-135m" in caught.value.remedy
    with pytest.raises(ModelError, match=r"no file or folder '\./gone\.gguf'"):
        resolve("./gone.gguf", env=env)
    with pytest.raises(ModelError, match="is no path"):
        resolve("a" * 5000, env=env)
    with pytest.raises(ModelError, match="no file or folder '~no-such-user/m'"):
        resolve("~no-such-user/m", env=env)
    with pytest.raises(UsageError):
        resolve("", env=env)
    with pytest.raises(UsageError):
        resolve("a\0b", env=env)


def test_a_catalogue_name_without_fetching(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not in the cache") as caught:
        resolve("smollm2-135m", fetch=False, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert caught.value.code == "not_cached"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{", "[]", "\x80", '"x"', "[" * 50_000])
def test_a_bad_config_is_our_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(str(tmp_path))


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "w.gguf").touch()
    with pytest.raises(ModelError, match=r"Pass the file itself: .*w\.gguf"):
        resolve(str(tmp_path))
    with pytest.raises(ModelError, match=r"Cannot read|does not start"):
        resolve(str(tmp_path / "w.gguf"))
    (tmp_path / "m.safetensors").touch()
    with pytest.raises(ModelError, match="one weight file without a config"):
        resolve(str(tmp_path / "m.safetensors"))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match="does not start with the bytes 'GGUF'"):
        resolve(str(tmp_path / "notes.txt"))


def test_an_existing_path_wins_over_the_catalogue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "smollm2-135m")
    assert resolve("smollm2-135m").origin == "path"


def test_the_cache_follows_xdg() -> None:
    entry = catalogue.CATALOGUE["smollm2-135m"]
    assert catalogue.cached_file(entry, env={"XDG_CACHE_HOME": "/c"}) == Path(
        f"/c/metainfer/models/smollm2-135m/{entry.sha256[:12]}/SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    assert catalogue.cache_root({"XDG_CACHE_HOME": "relative"}) == catalogue.cache_root({})
    own = {"METAINFER_CACHE": "/m", "XDG_CACHE_HOME": "/c"}
    assert catalogue.cache_root(own) == Path("/m/models")
