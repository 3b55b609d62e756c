"""The pairs of all adapters beside one matrix, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from metainfer.kernels.table import PhaseOps
from metainfer.models.common.inputs import SegmentInputs


@dataclass(frozen=True, slots=True)
class LowRankPairs:
    """n adapters, P parts of the matrix, R the largest rank, C the columns of all parts.

    `site`: the op site. `a` [n, P, R, K], `b` [C, n, R], `scale` [n, P] float32 (float64 in
    float64); `spans`: each part's (start, width) among the matrix's columns.
    """

    site: str
    a: Tensor
    b: Tensor
    scale: Tensor
    spans: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + self.scale.nbytes


def adapt(
    y: Tensor, x: Tensor, pairs: LowRankPairs | None, inputs: SegmentInputs, ops: PhaseOps
) -> Tensor:
    """`y` [T, N], what a matrix made of x [T, K], with each row's adapter added in place.

    Nothing runs where the matrix has no pairs, or no row of the segment has an adapter.
    """
    if pairs is None or inputs.adapters is None:
        return y
    add = ops.at(pairs.site)
    out: Tensor = add(y, x, pairs.a, pairs.b, pairs.scale, inputs.adapters, spans=pairs.spans)
    return out
