"""Tokenizers of every kind, made in the test run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = ["Hello world, it's 2026! naïve café 你好世界 안녕 😀😃 <x> def f(a): return a+1\n"] * 3


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<s>", "</s>", "<|im end|>"])
    backend.add_tokens(
        [AddedToken("<é>", normalized=False), AddedToken("<tool>", normalized=False)]
    )
    return backend


def sentencepiece_backend(strip: bool = True) -> tokenizers.Tokenizer:
    """Llama-2's arrangement: ``▁`` for spaces, a token for every byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "你", "▁▁", "he", "lo", "▁he"]
    merges = [("h", "e"), ("l", "o"), ("▁", "▁"), ("▁", "he")]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def metaspace_backend() -> tokenizers.Tokenizer:
    vocab = {p: i for i, p in enumerate(["<unk>", "</s>", "▁", "▁a", "b", "▁▁c", "é", "你"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


def wordpiece_backend() -> tokenizers.Tokenizer:
    words = ["[UNK]", "[SEP]", "un", "##able", "able", "##s", "你", "é", "."]
    backend = tokenizers.Tokenizer(
        models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return backend


def words_backend() -> tokenizers.Tokenizer:
    words = {w: i for i, w in enumerate(["<unk>", "red", "green", "blue", "é"])}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<end>"])
    return backend


BACKENDS = {
    "bytes": byte_level_backend,
    "pieces": sentencepiece_backend,
    "pieces-unstripped": lambda: sentencepiece_backend(False),
    "metaspace": metaspace_backend,
    "wordpiece": wordpiece_backend,
    "words": words_backend,
}


def save_folder(folder: Path, backend: tokenizers.Tokenizer, **files: Mapping[str, Any]) -> Path:
    """A tokenizer folder; keyword names are file stems."""
    backend.save(str(folder / "tokenizer.json"))
    for stem, body in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(body))
    return folder
