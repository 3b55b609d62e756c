"""Adapters as model names of a real server over a real engine: answers, lists, metrics."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from faulty_server import MODEL, Faulty, faulty
from harness import ask, start
from lora_files import ATTENTION, EVERY, Recipe, matrices_of, save_pairs
from served import eventually

from metainfer.core.request import SamplingParams
from metainfer.engine.model_text import load_text

RECIPES = {
    "sql": Recipe(EVERY, rank=6, alpha=9),
    "law": Recipe(ATTENTION, rank=3, alpha=4, rslora=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, recipe) in enumerate(RECIPES.items()):
        save_pairs(root / name, matrices_of(MODEL), recipe, seed)
    return {name: str(root / name) for name in RECIPES}


@pytest.fixture(scope="module")
def server(folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    flags = ["--adapter", f"sql={folders['sql']}", "--lora-modules", f"law={folders['law']}"]
    flags += ["--concurrency", "6", "--metrics-compat", "vllm"]
    with faulty(tmp_path_factory.mktemp("serve"), *flags) as running:
        yield running


def get(server: Faulty, path: str) -> Any:
    with urllib.request.urlopen(f"{server.base}{path}", timeout=120) as answer:
        return json.loads(answer.read())


def test_base_and_adapters_at_once(server: Faulty, folders: dict[str, str]) -> None:
    """30 requests over HTTP, ten for each name, are answered as the engine answers one alone."""
    prompts = [[3 + (7 * i + j) % 250 for j in range(5 + i % 9)] for i in range(10)]
    names = [MODEL, "sql", "law"]
    engine = start(MODEL, concurrency=1, prefix_cache=False, adapters=folders)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = {
        (name, place): ask(engine, [prompt], params, adapters=["" if name == MODEL else name])[0]
        for name in names
        for place, prompt in enumerate(prompts)
    }

    async def one(client: openai.AsyncOpenAI, name: str, prompt: list[int]) -> Any:
        return await client.completions.create(
            model=name,
            prompt=prompt,
            max_tokens=12,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True},
        )

    async def every() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="x") as client:
            return await asyncio.gather(
                *(one(client, name, prompts[place]) for name, place in expected)
            )

    texts: dict[int, str] = {}
    for ((name, _), wanted), answer in zip(expected.items(), asyncio.run(every()), strict=True):
        assert answer.model == name
        # The same id is always shown as the same text, so equal sequences show equal texts.
        for token, text in zip(wanted.tokens, answer.choices[0].logprobs.tokens, strict=True):
            assert texts.setdefault(token, text) == text
    first = {name: tuple(expected[name, 0].tokens) for name in names}
    assert len(set(first.values())) == 3


def test_adapters_are_models_with_a_parent(server: Faulty, folders: dict[str, str]) -> None:
    listed = {row["id"]: row for row in get(server, "/v1/models")["data"]}
    assert list(listed) == [MODEL, "sql", "law"]
    assert [row["parent"] for row in listed.values()] == [None, MODEL, MODEL]
    assert listed["sql"]["root"] == folders["sql"]
    assert get(server, "/v1/models/law")["parent"] == MODEL


def test_a_chat_with_an_adapter(server: Faulty) -> None:
    body = {"model": "law", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=120)
    assert (answer.status_code, answer.json()["model"]) == (200, "law")


def test_unknown_names_and_routes_are_404(server: Faulty) -> None:
    body = {"model": "poems", "prompt": "x"}
    answer = httpx.post(f"{server.base}/v1/completions", json=body, timeout=120)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    load = {"lora_name": "poems", "lora_path": "poems"}
    assert httpx.post(f"{server.base}/v1/load_lora_adapter", json=load).status_code == 404


def test_the_plan_has_them_on_the_record(server: Faulty) -> None:
    document = get(server, "/plan")
    assert [row["name"] for row in document["plan"]["adapters"]] == ["law", "sql"]
    decided = {row["key"]: row for row in document["decisions"]}
    assert decided["adapters"]["value"] == ["law", "sql"]
    assert (decided["adapters"]["origin"], decided["adapters.max_rank"]["value"]) == ("flag", 6)
    assert decided["adapters.max_count"]["value"] == 2
    rows = {row["item"]: row for row in document["ledger"]}
    pairs = sum(
        recipe.rank * (n + k) * 4
        for recipe in RECIPES.values()
        for name, (n, k) in matrices_of(MODEL).items()
        if name.rpartition(".")[2] in recipe.targets
    )
    mine = [rows[f"adapter {name}"] for name in RECIPES]
    assert sum(row["logical_bytes"] for row in mine) == pairs
    assert all(row["memory"] == "device" for row in mine)
    assert sum(row["bytes"] for row in mine) > pairs  # padded to the larger rank, and scales


def test_routers_see_which_adapters_run(server: Faulty) -> None:
    def page() -> str:
        return httpx.get(f"{server.base}/metrics", timeout=120).text

    (line,) = re.findall(r"^vllm:lora_requests_info\{(.*)\} (\S+)$", page(), re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', line[0]))
    idle = {"running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert labels == {"max_lora": "2", **idle}
    assert float(line[1]) > 1.7e9  # seconds of the clock, not a count
    server.order("hold")
    body = {"model": "sql", "prompt": [5] * 40, "max_tokens": 4, "stream": True}
    body |= {"ignore_eos": True, "n": 16}  # six run and are held, ten of them wait
    with httpx.stream("POST", f"{server.base}/v1/completions", json=body, timeout=120) as answer:
        both = 'running_lora_adapters="sql",waiting_lora_adapters="sql"'
        assert eventually(lambda: both in page())
        server.withdraw("hold")
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


def test_generate_answers_with_its_adapter(folders: dict[str, str]) -> None:
    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "metainfer.cli.main", "generate", MODEL]
        command += ["--prompt", "abc", "--max-tokens", "6", "--threads", "1", "--json", *flags]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    engine = start(MODEL, concurrency=1, adapters=folders)
    done = run("--adapter", f"sql={folders['sql']}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    prompt = [load_text(MODEL, 320).tokenizer.encode("abc")]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    (with_it,) = ask(engine, prompt, params, adapters=["sql"], eos=(0,))
    (without,) = ask(engine, prompt, params, eos=(0,))
    assert told["token_ids"] == with_it.tokens != without.tokens
    both = run(*(f"--adapter={name}={folder}" for name, folder in folders.items()))
    assert both.returncode == 2 and "one of them has to answer" in both.stderr


def test_an_adapter_may_not_take_the_models_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "metainfer.cli.main", "serve", MODEL, "--port", "0"]
    command += ["--served-model-name", "m", "--adapter", f"m={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2 and "a name of the model itself" in done.stderr
