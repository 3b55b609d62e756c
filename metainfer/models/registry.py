"""Which families exist: config -> `Arch`, `Arch` -> model class. Lazy, torch-free until a model
is built.

A new family is a folder and one row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from metainfer.core.errors import ModelError
from metainfer.formats.completeness import Names
from metainfer.formats.drawn import Drawn
from metainfer.formats.index import TensorInfo
from metainfer.kernels.impl import resolve_attribute
from metainfer.models.arch import Arch


@dataclass(frozen=True, slots=True)
class Family:
    """`read_arch`: ``module:function`` of config -> Arch. `build`: of (arch, weights ...) -> model.
    `random`: ``module:function`` of nothing -> {name: config} for ``random:`` references.
    `with_layers`: of (config, layers) -> config, where a config lists things per layer. `names`: of
    (arch, config, stored tensors, FP8 block) -> `Names`, where files spell them differently.
    `drafter`: of (model, packed, plain, the draft's caches, op table) -> what proposes tokens.
    `draws`: of (arch, config) -> {name: `Drawn`}, where random weights are not all BF16. `missing`:
    what this release lacks to run the family, which is planned only and has no `build`."""

    model_types: tuple[str, ...]
    read_arch: str
    build: str
    random: str
    with_layers: str = ""
    names: str = ""
    draws: str = ""
    drafter: str = ""
    missing: tuple[str, ...] = ()


FAMILIES = (
    Family(
        ("llama", "mistral", "qwen2", "qwen3"),
        "metainfer.models.dense.arch:read_arch",
        "metainfer.models.dense.build:build",
        "metainfer.models.dense.shapes:random_configs",
    ),
    Family(
        ("deepseek_v4",),
        "metainfer.models.deepseek_v4.config:read_arch",
        "metainfer.models.deepseek_v4.build:build",
        "metainfer.models.deepseek_v4.shapes:random_configs",
        with_layers="metainfer.models.deepseek_v4.shapes:with_layers",
        names="metainfer.models.deepseek_v4.names:checkpoint_names",
        draws="metainfer.models.deepseek_v4.draws:draws",
        drafter="metainfer.models.deepseek_v4.draft:MtpDrafter",
    ),
    Family(
        ("deepseek_v32", "glm_moe_dsa"),
        "metainfer.models.dsa.config:read_arch",
        "",
        "metainfer.models.dsa.shapes:random_configs",
        names="metainfer.models.dsa.names:checkpoint_names",
        draws="metainfer.models.dsa.draws:draws",
        missing=(
            "an indexer over every token",
            "sparse attention over latents with a value of its own width",
            "a router of sigmoid scores and groups",
            "a model that puts them together",
        ),
    ),
)


def family_of(config: Mapping[str, object], where: str) -> Family:
    """The family that serves a config's ``model_type``.

    Raises:
        ModelError: none does; lists what is served.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    served = [name for family in FAMILIES if family.build for name in family.model_types]
    raise ModelError(
        f"{where} is a {model_type!r} model, which is not served.",
        f"Served: {', '.join(served)}.",
        code="unsupported_model",
    )


def read_arch(config: Mapping[str, object], where: str) -> Arch:
    """Read a checkpoint's config into its family's `Arch`."""
    reader: Callable[..., Any] = resolve_attribute(family_of(config, where).read_arch)
    arch: Arch = reader(config, where)
    return arch


def random_config(name: str, params: Mapping[str, str]) -> dict[str, object]:
    """The config behind ``random:<name>?...``; `params` may set ``layers``.

    Raises:
        ModelError: no such shape, or a parameter that is not understood.
    """
    shapes: dict[str, dict[str, object]] = {}
    for family in FAMILIES:
        listed: Any = resolve_attribute(family.random)()
        shapes.update(listed)
    if name not in shapes:
        raise ModelError(
            f"there is no random model {name!r}.",
            f"There is: {', '.join(sorted(shapes))}.",
            code="unknown_model",
        )
    config = dict(shapes[name])
    for key, value in params.items():
        if key == "layers" and value.isdigit() and int(value) > 0:
            config = _cut(config, int(value))
        elif key != "seed" or not value.isdigit():
            raise ModelError(
                f"random:{name} does not understand {key}={value!r}.",
                "It takes layers=N (at least 1) and seed=N.",
                code="bad_model_reference",
            )
    return config


def _cut(config: dict[str, object], layers: int) -> dict[str, object]:
    reference = family_of(config, "random").with_layers
    if not reference:
        return {**config, "num_hidden_layers": layers}
    cut: Callable[..., Any] = resolve_attribute(reference)
    result: dict[str, object] = cut(config, layers)
    return result


def checkpoint_names(
    arch: Arch,
    config: Mapping[str, object],
    tensors: Mapping[str, TensorInfo],
    block: tuple[int, int] | None,
) -> Names:
    """Stored tensors by the names of `arch`: their own, unless its family knows other spellings."""
    reference = family_of(config, "the config").names
    if not reference:
        return Names(tensors=dict(tensors))
    resolver: Callable[..., Any] = resolve_attribute(reference)
    found: Names = resolver(arch, config, tensors, block)
    return found


def random_draws(arch: Arch, config: Mapping[str, object]) -> dict[str, Drawn]:
    """What each tensor of a random model is like: BF16, matrices of deviation 0.02 (as
    `transformers` initialises), norms around 1, unless its family says otherwise."""
    reference = family_of(config, "random").draws
    if reference:
        drawing: Callable[..., Any] = resolve_attribute(reference)
        listed: dict[str, Drawn] = drawing(arch, config)
        return listed
    found: dict[str, Drawn] = {}
    for spec in (*arch.packed_weights(), *arch.plain_weights()):
        shapes = spec.tensor_shapes()
        for name, shape in zip(spec.tensors, shapes, strict=True):
            mean = 1.0 if len(shape) == 1 and name.endswith(".weight") else 0.0
            found[name] = Drawn(shape, "BF16", mean=mean)
        found |= {n: Drawn(s[:1], "BF16") for n, s in zip(spec.bias, shapes, strict=False)}
    return found
