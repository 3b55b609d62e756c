"""Safetensors headers: 8-byte length, JSON, then data; one file or a sharded folder. No torch.

Follows https://github.com/huggingface/safetensors (format section): offsets are relative to the
end of the header, tensors do not overlap, and the data section has no holes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metainfer.core.errors import ModelError
from metainfer.formats.index import TensorInfo
from metainfer.formats.schemes import DENSE_BITS, tensor_bytes

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_AGAIN = "Download or copy the file again."


def _bad(path: Path, what: str, remedy: str = _AGAIN) -> ModelError:
    return ModelError(f"{path.name} is not a sound safetensors file: {what}.", remedy)


def load_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; `ModelError` when unreadable or not an object."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.", "Check the path.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.", _AGAIN) from error
    if not isinstance(body, dict):
        raise ModelError(f"{path} does not hold a JSON object.", _AGAIN)
    return body


def _read_json_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(header, offset of the data section, file size)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(8)
            if len(head) < 8:
                raise _bad(path, f"it has {size} bytes, less than its 8-byte length field")
            length = int.from_bytes(head, "little")
            if length > MAX_HEADER_BYTES:
                raise _bad(path, f"its header claims {length} bytes (limit {MAX_HEADER_BYTES})")
            if 8 + length > size:
                raise _bad(path, f"its header claims {length} bytes but the file has {size}")
            raw = stream.read(length)
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.", "Check the path.") from error
    try:
        header = json.loads(raw, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _bad(path, "its header is not a JSON object")
    return header, 8 + length, size


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tensor(path: Path, name: str, entry: Any, base: int, size: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _bad(path, f"the entry of tensor {name!r} is not an object")
    scheme, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(scheme, str) or scheme not in DENSE_BITS:
        raise ModelError(
            f"Tensor {name!r} in {path.name} has dtype {scheme!r}, which is not supported.",
            f"Supported: {', '.join(DENSE_BITS)}.",
            code="unsupported_scheme",
        )
    if not isinstance(shape, list) or not all(_is_count(dim) for dim in shape):
        raise _bad(path, f"tensor {name!r} has shape {shape!r}")
    if not isinstance(span, list) or len(span) != 2 or not all(_is_count(x) for x in span):
        raise _bad(path, f"tensor {name!r} has data_offsets {span!r}")
    begin, end = span
    expected = tensor_bytes(scheme, shape)
    if end - begin != expected:
        raise _bad(
            path,
            f"tensor {name!r} ({scheme} {shape}) needs {expected} bytes, "
            f"its offsets give {end - begin}",
        )
    if base + end > size:
        raise _bad(path, f"tensor {name!r} ends at byte {base + end}, the file has {size}")
    return TensorInfo(name, scheme, tuple(shape), expected, path, base + begin)


def read_file(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and ``__metadata__`` of one file, in file order."""
    header, base, size = _read_json_header(path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _bad(path, "its __metadata__ is not an object")
    infos = [_tensor(path, name, entry, base, size) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    position = base
    for info in infos:
        if info.offset < position:
            raise _bad(path, f"tensor {info.name!r} overlaps the one before it")
        if info.offset > position:
            raise _bad(path, f"{info.offset - position} unused bytes before {info.name!r}")
        position += info.nbytes
    if position != size:
        raise _bad(path, f"its tensors end at byte {position} but the file has {size}")
    return {info.name: info for info in infos}, {k: str(v) for k, v in metadata.items()}


def read_folder(folder: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Tensors of a Hugging Face folder: its shard index when there is one, else its one file."""
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        return _read_sharded(folder, load_json_object(index_path))
    single = folder / SINGLE_NAME
    if single.is_file():
        return read_file(single)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return read_file(found[0])
    if found:
        raise ModelError(
            f"{folder} holds {len(found)} safetensors files and no {INDEX_NAME}.",
            f"Add {INDEX_NAME} from the publisher, or keep one file.",
            code="missing_shard_index",
        )
    raise ModelError(f"{folder} holds no .safetensors weights.", _no_weights_remedy(folder))


def _no_weights_remedy(folder: Path) -> str:
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return f"Pass the file itself: {gguf[0]}."
    if any(folder.glob("pytorch_model*.bin")):
        return "Pickled .bin weights are not read; convert them to safetensors."
    return "Download the model's safetensors files into it."


def _read_sharded(
    folder: Path, index: Mapping[str, Any]
) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{INDEX_NAME} in {folder} has no weight_map.", _AGAIN)
    shards = _shard_names(folder, weight_map)
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}.",
            "Download the missing files.",
            code="missing_shard",
        )
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, Any] = {}
    for shard, (found, shard_metadata) in _read_all(folder, shards).items():
        metadata.update(shard_metadata)
        for name, info in found.items():
            if name in tensors:
                raise ModelError(
                    f"Tensor {name!r} is in both {tensors[name].file.name} and {shard}.",
                    "Remove the shards that belong to another download.",
                    code="duplicate_tensor",
                )
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].file.name != Path(shard).name:
            raise ModelError(
                f"{INDEX_NAME} places tensor {name!r} in {shard}, which does not hold it.",
                "Index and shards belong to different downloads; download both again.",
                code="missing_tensor",
            )
    return tensors, metadata


def _read_all(
    folder: Path, shards: list[str]
) -> dict[str, tuple[dict[str, TensorInfo], dict[str, str]]]:
    """Every shard's header; all damaged ones are named at once."""
    read, damaged = {}, []
    for shard in shards:
        try:
            read[shard] = read_file(folder / shard)
        except ModelError as error:
            damaged.append(error)
    if len(damaged) == 1:
        raise damaged[0]
    if damaged:
        causes = " ".join(error.cause for error in damaged)
        raise ModelError(
            f"{len(damaged)} of {len(shards)} shards are damaged. {causes}",
            damaged[0].remedy,
            code=damaged[0].code,
        )
    return read


def _shard_names(folder: Path, weight_map: Mapping[str, Any]) -> list[str]:
    for name, shard in weight_map.items():
        if (
            not isinstance(shard, str)
            or not shard
            or "/" in shard
            or "\\" in shard
            or "\0" in shard
        ):
            raise ModelError(
                f"{INDEX_NAME} in {folder} maps {name!r} to {shard!r}, not to a file beside it.",
                _AGAIN,
            )
    return sorted(set(weight_map.values()))
