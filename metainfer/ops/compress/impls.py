"""Declared implementations of `compress` and `compress_index`."""

from collections.abc import Callable, Mapping

from metainfer.kernels.cost import extent, roofline
from metainfer.kernels.impl import Context, Impl
from metainfer.ops.compress import impls_triton
from metainfer.ops.declare_entries import KEYS, LATENTS, moved, torch_and_reference, torch_static


def _cost(
    passes: float, launches: int, part: float
) -> Callable[[str], Callable[[Context], float | None]]:
    """`passes` over the raw float32 rows (gates and values, two halves), and the entries made."""

    def made(layout: str) -> Callable[[Context], float | None]:
        def traffic(c: Context) -> float:
            rows = extent(c, "rows")
            entries = rows / extent(c, "ratio", 4)
            return passes * rows * extent(c, "d") * 4 * 4 + moved(layout, entries, c)

        return roofline(traffic, launches=launches, part=part)

    return made


def _whole(layout: str) -> Callable[[Context], float | None]:
    """Every token pools a whole window of raw rows, two halves each (seed)."""

    def traffic(c: Context) -> float:
        window = extent(c, "ratio", 4) * (2 if "overlap" in c.request.semantics else 1)
        return 12.0 * extent(c, "rows") * window * extent(c, "d") * 4

    return roofline(traffic, launches=50, part=0.4)


def _declared(op: str, role: str, layouts: Mapping[str, str]) -> tuple[Impl, ...]:
    honours = frozenset({"overlap"})
    # The reference takes one sequence after the other.
    asking = torch_and_reference(
        op,
        role,
        layouts,
        ("compress.torch_compress:compress", "compress.ref:compress"),
        (_cost(4, 40, 0.4), _cost(6, 200, 0.3)),
        honours,
    )
    static = torch_static(op, role, layouts, "compress.torch_static:compress", _whole, honours)
    return (*asking, *static)


IMPLS = (
    *impls_triton.IMPLS,
    *_declared("compress", "kv", LATENTS),
    *_declared("compress_index", "index", KEYS),
)
