"""GGUF's named pre-tokenisers (``tokenizer.ggml.pre``) as rules of the `tokenizers` library.

The patterns are those of the publishers' ``tokenizer.json``; llama.cpp's `llama-vocab.cpp` names
them and says which imply a BOS token or whole-word look-ups (``ignore_merges``). A name that is
not in `PRETOKENIZERS` is refused: a near miss gives other ids and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import Regex, pre_tokenizers

from metainfer.core.errors import ModelError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _SPACES
)
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_TEKKEN = rf"{_LOWER}|{_UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = (
    rf"{_LOWER}{_CONTRACTIONS}?|{_UPPER}{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule.

    `splits` are applied in order before the byte alphabet; empty means GPT-2's own pattern.
    `digits` splits every digit off first. `nfc` normalises first, as the publisher does.
    `add_bos` is the default when the file does not say.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The rule as one object of the `tokenizers` library."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.splits))
        return pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(digits=True)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)

PRETOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "gpt-2": _GPT2,
        "smollm": _DIGITS,
        "starcoder": _DIGITS,
        "refact": _DIGITS,
        "llama3": _LLAMA_BPE,
        "llama-v3": _LLAMA_BPE,
        "llama-bpe": _LLAMA_BPE,
        "glm4": PreTokenizer((_LLAMA3,)),
        "chatglm-bpe": PreTokenizer((_LLAMA3,)),
        "qwen2": PreTokenizer((_QWEN2,), nfc=True),
        "qwen35": PreTokenizer((_QWEN35,), nfc=True),
        "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
        "gpt-4o": PreTokenizer((_GPT4O,)),
        "llama4": PreTokenizer((_GPT4O,)),
        "deepseek-v3": PreTokenizer(_DEEPSEEK_V3),
    }
)


def pretokenizer(name: object) -> PreTokenizer:
    """The rule called `name`; `ModelError` when it is absent or not known."""
    if isinstance(name, str) and name in PRETOKENIZERS:
        return PRETOKENIZERS[name]
    shown = "does not name its pre-tokeniser" if name is None else f"uses pre-tokeniser {name!r}"
    raise ModelError(
        f"The GGUF file {shown}, whose splitting rule is not known here.",
        f"Known: {', '.join(PRETOKENIZERS)}. Use the publisher's folder with tokenizer.json.",
        code="unsupported_tokenizer",
    )
