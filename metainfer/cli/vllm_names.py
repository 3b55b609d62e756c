"""vLLM's spellings of our flags: accepted and mapped, already so, or refused with the reason.

One row a flag. Nothing is ignored: a row has a flag of ours, says that nothing needs to be set, or
is refused. Rows come from the list of flags that operators use most (`vllm serve`, 0.33, as its
documentation has them); a spelling that is on no row is an unknown flag.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from metainfer.core.errors import UsageError

NATIVE = "the checkpoint's headers say how its weights are stored"
FORMAT = "the model's own format decides; /v1/models says which"

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")
_POWERS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30, "": 1}

ANSWERS: dict[str, tuple[str, ...]] = {
    "hermes": ("hermes", "qwen3"),
    "qwen3": ("qwen3",),
    "deepseek_r1": ("think", "qwen3", "deepseek-dsml"),
    "deepseek_v32": ("deepseek-dsml",),
    "deepseek_v4": ("deepseek-dsml",),
}
"""vLLM's names of parsers -> the rows of `text/markup.py` that read the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """One flag of vLLM. `ours`: the flag here. `convert`: its value here, None for "nothing to
    set". `already`: why nothing needs to be set. `refused`: why it cannot be honoured. `takes`: a
    value follows. `part`: a part of ``--parallel``, joined by `parallel`."""

    names: tuple[str, ...]
    ours: str = ""
    convert: Callable[[str], str | None] | None = None
    already: str = ""
    refused: str = ""
    takes: bool = True
    part: str = ""

    @property
    def name(self) -> str:
        return self.names[0]


def count(text: str) -> str | None:
    """``4096``, ``32k`` (1000s), ``32K`` (1024s); ``auto`` and ``-1`` leave it to the planner."""
    if text.lower() in ("auto", "-1"):
        return None
    found = _COUNT.fullmatch(text)
    return text if found is None else str(int(float(found[1]) * _POWERS[found[2]]))


def dtype(text: str) -> str | None:
    """Our name of a type; ``auto`` leaves it to the planner."""
    return None if text == "auto" else {"half": "float16", "float": "float32"}.get(text, text)


def origins(text: str) -> str | None:
    """A JSON list as texts separated by commas."""
    found = json.loads(text)
    if not (isinstance(found, list) and all(isinstance(item, str) for item in found)):
        raise ValueError("it is no JSON list of texts")
    return ",".join(found) or None


def draft(text: str) -> str:
    """``{"method": "ngram", "num_speculative_tokens": 3}`` as ``ngram:3``.

    Raises:
        ValueError: a method or key that cannot be honoured, by name.
    """
    wish = json.loads(text)
    if not isinstance(wish, dict):
        raise ValueError("it is no JSON object")
    method, tokens = wish.pop("method", None), wish.pop("num_speculative_tokens", None)
    ours = {"ngram": "ngram", "mtp": "mtp", "deepseek_mtp": "mtp"}.get(str(method))
    if ours is None:
        raise ValueError(f"method {method!r} is not built; ngram and mtp are")
    if wish:
        raise ValueError(f"{', '.join(sorted(wish))} cannot be set")
    if isinstance(tokens, bool) or not isinstance(tokens, int | None):
        raise ValueError(f"num_speculative_tokens is {tokens!r}")
    return ours if tokens is None else f"{ours}:{tokens}"


def adapter(text: str) -> str:
    """``sql=/path``, or ``{"name": "sql", "path": "/path"}`` as ``sql=/path``.

    Raises:
        ValueError: a key that cannot be honoured, by name.
    """
    if not text.startswith("{"):
        return text
    wish = json.loads(text)
    name, path = wish.pop("name", None), wish.pop("path", None)
    wish.pop("base_model_name", None)  # a note for lists of models
    if wish or not (isinstance(name, str) and isinstance(path, str)):
        raise ValueError(f"name and path are wanted, and no {', '.join(sorted(wish)) or 'more'}")
    return f"{name}={path}"


def grammar(text: str) -> str | None:
    """The library of grammars by our name."""
    ours = {"auto": None, "guidance": "llguidance", "xgrammar": "xgrammar"}
    if text not in ours:
        raise ValueError(f"there are {', '.join(ours)}")
    return ours[text]


def only(*values: str) -> Callable[[str], str | None]:
    """Nothing to set at `values`, refused at any other."""

    def convert(text: str) -> None:
        if text not in values:
            raise ValueError(f"only {' or '.join(values)} is what happens here")

    return convert


def parser(text: str) -> str | None:
    """Nothing to set; the model's format must be one of `ANSWERS`."""
    if text not in ANSWERS:
        raise ValueError(f"no such parser here; there are {', '.join(ANSWERS)}")
    return None


def seconds_for(text: str) -> str:
    """A number of seconds; vLLM counts them, too."""
    float(text)
    return text


MODEL = "MODEL"
"""`Alias.ours` of a flag that is the first word here."""

ALIASES: tuple[Alias, ...] = (
    Alias(names=("--model",), ours=MODEL),
    Alias(names=("--max-model-len",), ours="--context", convert=count),
    Alias(names=("--max-num-seqs",), ours="--concurrency", convert=count),
    Alias(names=("--max-num-batched-tokens",), ours="--chunk-tokens", convert=count),
    Alias(names=("--block-size",), ours="--page-tokens"),
    Alias(names=("--gpu-memory-utilization",), ours="--memory-share"),
    Alias(names=("--kv-cache-memory-bytes",), ours="--kv-memory"),
    Alias(names=("--tensor-parallel-size", "-tp"), ours="--parallel", part="tensor"),
    Alias(names=("--data-parallel-size", "-dp"), ours="--parallel", part="data"),
    Alias(names=("--enable-expert-parallel", "-ep"), ours="--parallel", part="expert", takes=False),
    Alias(names=("--pipeline-parallel-size", "-pp"), already="one stage", convert=only("1")),
    Alias(names=("--speculative-config",), ours="--draft", convert=draft),
    Alias(names=("--lora-modules",), ours="--adapter", convert=adapter),
    Alias(names=("--enable-lora",), already="an adapter that is named is served", takes=False),
    Alias(names=("--max-loras", "--max-cpu-loras"), already="all that are named are on the device"),
    Alias(names=("--max-lora-rank",), already="the adapters' own ranks decide"),
    Alias(names=("--no-enable-prefix-caching",), ours="--no-prefix-cache", takes=False),
    Alias(names=("--enable-prefix-caching",), already="prefixes are cached", takes=False),
    Alias(names=("--enable-chunked-prefill",), already="prompts are cut into chunks", takes=False),
    Alias(
        names=("--kv-cache-dtype",),
        already="the cache has the model's type (DeepSeek-V4: --layout kv=latent-fp8@1 for FP8)",
        convert=only("auto"),
    ),
    Alias(names=("--max-num-queued-reqs",), ours="--max-pending"),
    Alias(names=("--max-queued-requests",), ours="--max-pending"),
    Alias(names=("--shutdown-timeout",), ours="--drain-grace", convert=seconds_for),
    Alias(names=("--sse-keep-alive-interval",), ours="--keep-alive", convert=seconds_for),
    Alias(names=("--allowed-origins",), ours="--cors-origin", convert=origins),
    Alias(names=("--guided-decoding-backend",), ours="--grammar-backend", convert=grammar),
    Alias(names=("--otlp-traces-endpoint",), ours="--otlp-endpoint"),
    Alias(names=("--enable-auto-tool-choice",), already=FORMAT, takes=False),
    Alias(names=("--tool-call-parser",), already=FORMAT, convert=parser),
    Alias(names=("--reasoning-parser",), already=FORMAT, convert=parser),
    Alias(names=("--enable-reasoning",), already=FORMAT, takes=False),
    Alias(
        names=("--enable-request-id-headers",),
        already="every answer carries x-request-id",
        takes=False,
    ),
    Alias(names=("--enable-prompt-tokens-details",), already="usage always has them", takes=False),
    Alias(names=("--disable-log-requests",), already="requests are not logged", takes=False),
    Alias(names=("--no-enable-log-requests",), already="requests are not logged", takes=False),
    Alias(
        names=("--trust-remote-code",), already="no code of a checkpoint is ever run", takes=False
    ),
    Alias(
        names=("--generation-config",),
        already="sampling defaults are the API's",
        convert=only("vllm"),
    ),
    Alias(names=("--stream-interval",), already="every token is an event", convert=only("1")),
    Alias(
        names=("--scheduling-policy",),
        already="requests run by priority, then by arrival",
        convert=only("fcfs", "priority"),
    ),
    Alias(names=("--load-format",), already=NATIVE, convert=only("auto", "safetensors")),
    Alias(names=("--quantization", "-q"), refused=NATIVE),
    Alias(names=("--tokenizer",), refused="the tokenizer is read from the model's own files"),
    Alias(names=("--hf-overrides",), refused="a model's configuration is taken as it is"),
    Alias(names=("--enforce-eager",), ours="--no-graphs", takes=False),
    Alias(names=("--no-async-scheduling",), ours="--no-overlap", takes=False),
    Alias(names=("--swap-space",), refused="there is no cache outside the device yet"),
    Alias(names=("--cpu-offload-gb",), refused="weights are not kept outside the device"),
    Alias(names=("--no-enable-chunked-prefill",), refused="prompts are always cut", takes=False),
    Alias(names=("--distributed-executor-backend",), refused="workers are our own processes"),
    Alias(names=("--override-generation-config",), refused="requests say how they are sampled"),
    Alias(
        names=("--disable-custom-all-reduce",),
        refused="the plan decides on collectives; see plan",
        takes=False,
    ),
)

BY_NAME: dict[str, Alias] = {name: alias for alias in ALIASES for name in alias.names}


def is_part(name: str) -> bool:
    """Whether a spelling is a part of ``--parallel``."""
    alias = BY_NAME.get(name)
    return alias is not None and bool(alias.part)


def equals(flag: str) -> tuple[str, ...]:
    """vLLM's spellings of our `flag`."""
    return tuple(name for alias in ALIASES if alias.ours == flag for name in alias.names)


def value_of(alias: Alias, text: str) -> str | None:
    """The value here, or None when nothing is to be set.

    Raises:
        UsageError: it cannot be honoured.
    """
    if alias.refused:
        raise UsageError(
            f"{alias.name} of vLLM cannot be honoured: {alias.refused}.",
            "Leave it out.",
            code="unsupported_flag",
        )
    if alias.convert is None:
        return None if alias.already else text
    try:
        return alias.convert(text)
    except ValueError as error:
        raise UsageError(
            f"{alias.name} {text!r} of vLLM cannot be honoured: {error}.",
            f"It is {alias.ours} here." if alias.ours else f"Leave it out: {alias.already}.",
            code="unsupported_flag",
        ) from error


def parallel(parts: dict[str, str]) -> str:
    """The layout that ``-tp``, ``-dp`` and ``-ep`` name together, as ``--parallel`` has it.

    Raises:
        UsageError: a size that is no count.
    """
    sizes = {}
    for part in ("tensor", "data"):
        text = parts.get(part, "1")
        if not text.isdigit() or not int(text):
            raise UsageError(f"--{part}-parallel-size {text!r} is no count.", "Write a number.")
        sizes[part] = int(text)
    tensor, data = sizes["tensor"], sizes["data"]
    if tensor * data == 1:
        return "single"
    cut = f"tp{tensor}" if tensor > 1 else ""
    if "expert" in parts:
        return f"{cut}ep{tensor * data}"
    return f"{data}x{cut}" if data > 1 else cut
