"""``tokenizer_folder.py FOLDER``: SmolLM2's tokenizer and `tools.jinja` as transformers reads them.

The model is one GGUF file; tools that count tokens themselves want a folder. What is written is the
tokenizer that the server itself uses, so that a tool's counts and the server's can be compared.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from metainfer.formats.source import resolve
from metainfer.text.tokenizer import Tokenizer

TEMPLATE = Path(__file__).parent / "tools.jinja"


def write(model: str, folder: Path) -> Path:
    """`folder`, made, with the tokenizer of catalogue entry `model`; no weights."""
    source = resolve(model)
    tokenizer = Tokenizer.from_gguf_metadata(source.gguf_metadata)
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    folder.mkdir(parents=True)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "config.json").write_text(json.dumps(dict(source.config)))
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    return folder


if __name__ == "__main__":
    print(write("smollm2-135m", Path(sys.argv[1])))
