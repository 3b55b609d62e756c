"""What the vendor declares: one implementation of one op."""

from metainfer.kernels.conditions import device_kind, shared_memory
from metainfer.kernels.impl import Impl

TILE_BYTES = 48 * 1024

IMPLS = (
    Impl(
        op="rmsnorm",
        name="acme",
        load="acme_platform.ops:rmsnorm",
        provider="acme",
        dtypes=frozenset({"float32", "bfloat16"}),
        conditions=(device_kind("fake"), shared_memory(TILE_BYTES)),
        native_when=(device_kind("fake"),),
        tile={"shared_bytes": TILE_BYTES},
    ),
)
