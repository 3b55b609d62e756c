"""Stored names of these checkpoints. No torch.

The model's own are read as they are. The draft layer behind the last one is known and not read; a
file may repeat the embedding and the head there.
"""

from __future__ import annotations

from collections.abc import Mapping

from metainfer.formats.completeness import Names
from metainfer.formats.index import TensorInfo
from metainfer.models.dsa.arch import DsaArch

_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def checkpoint_names(
    arch: DsaArch,
    config: Mapping[str, object],
    tensors: Mapping[str, TensorInfo],
    block: tuple[int, int] | None,
) -> Names:
    """Every stored tensor; those of the draft are optional."""
    found = Names(tensors=dict(tensors))
    draft = f"model.layers.{arch.layers}."
    if any(name.startswith(draft) for name in tensors):
        whole = arch.with_draft()
        for spec in (*whole.packed_weights(), *whole.plain_weights()):
            if spec.layer == arch.layers:
                found.optional |= dict(zip(spec.tensors, spec.tensor_shapes(), strict=True))
        shape = (arch.vocab_size, arch.hidden)
        found.optional |= {draft + leaf: shape for leaf in _COPIES if draft + leaf in tensors}
    return found
