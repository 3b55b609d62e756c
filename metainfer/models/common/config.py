"""Typed reading of a checkpoint's ``config.json``: required keys, refused values, unknown keys.

A config key that we do not know may change the meaning of the model; it is refused by name rather
than ignored. Families list the keys that they know to be harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from metainfer.core.errors import ModelError

T = TypeVar("T")

MAX_INT = 2**31 - 1  # no size or count of a model is beyond

# Keys that describe training, provenance or another library's run time; no inference meaning.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "quantization_config",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_version",
        "use_cache",
    }
)


class ConfigReader:
    """Reads keys once each and remembers which; `finish` refuses the ones nobody read."""

    def __init__(self, config: Mapping[str, object], where: str) -> None:
        self._config = config
        self._where = where
        self._read: set[str] = set()

    def required(self, key: str, kind: type[T]) -> T:
        """The value of `key`.

        Raises:
            ModelError: the key is absent or has another type.
        """
        if self._config.get(key) is None:
            raise ModelError(
                f"{self._where} has no {key!r}.",
                "The file is incomplete; fetch the checkpoint again.",
                code="bad_config",
            )
        return self._typed(key, kind)

    def optional(self, key: str, kind: type[T], default: T) -> T:
        """The value of `key`, or `default` when absent or null."""
        if self._config.get(key) is None:
            self._read.add(key)
            return default
        return self._typed(key, kind)

    def null(self, key: str) -> bool:
        """Whether `key` is present and null, which may differ from absent."""
        self._read.add(key)
        return key in self._config and self._config[key] is None

    def mapping(self, key: str) -> Mapping[str, object] | None:
        """A nested table, or None."""
        self._read.add(key)
        value = self._config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(key, value, "a table")
        return value

    def sequence(self, key: str) -> tuple[object, ...] | None:
        """A list, or None."""
        self._read.add(key)
        value = self._config.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self._wrong(key, value, "a list")
        return tuple(value)

    def only(self, key: str, allowed: Iterable[object]) -> object:
        """The value of `key` (or None), which must be one of `allowed`.

        Raises:
            ModelError: the value changes the model in a way that is not built.
        """
        self._read.add(key)
        value = self._config.get(key)
        values = tuple(allowed)
        if value is not None and value not in values:
            raise ModelError(
                f"{self._where} sets {key} = {value!r}, which is not supported.",
                f"Supported: {', '.join(map(repr, values))}.",
                code="unsupported_config",
            )
        return value

    def finish(self) -> None:
        """Refuse every key that was not read and is not known to be harmless."""
        unknown = sorted(set(self._config) - self._read - HARMLESS)
        if unknown:
            raise ModelError(
                f"{self._where} has keys whose meaning is not known here: {', '.join(unknown)}.",
                "They may change the model's answers; report them with the model's name.",
                code="unknown_config_keys",
            )

    def _typed(self, key: str, kind: type[T]) -> T:
        self._read.add(key)
        value = self._config[key]
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise self._wrong(key, value, f"a number up to {MAX_INT}")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)  # type: ignore[return-value]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(key, value, kind.__name__)
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> ModelError:
        shown = repr(value)[:100]
        return ModelError(
            f"{self._where} has {key} = {shown}; {wanted} was expected.",
            "The file is damaged or of another format.",
            code="bad_config",
        )


def token_ids(config: Mapping[str, object], key: str) -> tuple[int, ...]:
    """A token id key that may hold null, one id or a list of ids."""
    value = config.get(key)
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        return tuple(value)
    raise ModelError(
        f"config key {key} = {value!r} is no token id.",
        "Use the publisher's config.json.",
        code="bad_config",
    )
