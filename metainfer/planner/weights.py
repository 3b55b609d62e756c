"""What weights weigh, by site: whole, or one rank's part under a layout.

A model's tensors are counted once (`census`): equal ones stand for each other, so that asking for
every layout and every packing costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from metainfer.core.plan import LayoutPlan, LedgerRow
from metainfer.formats.blocks import FORMATS
from metainfer.formats.schemes import BLOCKS
from metainfer.kernels.impl import Layout
from metainfer.models.arch import Arch, Costs, Cut, WeightSpec

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PLAIN_BYTES = {**DTYPE_BYTES, "int64": 8}

EMBED, EXPERTS, HEAD = "embed", "experts", "linear.lm_head"
SMALL = "norms and small parameters"
WHOLE, TWO = LayoutPlan(name="whole"), LayoutPlan(name="two", tensor=2)


@dataclass(frozen=True, slots=True)
class Stored:
    """`count` equal tensors [n, k] of one site, in `scheme`; `bias`: how many of them have one.

    `shared`: the tensors, where another site reads the same matrix; else empty. `unit`, `grain`:
    rows, or columns, that no cut parts (see `WeightSpec`).
    """

    site: str
    role: str
    shared: tuple[str, ...]
    scheme: str
    n: int
    k: int
    unit: int
    grain: int
    count: int
    bias: int = 0

    def pieces(self, extent: int, ranks: int) -> tuple[int, int]:
        """Into how many different parts `ranks` ranks cut `extent`, and what no cut parts."""
        units = extent // self.unit
        if ranks <= units:
            return ranks, self.unit
        return (units if self.grain == self.unit else ranks), self.grain


@dataclass(frozen=True, slots=True)
class Census:
    """A model's matrices, counted. `small`: elements of small parameters by site, own dtype ("" for
    the model's) and how they are stored."""

    arch: Arch
    matrices: tuple[Stored, ...]
    small: Mapping[tuple[str, str, str], int]

    def elements(self, layout: LayoutPlan = WHOLE) -> dict[str, int]:
        """Matrix elements that one rank holds, by site; a shared matrix at each of its sites."""
        found: dict[str, int] = {}
        for each in self.matrices:
            kind, parts = self.cut(each, layout)
            if kind is Cut.ROWS:
                parts, _ = each.pieces(each.n, parts)
            held = -(-each.n * each.k * each.count // parts)
            found[each.site] = found.get(each.site, 0) + held
        return found

    def cut(self, each: Stored, layout: LayoutPlan) -> tuple[Cut, int]:
        """How ranks share a site's matrices."""
        return self.arch.cut(WeightSpec("", each.site, (), (0,), role=each.role), layout)

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Site -> rows and columns that a share must hold whole, as the weights are stored."""
        found: dict[str, tuple[int, int]] = {}
        for each in self.matrices:
            block = _block(each.scheme)
            before = found.get(each.site, (1, 1))
            found[each.site] = (max(before[0], block[0]), max(before[1], block[1]))
        return found

    def schemes(self) -> dict[str, tuple[str, ...]]:
        """Site -> the schemes of its tensors, in order of appearance."""
        found: dict[str, dict[str, None]] = {}
        for each in self.matrices:
            found.setdefault(each.site, {})[each.scheme] = None
        return {site: tuple(names) for site, names in found.items()}


def token_elements(counted: Census, costs: Costs, layout: LayoutPlan) -> tuple[float, float, float]:
    """Matrix elements that a token passes on one rank: of layers but for routed experts, of the
    head, and of the experts that it is routed to."""
    elements, whole = counted.elements(layout), counted.elements()
    routed = [site for site in elements if site.startswith(f"{EXPERTS}.")]
    dense = sum(n for site, n in elements.items() if site not in (EMBED, HEAD, *routed))
    share = costs.experts_per_token / max(counted.arch.routed_experts, 1) / layout.tensor
    return dense, elements.get(HEAD, 0), sum(whole[site] for site in routed) * share


def parts_held(arch: Arch, site: str, layout: LayoutPlan) -> int:
    """Parts in which a rank holds the matrices of a site, and reads them in chunks: of a pair as
    many as decodes cut them into."""
    role = EXPERTS if site.startswith(f"{EXPERTS}.") else "weight"
    spec = WeightSpec("", site, (), (0,), role=role)
    return arch.cut(spec, layout.decoding)[1] // arch.cut(spec, layout)[1]


def census(arch: Arch, scheme_of: Callable[[str], str]) -> Census:
    """Count a model's tensors; `scheme_of`: how each is stored."""
    specs = arch.packed_weights()
    uses = Counter(spec.tensors for spec in specs)
    counts: dict[tuple[str, str, tuple[str, ...], str, int, int, int, int], int] = {}
    biases: dict[tuple[str, str, tuple[str, ...], str, int, int, int, int], int] = {}
    for spec in specs:
        shared = spec.tensors if uses[spec.tensors] > 1 else ()
        head = (spec.site, spec.role, shared)
        kinds = Counter(
            (scheme_of(name), shape[0], shape[1], spec.unit_of(index), spec.grain_of(index))
            for index, (name, shape) in enumerate(
                zip(spec.tensors, spec.tensor_shapes(), strict=True)
            )
        )
        for kind, count in kinds.items():
            counts[*head, *kind] = counts.get((*head, *kind), 0) + count
            if spec.bias:
                biases[*head, *kind] = biases.get((*head, *kind), 0) + count
    small: Counter[tuple[str, str, str]] = Counter()
    for spec in arch.plain_weights():
        small[spec.site, spec.dtype, scheme_of(spec.tensors[0])] += spec.elements
    matrices = tuple(Stored(*key, count, biases.get(key, 0)) for key, count in counts.items())
    return Census(arch, matrices, small)


def weight_rows(
    counted: Census, layouts: Mapping[str, Layout], dtype: str, layout: LayoutPlan = WHOLE
) -> list[LedgerRow]:
    """One row per op site with the bytes that one rank holds; a shared matrix once.

    `layouts`: the bundle's packing of each role. `dtype`: the model's type.
    """
    width = DTYPE_BYTES[dtype]
    by_site: dict[str, tuple[int, str]] = {}
    for (site, role, shared), group in _by_matrix(counted.matrices).items():
        packing = layouts[role]
        if shared and _read_before(counted.matrices, packing, shared, site):
            continue
        kind, parts = counted.cut(group[0], layout)
        split, pieces = counted.cut(group[0], layout.decoding)
        if pieces == parts:
            held = sum(_bytes(each, packing, width, kind, parts) for each in group)
        else:  # a rank of a pair has every part, each filled up to the largest
            again = sum(each.bias * each.n for each in group) * width if split is Cut.COLUMNS else 0
            held = sum(_bytes(each, packing, width, split, pieces) for each in group) * pieces
            held -= again * (pieces - 1)
        share = kind.value if parts == 1 else f"{kind.value}/{parts}"
        by_site[site] = (by_site.get(site, (0, ""))[0] + held, share)
    rows = [
        LedgerRow(item=site, kind="weights", bytes=held, share=share)
        for site, (held, share) in by_site.items()
    ]
    return [*rows, *_small_rows(counted, dtype, layout)]


def _small_rows(counted: Census, dtype: str, layout: LayoutPlan) -> list[LedgerRow]:
    """What no layout cuts in one row; by site what tensor parallelism cuts."""
    held: dict[str, int] = {SMALL: 0}
    shares = {SMALL: Cut.WHOLE.value}
    for (site, own, scheme), count in counted.small.items():
        spec = WeightSpec("", site, (), (0,), dtype=own)
        kind, parts = counted.arch.cut(spec, layout)
        cut = counted.arch.cut(spec, TWO)[1] > 1
        item = site if cut else SMALL
        shares[item] = kind.value if parts == 1 else f"{kind.value}/{parts}"
        held[item] = held.get(item, 0) + count // parts * PLAIN_BYTES[spec.kept_in(scheme, dtype)]
    return [
        LedgerRow(item=item, kind="weights", bytes=size, share=shares[item])
        for item, size in held.items()
    ]


def _by_matrix(
    matrices: Sequence[Stored],
) -> dict[tuple[str, str, tuple[str, ...]], list[Stored]]:
    found: dict[tuple[str, str, tuple[str, ...]], list[Stored]] = {}
    for each in matrices:
        found.setdefault((each.site, each.role, each.shared), []).append(each)
    return found


def _read_before(
    matrices: Sequence[Stored], packing: Layout, shared: tuple[str, ...], site: str
) -> bool:
    """Whether an earlier site holds the matrix that `site` reads."""
    key = packing.storage(shared, site)
    for each in matrices:
        if each.shared == shared:
            if each.site == site:
                return False
            if packing.storage(shared, each.site) == key:
                return True
    return False


def _block(scheme: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if scheme in FORMATS:
        return FORMATS[scheme].block
    return (1, BLOCKS[scheme][0]) if scheme in BLOCKS else (1, 1)


def _bytes(each: Stored, packing: Layout, width: int, kind: Cut, parts: int) -> int:
    n, k, count, bias = each.n, each.k, each.count, each.bias * each.n * width

    def nbytes(n: int, k: int) -> int:
        if packing.nbytes is None:
            return n * k * width
        return packing.nbytes(each.scheme, n, k)

    if kind in (Cut.ROWS, Cut.COLUMNS):
        extent, axis = (n, 0) if kind is Cut.ROWS else (k, 1)
        parts, unit = each.pieces(extent, parts)
        filled = unit % _block(each.scheme)[axis] == 0  # the last part is, up to the largest
        if filled or extent % (parts * unit) == 0:
            largest = -(-extent // (parts * unit)) * unit  # which all ranks allocate
            if kind is Cut.COLUMNS:
                return count * nbytes(n, largest) + bias
            return count * nbytes(largest, k) + each.bias * largest * width
    if kind is Cut.EXPERTS and count % parts == 0:
        return count // parts * nbytes(n, k) + bias
    # A cut that is refused elsewhere still says about how much it would hold.
    return -(-count * nbytes(n, k) // parts) + bias
