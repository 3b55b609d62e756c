"""What a checkpoint holds, from its headers alone: names, schemes, shapes, places. No torch.

Names are Hugging Face names whatever the container. A damaged or lying header is a
`ModelError`; nothing here reads tensor data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metainfer.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` is logical (N, K); `offset` and `nbytes` locate its bytes in `file`."""

    name: str
    scheme: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """All tensors of a checkpoint by name, plus the container's own metadata.

    `container` is ``"safetensors"`` or ``"gguf"``; `metadata` is safetensors' string map or
    GGUF's typed key-value map.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, Any]
    container: str = "safetensors"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensor data."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that hold tensors, sorted."""
        return tuple(sorted({info.file for info in self.tensors.values()}))

    def __getitem__(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelError(
                f"The checkpoint has no tensor {name!r}.",
                "Check that the folder holds the whole model and that config.json belongs to it.",
                code="missing_tensor",
            ) from None

    @classmethod
    def open(cls, path: str | Path) -> CheckpointIndex:
        """Index of a safetensors folder, a ``.safetensors`` file or a ``.gguf`` file."""
        from metainfer.formats import gguf_header, gguf_names, safetensors_header

        path = Path(path)
        if not path.exists():
            raise ModelError(
                f"There is no file or folder {str(path)!r}.",
                "Pass a model folder or a .gguf file.",
                code="model_not_found",
            )
        if path.is_dir():
            tensors, metadata = safetensors_header.read_folder(path)
            return cls(tensors, metadata, "safetensors")
        if path.suffix == ".safetensors":
            tensors, metadata = safetensors_header.read_file(path)
            return cls(tensors, metadata, "safetensors")
        header = gguf_header.read_header(path)
        return cls(gguf_names.hugging_face_tensors(header), header.metadata, "gguf")
