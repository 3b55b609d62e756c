"""Which of the ops that exist these models use, with which shapes. No torch.

What they need beside (`models.registry` names it) has no op yet and is not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metainfer.core.step import Phase
from metainfer.kernels.impl import OpRequest

if TYPE_CHECKING:
    from metainfer.models.dsa.arch import DsaArch


def op_requests(
    arch: DsaArch,
    phase: Phase,
    rows: int,
    logit_rows: int,
    dtype: str,
    schemes: Mapping[str, tuple[str, ...]],
) -> tuple[OpRequest, ...]:
    """Every op use in one phase; arguments as in `models.arch.Arch.op_requests`."""
    found: list[OpRequest] = []

    def ask(op: str, shape: Mapping[str, int], count: int, site: str = "") -> None:
        site = site or op
        known = schemes.get(site, ())
        shapes = {"rows": rows, **shape}
        found.append(OpRequest(op, site, phase, dtype, shapes, frozenset(), known, count))

    wide, layers = {"d": arch.hidden}, arch.layers
    routed = layers - arch.dense_layers
    ask("embed", {"n": arch.vocab_size // arch.ranks, **wide}, 1)
    ask("rmsnorm", wide, 1)
    ask("rmsnorm", {"d": arch.q_rank}, layers, "rmsnorm.q")
    ask("rmsnorm", {"d": arch.kv_rank}, layers, "rmsnorm.kv")
    ask("add_rmsnorm", wide, 2 * layers)
    ask("swiglu", {"f": arch.dense_ffn}, arch.dense_layers)
    ask("swiglu", {"f": arch.ffn * arch.shared_experts}, routed, "swiglu.shared")
    ask("sample", {"v": arch.vocab_size, "rows": logit_rows}, 1)
    stored = [schemes.get(site, ()) for site in ("experts.w13", "experts.w2")]
    names = tuple(dict.fromkeys(name for group in stored for name in group))
    shape = {"e": arch.experts // arch.expert_ranks, "top_k": arch.experts_per_token, **wide}
    shape |= {"rows": rows, "f": arch.expert_ffn}
    found.append(
        OpRequest("moe_experts", "moe_experts", phase, dtype, shape, schemes=names, count=routed)
    )
    for site, (extent, count) in _products(arch).items():
        head = site == "linear.lm_head"
        n = extent[0] // arch.ranks if head else extent[0]
        product = {"rows": logit_rows if head else rows, "n": n, "k": extent[1]}
        ask("linear_f32" if head else site.partition(".")[0], product, count, site)
    return tuple(one for one in found if one.count)


def _products(arch: DsaArch) -> dict[str, tuple[tuple[int, ...], int]]:
    """Site of `linear` or `linear_f32` -> shape and how many layers have it."""
    found: dict[str, tuple[tuple[int, ...], int]] = {}
    for spec in replace(arch, experts=1).packed_weights():  # experts are no product of their own
        if spec.site.startswith("linear"):
            found[spec.site] = (spec.shape, found.get(spec.site, (spec.shape, 0))[1] + 1)
    return found
