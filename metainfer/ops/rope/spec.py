"""Which rotary embedding a checkpoint asks for; `tables` makes it numbers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from metainfer.core.errors import ModelError

TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """What the checkpoint's configuration says.

    `rotated`: channels of each head that turn (R, even); the rest passes through. `interleaved`:
    pairs are neighbours instead of halves. `trained`: positions the model was trained for before
    the extension. `context`: the configuration's `max_position_embeddings`. `scaling`: the
    configuration's ``rope_scaling`` or ``rope_parameters`` dictionary (its ``rope_type`` or
    ``type`` key names one of `TYPES`).
    """

    rotated: int
    theta: float = 10_000.0
    context: int = 0
    trained: int = 0
    scaling: Mapping[str, object] = field(default_factory=dict)
    interleaved: bool = False

    @property
    def kind(self) -> str:
        kind = str(self.scaling.get("rope_type") or self.scaling.get("type") or "default")
        if kind not in TYPES:
            raise ModelError(
                f"rope scaling type {kind!r} is not supported.",
                f"Supported: {', '.join(TYPES)}.",
                code="unsupported_rope",
            )
        return kind

    def number(self, key: str, default: float | None = None) -> float:
        """A number of `scaling`; `ModelError` when it is missing without a default."""
        value = self.scaling.get(key)
        if value is None:
            if default is None:
                raise ModelError(
                    f"rope scaling type {self.kind} needs {key}, which the configuration lacks.",
                    "The checkpoint's config.json is incomplete.",
                    code="unsupported_rope",
                )
            return default
        if not isinstance(value, (int, float)):
            raise ModelError(f"rope scaling's {key} is {value!r}, not a number.", code="bad_rope")
        return float(value)

    @property
    def original(self) -> int:
        """Positions trained for: scaling's own key, `trained`, or the whole context."""
        key = "original_max_position_embeddings"
        return int(self.number(key, float(self.trained or self.context)))
