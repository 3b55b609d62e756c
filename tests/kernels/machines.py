"""Simulated cards and a fixed kernel table for the selection tests."""

from __future__ import annotations

from metainfer.core.step import Phase
from metainfer.kernels.conditions import capability, device_kind, dot_type, feature, shared_memory
from metainfer.kernels.impl import Context, Evidence, Impl, Layout, OpRequest
from metainfer.kernels.registry import Registry
from metainfer.platform.capability import instructions
from metainfer.platform.facts import DeviceFacts, Facts, HostFacts

SHARED = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}
CUDA = frozenset({"bfloat16"})


def card(pair: tuple[int, int]) -> Facts:
    """A card of this capability with its real shared memory and instructions."""
    rules = instructions(pair)
    assert rules is not None
    device = DeviceFacts(
        kind="cuda",
        name=f"simulated {pair[0]}.{pair[1]}",
        capability=pair,
        shared_bytes_per_block=SHARED[pair],
        dot_types=rules.dot_types,
        features=rules.features,
        read_bytes_s=1e12,
        dot_flops={"bfloat16": 1e14},
    )
    return Facts(platform="cuda", devices=(device,), software={"triton": "3.7.1", "torch": "2.13"})


def host(*, compiler: str | None = "gcc 13") -> Facts:
    """A CPU with or without a C compiler."""
    device = DeviceFacts(kind="cpu", name="cpu", read_bytes_s=2e10, dot_flops={"float32": 1.5e11})
    return Facts(
        platform="cpu",
        devices=(device,),
        host=HostFacts(compiler=compiler),
        software={"torch": "2.13.0"},
    )


def nothing(context: Context) -> float:
    return 0.0


def kernel(name: str, seconds: float | None = 1.0, **fields: object) -> Impl:
    """A made-up implementation of op ``gemm`` (or of `fields["op"]`)."""
    merged = {
        "op": "gemm",
        "load": f"nowhere:{name}",
        "provider": "made",
        "dtypes": CUDA,
        "cost": (lambda context: seconds),
        **fields,
    }
    return Impl(name=name, **merged)  # type: ignore[arg-type]


def request(op: str = "gemm", phase: Phase = Phase.DECODE, **fields: object) -> OpRequest:
    merged = {"site": op, "dtype": "bfloat16", "shape": {"rows": 1}, **fields}
    return OpRequest(op=op, phase=phase, **merged)  # type: ignore[arg-type]


#: Kernels as they are found in the field, with what each one needs.
TABLE = Registry(
    [
        kernel("tcgen05", conditions=(capability((10, 0), (10, 3)), feature("tcgen05"))),
        kernel("wgmma", conditions=(capability((9, 0), (9, 0)), feature("wgmma"))),
        kernel("block-scaled", conditions=(feature("block_scaled_mma"),)),
        kernel("marlin", conditions=(capability((8, 0)),)),
        kernel("fp8", conditions=(capability((8, 9)), dot_type("float8_e4m3fn"))),
        kernel("ada", conditions=(capability((8, 9)),)),
        kernel("big-tile", conditions=(capability((8, 0)), shared_memory(147_456))),
        kernel("host", conditions=(device_kind("cpu"),)),
    ]
)

LAYOUT_A, LAYOUT_B = Layout(id="a@1", role="weight"), Layout(id="b@1", role="weight")


def trusted(registry: Registry) -> dict[str, Evidence]:
    """Everything ran here."""
    return {impl.id: Evidence.THIS_CARD for impl in registry.impls()}
