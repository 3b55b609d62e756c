"""Model references: from what the user typed to a place and a config. No torch, no network.

The one exception to "no network" is a catalogue name whose file is not cached yet; pass
``fetch=False`` to refuse instead.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from metainfer.core.errors import ModelError, UsageError
from metainfer.formats import catalogue, gguf_header, gguf_names
from metainfer.formats.safetensors_header import load_json_object

Kind = Literal["folder", "gguf", "random"]
Origin = Literal["path", "hub-cache", "modelscope-cache", "catalogue", "random"]


@dataclass(frozen=True, slots=True)
class RandomRef:
    """``random:<family>?k=v&...`` parsed; what a parameter means is the model family's affair."""

    family: str
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved reference.

    `config` has ``config.json``'s keys (synthesised for GGUF, empty for random);
    `generation_config` likewise; `gguf_metadata` is GGUF's key-value map, else empty.
    """

    reference: str
    kind: Kind
    origin: Origin
    path: Path | None
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    gguf_metadata: Mapping[str, Any] = field(default_factory=dict)
    random: RandomRef | None = None


_FAMILY = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
_KEY = re.compile(r"[a-z][a-z0-9_]*")
_VALUE = re.compile(r"[A-Za-z0-9._,:+-]+")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def parse_random(reference: str) -> RandomRef:
    """`RandomRef` of ``random:<family>[?k=v[&k=v...]]``; `UsageError` names the wrong part."""
    head, mark, query = reference.removeprefix("random:").partition("?")
    remedy = "The form is random:<family>[?layers=N&seed=S&...]."
    if not reference.startswith("random:") or not _FAMILY.fullmatch(head):
        raise UsageError(f"{reference!r} names no model family.", remedy)
    params: dict[str, str] = {}
    for pair in query.split("&") if mark else []:
        key, equals, value = pair.partition("=")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise UsageError(f"{pair!r} in {reference!r} is not key=value.", remedy)
        if key in params:
            raise UsageError(f"{reference!r} gives {key} twice.", remedy)
        params[key] = value
    return RandomRef(head, MappingProxyType(params))


def resolve(
    reference: str, *, fetch: bool = True, env: Mapping[str, str] | None = None
) -> ModelSource:
    """The source that `reference` names.

    In order: ``random:``, an existing path, a catalogue name, a name in the local Hugging Face
    or ModelScope cache. Raises `ModelError` (or `UsageError` for a malformed ``random:``).
    """
    env = os.environ if env is None else env
    if not reference or "\0" in reference:
        raise UsageError("The model reference is empty or holds a NUL byte.", _FORMS)
    if reference.startswith("random:"):
        parsed = parse_random(reference)
        return ModelSource(reference, "random", "random", None, {}, random=parsed)
    path = _expanded(reference)
    if _exists(path):
        return _from_path(reference, path, "path")
    if reference in catalogue.CATALOGUE:
        return _from_path(reference, _from_catalogue(reference, fetch, env), "catalogue")
    if _REPO.fullmatch(reference):
        for origin, found in (
            ("hub-cache", _in_hub_cache(reference, env)),
            ("modelscope-cache", _in_modelscope_cache(reference, env)),
        ):
            if found is not None:
                return _from_path(reference, found, origin)  # type: ignore[arg-type]
    raise _unknown(reference)


_FORMS = (
    "Pass a model folder, a .gguf file, the name of a model in the local Hugging Face or "
    "ModelScope cache, a catalogue name, or random:<family>."
)


def _expanded(path: str) -> Path:
    # Unlike Path.expanduser, leaves an unknown user's home as it is instead of raising.
    return Path(os.path.expanduser(path))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # for example a name longer than the file system allows
        return False


def _unknown(reference: str) -> ModelError:
    near = difflib.get_close_matches(reference.lower(), list(catalogue.CATALOGUE), n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]}? " if near else ""
    if reference.startswith(("/", "./", "../", "~")) or reference.endswith(".gguf"):
        cause = f"There is no file or folder {reference!r}."
    else:
        cause = f"Model {reference!r} is no path, catalogue name or name in a local model cache."
    known = f"Catalogue: {', '.join(catalogue.CATALOGUE)}."
    return ModelError(cause, f"{hint}{_FORMS} {known}", code="model_not_found")


def _from_catalogue(name: str, fetch: bool, env: Mapping[str, str]) -> Path:
    entry = catalogue.CATALOGUE[name]
    if fetch:
        return catalogue.ensure(entry, env=env)
    target = catalogue.cached_file(entry, env=env)
    if not catalogue.is_sound(entry, target):
        raise ModelError(
            f"Model {name} is not in the cache.",
            "Allow it to be fetched, or pass a model folder or .gguf file.",
            code="not_cached",
        )
    return target


def _from_path(reference: str, path: Path, origin: Origin) -> ModelSource:
    if path.is_dir():
        return _from_folder(reference, path, origin)
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} is one weight file without a config.",
            f"Pass its folder: {path.parent}.",
            code="not_a_model",
        )
    header = gguf_header.read_header(path)
    config = gguf_names.hugging_face_config(header)
    return ModelSource(reference, "gguf", origin, path, config, {}, header.metadata)


def _from_folder(reference: str, folder: Path, origin: Origin) -> ModelSource:
    config_path = folder / "config.json"
    if not config_path.is_file():
        gguf = sorted(folder.glob("*.gguf"))
        remedy = (
            f"Pass the file itself: {gguf[0]}."
            if gguf
            else "A model folder holds config.json, tokenizer.json and .safetensors files."
        )
        raise ModelError(
            f"{folder} is not a model folder: no config.json.", remedy, code="not_a_model"
        )
    config = load_json_object(config_path)
    generation_path = folder / "generation_config.json"
    generation = load_json_object(generation_path) if generation_path.is_file() else {}
    return ModelSource(reference, "folder", origin, folder, config, generation)


def _hub_cache(env: Mapping[str, str]) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(name):
            return _expanded(env[name])
    if env.get("HF_HOME"):
        return _expanded(env["HF_HOME"]) / "hub"
    base = env.get("XDG_CACHE_HOME")
    return (_expanded(base or "~/.cache")) / "huggingface" / "hub"


def _in_hub_cache(name: str, env: Mapping[str, str]) -> Path | None:
    """Snapshot folder of ``main`` in ``models--org--name``, or None."""
    repo = _hub_cache(env) / ("models--" + name.replace("/", "--"))
    ref = repo / "refs" / "main"
    if not _exists(repo):
        return None
    try:
        commit = ref.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = ""
    snapshot = repo / "snapshots" / commit
    if not re.fullmatch(r"[0-9a-zA-Z]+", commit) or not snapshot.is_dir():
        raise ModelError(
            f"The local cache of {name} in {repo} has no downloaded snapshot of main.",
            "Download the model again, or pass a folder.",
            code="incomplete_cache",
        )
    return snapshot


def _in_modelscope_cache(name: str, env: Mapping[str, str]) -> Path | None:
    base = env.get("MODELSCOPE_CACHE")
    root = _expanded(base) if base else _expanded("~/.cache") / "modelscope" / "hub"
    owner, _, model = name.rpartition("/")
    # ModelScope writes dots in a model's name as three underscores.
    for spelling in (model, model.replace(".", "___")):
        for parent in (root / "models", root, root / "hub" / "models", root / "hub"):
            folder = parent / owner / spelling
            if owner and (folder / "config.json").is_file():
                return folder
    return None
