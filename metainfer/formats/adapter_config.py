"""``adapter_config.json`` of PEFT: plain LoRA or a list of what it is instead. No torch.

Which module has which rank and scale follows PEFT's own rules (its `LoraConfig` and
`check_target_module_exists`): `scale = alpha / r`, with ``use_rslora`` `alpha / sqrt(r)`; a pattern
is a regular expression that the end of a module's name matches, and overrides rank or alpha there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from metainfer.core.verdict import Reason

CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"
MOST_RANK = 4096
MOST_ALPHA = 1e6

_EMPTY: tuple[object, ...] = (None, False, "", "none", [], {})

#: Keys that do not change what a loaded adapter computes.
_HARMLESS = frozenset(
    {
        "arrow_config", "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config",
        "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip

#: Keys that ask for something other than plain LoRA on matrices, and what it is.
_OTHER = {
    "use_dora": "DoRA (use_dora)",
    "use_qalora": "QALoRA (use_qalora)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "kasa_config": "KaSA (kasa_config)",
    "velora_config": "VeLoRA (velora_config)",
    "monteclora_config": "MonteCLoRA (monteclora_config)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "lora_bias": "biases on B (lora_bias)",
    "bias": "trained biases (bias)",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trained token rows (trainable_token_indices)",
    "target_parameters": "parameters instead of modules (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "megatron_config": "Megatron's parallel layers (megatron_config)",
}  # fmt: skip

#: Initialisations that leave the base weights as they are; others subtract from them.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")

_READ = frozenset(
    {
        "alpha_pattern", "base_model_name_or_path", "exclude_modules", "init_lora_weights",
        "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern",
        "target_modules", "use_rslora",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What a plain LoRA configuration says. `targets`, `excluded`: ends of module names, or one
    regular expression. `layers` narrows a list of targets to some layers, None: all."""

    base: str
    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def targets_module(self, module: str) -> bool:
        """Whether the module (``model.layers.0.self_attn.q_proj``) has a pair."""
        if self.excluded and _names(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            if self.targets.lower() == ALL_LINEAR:
                return not module.endswith(("lm_head", "embed_tokens"))
            return _names(self.targets, module)
        return _names(self.targets, module) and (self.layers is None or self._in_layers(module))

    def rank_of(self, module: str) -> int:
        return self.rank_pattern.get(_pattern(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product B A counts."""
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, module), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def _in_layers(self, module: str) -> bool:
        heads = [_in_list(each) for each in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        for head in heads:
            found = re.match(head, module)
            if found:
                return int(found[1]) in (self.layers or ())
        return False


def _names(targets: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == each or module.endswith(f".{each}") for each in targets)


def _pattern(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that matches the whole module name, or its end after a dot."""
    for pattern in patterns:
        if re.match(_at_end(pattern), module):
            return pattern
    return module


def _at_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _in_list(name: str) -> str:
    """A layer's number, after the name of the list that it stands in."""
    return rf"(?:^|.*?\.){name}\.(\d+)\."


def read_adapter_config(body: Mapping[str, object]) -> tuple[AdapterConfig | None, list[Reason]]:
    """The configuration, None where it cannot be read, and every reason against it."""
    kind = body.get("peft_type")
    if kind != "LORA":
        return None, [_reason(f"peft_type is {kind!r}; only LORA is served")]
    reasons = [
        _reason(f"it holds {what}, which is not served")
        for key, what in _OTHER.items()
        if body.get(key) not in _EMPTY
    ]
    init = body.get("init_lora_weights")
    if init not in _INITS:
        reasons.append(
            _reason(f"init_lora_weights {init!r} changes the base weights, which stay as they are")
        )
    known = _HARMLESS | _READ | _OTHER.keys()
    strange = sorted(key for key in body if key not in known and body[key] not in _EMPTY)
    reasons += [_reason(f"its key {key!r} is not known here") for key in strange]
    fields = _Fields(body)
    layers, patterns = body.get("layers_to_transform"), body.get("layers_pattern")
    config = AdapterConfig(
        base=str(body.get("base_model_name_or_path") or ""),
        rank=fields.number("r", 8, _is_rank, f"a whole number from 1 to {MOST_RANK}"),
        alpha=fields.number("lora_alpha", 8, _is_scale, f"a number up to {MOST_ALPHA:g}"),
        rslora=body.get("use_rslora") is True,
        targets=fields.modules("target_modules", wanted=True),
        excluded=fields.modules("exclude_modules"),
        layers=None if layers in (None, []) else fields.integers("layers_to_transform"),
        layers_pattern=fields.expressions([patterns] if isinstance(patterns, str) else patterns),
        rank_pattern=fields.patterns("rank_pattern", _is_rank),
        alpha_pattern=fields.patterns("alpha_pattern", _is_scale),
    )
    reasons += fields.faults
    return (None if fields.faults else config), reasons


def _reason(message: str) -> Reason:
    return Reason("adapter-config", message)


def _is_rank(value: object) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 1 <= value <= MOST_RANK  # type: ignore[operator]


def _is_scale(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -MOST_ALPHA <= value <= MOST_ALPHA  # type: ignore[operator]


class _Fields:
    """Typed reading that notes every fault instead of stopping at the first."""

    def __init__(self, body: Mapping[str, object]) -> None:
        self._body = body
        self.faults: list[Reason] = []

    def _wrong(self, key: str, value: object, wanted: str) -> None:
        self.faults.append(_reason(f"{key} is {repr(value)[:100]}; {wanted} was expected"))

    def number(self, key: str, default: int, good: Callable[[object], bool], wanted: str) -> int:
        value = self._body.get(key, default)
        if good(value):
            return value  # type: ignore[return-value]
        self._wrong(key, value, wanted)
        return default

    def modules(self, key: str, *, wanted: bool = False) -> tuple[str, ...] | str:
        value = self._body.get(key)
        if isinstance(value, str) and value:
            return value if value.lower() == ALL_LINEAR or self._compiles(key, value) else ""
        if isinstance(value, list) and all(isinstance(each, str) and each for each in value):
            if value or not wanted:
                return tuple(value)
        elif value in (None, "") and not wanted:
            return ()
        self._wrong(key, value, "a list of module names, or one expression")
        return ()

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._body.get(key)
        values = value if isinstance(value, list) else [value]
        if all(isinstance(each, int) and not isinstance(each, bool) for each in values):
            return tuple(values)
        self._wrong(key, value, "layer numbers")
        return ()

    def expressions(self, value: object) -> tuple[str, ...]:
        if value in (None, "", [""]):
            return ()
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(each for each in value if self._compiles("layers_pattern", _in_list(each)))
        self._wrong("layers_pattern", value, "names of layer lists")
        return ()

    def patterns(self, key: str, good: Callable[[object], bool]) -> dict[str, int]:
        value = self._body.get(key) or {}
        if not isinstance(value, Mapping):
            self._wrong(key, value, "a table of patterns")
            return {}
        for pattern, number in value.items():
            if not good(number):
                self._wrong(f"{key} of {pattern!r}", number, "a number in range")
            self._compiles(key, _at_end(pattern))
        return dict(value)

    def _compiles(self, key: str, expression: str) -> bool:
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            self._wrong(key, expression, f"a regular expression ({error})")
            return False
        return True
