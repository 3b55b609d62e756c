"""Reading of the rotary keys of a checkpoint's config into `ops.rope.spec.RopeSpec`. No torch.

Both spellings are read: ``rope_theta`` with ``rope_scaling``, and the newer ``rope_parameters``.
"""

from __future__ import annotations

from metainfer.core.errors import ModelError
from metainfer.models.common.config import ConfigReader
from metainfer.ops.rope.spec import TYPES, RopeSpec


def read_rope(reader: ConfigReader, *, head_dim: int, max_positions: int) -> RopeSpec:
    """Read the rope keys of a text model.

    Raises:
        ModelError: an unknown scaling type.
    """
    newer = reader.mapping("rope_parameters")
    older = reader.mapping("rope_scaling")
    theta = reader.optional("rope_theta", float, 10000.0)
    partial = reader.optional("partial_rotary_factor", float, 1.0)
    table = dict(newer or older or {})
    kind = str(table.pop("rope_type", table.pop("type", None) or "default"))
    table.pop("type", None)
    theta = float(table.pop("rope_theta", theta))  # type: ignore[arg-type]
    partial = float(table.pop("partial_rotary_factor", partial))  # type: ignore[arg-type]
    if kind not in TYPES:
        raise ModelError(
            f"rotary scaling {kind!r} is not supported.",
            f"Supported: {', '.join(TYPES)}.",
            code="unsupported_config",
        )
    return RopeSpec(
        rotated=int(head_dim * partial),
        theta=theta,
        context=max_positions,
        scaling={**table, "rope_type": kind},
    )
