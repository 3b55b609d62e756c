"""Which rotary embedding a checkpoint asks for. A description; tables are built in ``ops/rope``.

Both spellings are read: ``rope_theta`` with ``rope_scaling``, and the newer ``rope_parameters``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from metainfer.core.errors import ModelError
from metainfer.models.common.config import ConfigReader

KNOWN = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """`rotary_dim` of each head's `head_dim` are rotated; the rest passes through.

    `kind` is one of `KNOWN`; `parameters` are the scaling's own numbers under their config names.
    `max_positions` is the length that the table must cover.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    parameters: Mapping[str, object] = field(default_factory=dict)
    max_positions: int
    interleaved: bool = False


def read_rope(reader: ConfigReader, *, head_dim: int, max_positions: int) -> RopeSpec:
    """Read the rope keys of a text model.

    Raises:
        ModelError: an unknown scaling kind.
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
    if kind not in KNOWN:
        raise ModelError(
            f"rotary scaling {kind!r} is not supported.",
            f"Supported: {', '.join(KNOWN)}.",
            code="unsupported_config",
        )
    return RopeSpec(
        theta=theta,
        rotary_dim=int(head_dim * partial),
        kind=kind,
        parameters=table,
        max_positions=max_positions,
    )
