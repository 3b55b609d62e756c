"""Writes pre_vocab.json: a small byte-level vocabulary whose merges cross every word border.

Trained without any pre-tokeniser, so token ids show where a rule puts its borders.
`make_pre_ids.mjs` then asks an independent engine for the ids under each rule.

    python tests/text/golden/make_pre.py FOLDER      (FOLDER gets one vocabulary-only GGUF per rule)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from metainfer.text.pretokenizers import PRETOKENIZERS

HERE = Path(__file__).parent

TEXTS = [
    "Hello world! It's 2026; they're 12345678 and I'LL say 3.14",
    "  leading, trailing  \n\n\ttabs\r\n  x = y+1;\n",
    "don't DON'T we've We'Ve O'Brien's 'tis",
    "fn(a,b){return a<=b&&!c||d;} //---- path/to/file.txt\n/\n",
    "camelCaseWord HTTPServer iPhone McDonald ABCdef abcDEF",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m \u00df\u00dc",
    "\u4f60\u597d\u4e16\u754c\uff0c123\u5929\u3002\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf",
    "\uc548\ub155 \ud558\uc138\uc694 12",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643 \u0661\u0662\u0663\u0664",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440 99",
    "\U0001f600\U0001f603 a\U0001f468\u200d\U0001f469b \u00bd\u00b2\u2167",
    "a\u00a0b\u3000c  d   e    f\n \n  \n",
    "100,000.50 1 22 333 4444 55555 666666",
    "$5 #tag @user _x_ __init__ a_b-c",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
]


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    # The byte alphabet alone: `use_regex=False` leaves each text in one piece.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        min_frequency=1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    body = {"texts": TEXTS, "tokens": tokens, "merges": [" ".join(m) for m in model["merges"]]}
    (HERE / "pre_vocab.json").write_text(json.dumps(body, indent=0) + "\n")
    for name in PRETOKENIZERS:
        write_gguf(Path(sys.argv[1]) / f"{name}.gguf", name, tokens, body["merges"])


def write_gguf(path: Path, pre: str, tokens: list[str], merges: list[str]) -> None:
    """A file that holds a tokenizer and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
