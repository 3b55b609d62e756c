"""Which prompt format and reader a model reference gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metainfer.core.errors import ModelError, RequestError
from metainfer.engine.model_text import byte_deepseek, byte_text, load_text
from metainfer.text.byte_text import byte_tokenizer
from metainfer.text.deepseek_v4 import BOS, EOS, MARKERS
from metainfer.text.dialogue import conversation_of
from metainfer.text.markup import DEEPSEEK, PLAIN, QWEN3, Opening

HI = [{"role": "user", "content": "hi é"}]


def test_a_random_family_with_markers_has_them_as_its_first_ids() -> None:
    tools = load_text("random:tiny-deepseek-v4", 512)
    tokenizer = tools.tokenizer
    assert [tokenizer.token_id(marker) for marker in MARKERS] == list(range(len(MARKERS)))
    assert (tokenizer.token_id(BOS), tokenizer.token_id(EOS)) == (0, 1)  # as its config says
    assert tokenizer.eos_ids == (1,) and tokenizer.vocab_size == 512
    assert tools.format.markup is DEEPSEEK
    prompt = tools.format.encode(conversation_of(HI))
    assert prompt.opening is Opening.REASONING
    assert prompt.ids == [0, 3, *(9 + byte for byte in "hi é".encode()), 4, 5]
    text = "".join(map(chr, range(1, 300))) + "".join(MARKERS)
    ids = tokenizer.encode(text, add_special=False)
    assert max(ids) < len(MARKERS) + 256
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.token_text(511) == "<511>"


def test_other_random_families_keep_plain_bytes() -> None:
    tools = load_text("random:tiny-qwen3", 300)
    assert tools.format.markup is PLAIN
    assert tools.tokenizer.encode("hi") == [104, 105]
    assert tools.chat_prompt(HI) == byte_text(300).chat_prompt(HI)


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ModelError, match="no room for 9 markers"):
        byte_deepseek(264)
    assert byte_deepseek(265).tokenizer.vocab_size == 265


def folder(path: Path, config: dict, template: str | None = None) -> str:
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer(512, MARKERS)
    tokenizer._backend.save(str(path / "tokenizer.json"))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return str(path)


def test_the_model_type_decides_for_deepseek_v4(tmp_path: Path) -> None:
    tools = load_text(folder(tmp_path, {"model_type": "deepseek_v4"}, "{{ messages }}"), 512)
    assert tools.format.describe()["prompt"] == "deepseek-v4"
    refused = tools.format.describe()["pieces_refused"]
    assert any("encoding_dsv4.py" in reason for reason in refused) or not refused


def test_ids_of_config_and_tokenizer_must_agree(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v4", "bos_token_id": 0, "eos_token_id": 1}
    assert load_text(folder(tmp_path, config), 512).tokenizer.token_id(EOS) == 1
    with pytest.raises(ModelError, match="eos_token_id 2"):
        load_text(folder(tmp_path, config | {"eos_token_id": 2}), 512)


def test_the_template_decides_for_others(tmp_path: Path) -> None:
    tags = "<think></think><tool_call></tool_call>"
    tools = load_text(folder(tmp_path, {"model_type": "qwen3"}, tags), 512)
    assert tools.format.markup is QWEN3
    assert tools.format.describe() == {"prompt": "template", "answer": "qwen3", "tools": True}
    assert tools.markers.symbols.keys() == {"<think>", "</think>"}  # the tokens of this vocabulary
    (tmp_path / "chat_template.jinja").unlink()
    bare = load_text(str(tmp_path), 512)
    assert bare.format.describe() == {"prompt": None, "answer": "plain", "tools": False}
    with pytest.raises(RequestError, match="no chat template"):
        bare.chat_prompt(HI)
