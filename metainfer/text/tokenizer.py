"""`Tokenizer`: ids from text and back, over the `tokenizers` library.

Built from a Hugging Face folder or from GGUF metadata. As in `transformers` 5, which special tokens
`encode` adds is the post-processor's affair: ``add_bos_token`` of ``tokenizer_config.json`` is
not looked at. A text that spells a special token is read as that token unless
``parse_special=False``, also as there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from metainfer.core.errors import ModelError, RequestError
from metainfer.text.pieces import PieceDecoder, piece_decoder
from metainfer.text.pretokenizers import pretokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_ROLES = ("bos", "eos", "pad", "unk")
_SHORT_CHARS = 4096


class Tokenizer:
    """Ids lie in ``range(vocab_size)``; some of them may stand for nothing (padding)."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        vocab_size: int = 0,
    ) -> None:
        """`special_tokens` maps ``bos_token`` and the like to text. `add_bos` and `add_eos` both
        None leaves added tokens to the backend's post-processor."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._literal: dict[bool, tokenizers.Tokenizer] = {}  # by whether all added are literal
        self._lock = threading.Lock()
        self._template = add_bos is None and add_eos is None
        self._add_bos, self._add_eos = bool(add_bos), bool(add_eos)
        self.special_tokens = dict(special_tokens or {})
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in self._added.items() if token.special)
        self.bos_id = self._role_id("bos")
        self.pad_id = self._role_id("pad")
        own = self._role_id("eos")
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([] if own is None else [own])]))
        self.pieces: PieceDecoder = piece_decoder(_decoder_json(backend))
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab_size, max(vocab.values(), default=-1) + 1)
        self._bytes: dict[int, bytes] = {}

    @property
    def added_ids(self) -> tuple[int, ...]:
        """Ids of the added vocabulary, special or not, in order."""
        return tuple(sorted(self._added))

    def _role_id(self, role: str) -> int | None:
        text = self.special_tokens.get(f"{role}_token")
        return None if text is None else self._backend.token_to_id(text)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From ``tokenizer.json`` and the files beside it; `ModelError` when missing or bad."""
        folder = Path(path)
        source = folder / "tokenizer.json"
        if not source.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json.",
                "Download it with the model; one with only tokenizer.model must be converted "
                "(transformers: AutoTokenizer(...).save_pretrained).",
                code="missing_tokenizer",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(source))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(
                f"{source} cannot be read: {error}.", "Download it again.", code="bad_tokenizer"
            ) from error
        config = read_json(folder / "tokenizer_config.json")
        special = special_token_texts(read_json(folder / "special_tokens_map.json"))
        special.update(special_token_texts(config))
        _add_config_tokens(backend, config)
        missing = [text for text in special.values() if backend.token_to_id(text) is None]
        backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in missing])
        generation = read_json(folder / "generation_config.json")
        if "eos_token_id" not in generation:
            generation = read_json(folder / "config.json")
        return cls(
            backend,
            special_tokens=special,
            eos_ids=_id_list(generation.get("eos_token_id")),
        )

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuilt from GGUF keys; `ModelError` for tokenizers other than known byte-level BPE."""
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            shown = "no tokenizer" if model is None else f"a {model!r} tokenizer"
            raise ModelError(
                f"The GGUF file holds {shown}; only byte-level BPE ('gpt2') is read from GGUF.",
                "Use the publisher's folder with tokenizer.json.",
                code="unsupported_tokenizer",
            )
        rule = pretokenizer(metadata.get("tokenizer.ggml.pre"))
        tokens = _list(metadata, "tokens", str)
        types = _list(metadata, "token_type", int, default=[1] * len(tokens))
        if len(types) != len(tokens):
            raise _bad_gguf(f"{len(tokens)} tokens and {len(types)} token types")
        merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges", str)]
        vocab = {
            token: place
            for place, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind != _UNUSED
        }
        try:
            if any(len(merge) != 2 for merge in merges):
                raise _bad_gguf("a merge that is not two tokens")
            backend = tokenizers.Tokenizer(
                models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges)
            )
        except ModelError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise _bad_gguf(str(error)) from error
        if rule.nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = rule.build()
        backend.decoder = decoders.ByteLevel()
        for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            chosen = [t for t, k in zip(tokens, types, strict=True) if k == kind and t]
            batch = [AddedToken(t, normalized=False, special=special) for t in chosen]
            (backend.add_special_tokens if special else backend.add_tokens)(batch)
        return cls(
            backend,
            special_tokens=_gguf_special(metadata, tokens),
            eos_ids=_gguf_eos(metadata, len(tokens)),
            add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", rule.add_bos)),
            add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
            vocab_size=len(tokens),
        )

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds BOS/EOS as the model's files say; a rendered chat template already
        holds them, so pass False for it. `parse_special=False` reads spelled-out special tokens
        as plain text. Other threads run while a long text is read. `RequestError` when `text` is
        not valid Unicode (a lone surrogate).
        """
        backend = self._backend if parse_special else self._literal_backend(False)
        added = add_special and self._template
        ids = _encode(backend, text, added)
        if add_special and not self._template:
            if self._add_bos and self.bos_id is not None:
                ids = [self.bos_id, *ids]
            if self._add_eos and self.eos_ids:
                ids = [*ids, self._role_id("eos") or self.eos_ids[0]]
        return ids

    def encode_literal(self, text: str) -> list[int]:
        """Ids of `text` without any token of the added vocabulary, special or not: how a
        message is read in prompts whose markers a user must not be able to spell."""
        return _encode(self._literal_backend(True), text, False)

    def _literal_backend(self, whole: bool) -> tokenizers.Tokenizer:
        with self._lock:
            if whole not in self._literal:
                state = json.loads(self._backend.to_str())
                for token in state["added_tokens"] if whole else ():
                    token["special"] = True
                copy = tokenizers.Tokenizer.from_str(json.dumps(state))
                copy.encode_special_tokens = True
                self._literal[whole] = copy
            return self._literal[whole]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; ids that stand for nothing are skipped, invalid UTF-8 is U+FFFD."""
        kept = self.visible(ids, skip_special)
        if self.pieces.kind == "generic":
            return self._backend.decode(kept, skip_special_tokens=False)
        text = self.join(kept).decode("utf-8", errors="replace")
        strip = self.pieces.strip_left
        while strip and text.startswith(" "):
            text, strip = text[1:], strip - 1
        return text

    def visible(self, ids: Iterable[int], skip_special: bool) -> list[int]:
        """`ids` without unknown ones and, on request, without special ones."""
        return [i for i in ids if self.is_known(i) and not (skip_special and i in self._special)]

    def join(self, ids: Sequence[int], *, at_start: bool = True) -> bytes:
        """Bytes of visible ids; `at_start` applies the rule for a text's first token."""
        if at_start and ids and self.pieces.drop_first:
            head = self._token(ids[0]) or ""
            first = self.pieces.piece(head, added=ids[0] in self._added, first=True)
            return first + b"".join(map(self.token_bytes, ids[1:]))
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for; empty when it stands for nothing."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._token(token_id)
            added = token_id in self._added
            found = b"" if token is None else self.pieces.piece(token, added=added)
            if token is not None:
                self._bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, for people; bytes that are no whole character are U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled `text` in the vocabulary, or None."""
        return self._backend.token_to_id(text)

    def is_special(self, token_id: int) -> bool:
        """Whether the vocabulary marks `token_id` as a special (control) token."""
        return token_id in self._special

    def is_known(self, token_id: int) -> bool:
        """Whether `token_id` stands for a token."""
        return token_id in self._bytes or self._token(token_id) is not None

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        added = self._added.get(token_id)
        return self._backend.id_to_token(token_id) if added is None else added.content


def _encode(backend: tokenizers.Tokenizer, text: str, add_special: bool) -> list[int]:
    try:
        if len(text) <= _SHORT_CHARS:
            encoding = backend.encode(text, add_special_tokens=add_special)
        else:
            # `encode` keeps the interpreter locked, for seconds on a megabyte. A batch does
            # not, but may wait for others' batches, which a short text must not.
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special)
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError(
            "The text is not valid Unicode: it holds half of a surrogate pair.",
            "Send UTF-8 text.",
            code="invalid_text",
        ) from error
    ids: list[int] = encoding.ids
    return ids


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty when there is no such file; `ModelError` when bad."""
    if not path.is_file():
        return {}
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "Download it again.") from error
    if not isinstance(body, dict):
        raise ModelError(f"{path} does not hold a JSON object.", "Download it again.")
    return body


def special_token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like from a config that gives them as text or as an object."""
    found = {}
    for role in _ROLES:
        value = config.get(f"{role}_token")
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str) and value:
            found[f"{role}_token"] = value
    return found


def _add_config_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only ``added_tokens_decoder`` declares, or declares special there."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    known = backend.get_added_tokens_decoder()
    for key, entry in sorted(listed.items(), key=lambda item: (len(item[0]), item[0])):
        content = entry.get("content") if isinstance(entry, Mapping) else None
        if not isinstance(content, str) or not content:
            continue
        special = bool(entry.get("special"))
        present = known.get(-1 if (at := backend.token_to_id(content)) is None else at)
        if present is not None and (present.special or not special):
            continue
        flags = {n: bool(entry.get(n)) for n in ("lstrip", "rstrip", "normalized", "single_word")}
        token = AddedToken(content, special=special, **flags)
        (backend.add_special_tokens if special else backend.add_tokens)([token])
        if str(backend.token_to_id(content)) != key:
            raise ModelError(
                f"tokenizer_config.json gives {content!r} the id {key}, tokenizer.json "
                f"{backend.token_to_id(content)}.",
                "The two files belong to different downloads; download both again.",
                code="bad_tokenizer",
            )


def _decoder_json(backend: tokenizers.Tokenizer) -> Mapping[str, Any] | None:
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _id_list(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _bad_gguf(what: str) -> ModelError:
    return ModelError(
        f"The GGUF file's tokenizer is not usable: {what}.",
        "Convert the model again with a current llama.cpp.",
        code="bad_tokenizer",
    )


def _list(
    metadata: Mapping[str, Any], key: str, kind: type, default: list[Any] | None = None
) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise _bad_gguf(f"tokenizer.ggml.{key} is missing or not a list of {kind.__name__}")
    return value


def _gguf_special(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    found = {}
    for key, role in names.items():
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(value, int) and 0 <= value < len(tokens):
            found[f"{role}_token"] = tokens[value]
    return found


def _gguf_eos(metadata: Mapping[str, Any], size: int) -> list[int]:
    values = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return [v for v in values if isinstance(v, int) and 0 <= v < size]
