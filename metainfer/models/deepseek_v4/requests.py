"""Which ops DeepSeek-V4 uses, where, with which shapes: what the selection is asked. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from metainfer.core.step import Phase
from metainfer.kernels.impl import OpRequest
from metainfer.models.deepseek_v4.caches import window_page

if TYPE_CHECKING:
    from metainfer.models.arch import WeightSpec
    from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch

SHORT = (Phase.DECODE, Phase.VERIFY)
"""Phases that read a dealt cache in parts; chunks gather it, and where ranks share one, no segment
mixes both."""
TYPICAL_CONTEXT = 4096
"""Cached tokens per sequence at which candidates are ranked."""


def op_requests(
    arch: DeepSeekV4Arch,
    phase: Phase,
    rows: int,
    logit_rows: int,
    dtype: str,
    schemes: Mapping[str, tuple[str, ...]],
    page_tokens: int,
) -> tuple[OpRequest, ...]:
    """Every op use in one phase; arguments as in `models.arch.Arch.op_requests`."""
    window, weights = type(arch.kinds[0])("window"), products_of(arch)
    if phase is Phase.DRAFT:
        weights = tuple(spec for spec in weights if spec.layer in (-1, arch.layers))
        arch = replace(arch, layers=1, kinds=(window,), hash_layers=0)
    elif arch.mtp:  # the draft layer fills its cache behind every segment
        arch = replace(arch, layers=arch.layers + 1, kinds=(*arch.kinds, window))
    asked = _Requests(arch, phase, rows, dtype, schemes)
    asked.streams()
    asked.attention(page_tokens)
    asked.experts()
    asked.ends(logit_rows)
    asked.products(weights, logit_rows)
    return tuple(asked.found)


class _Requests:
    """Collects the requests of one phase."""

    def __init__(
        self,
        arch: DeepSeekV4Arch,
        phase: Phase,
        rows: int,
        dtype: str,
        schemes: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.arch, self.phase, self.rows, self.dtype = arch, phase, rows, dtype
        self.schemes = schemes
        self.found: list[OpRequest] = []

    def ask(
        self, op: str, shape: Mapping[str, int], count: int, *semantics: str, site: str = ""
    ) -> None:
        if not count:
            return
        site = site or op
        self.found.append(
            OpRequest(
                op,
                site,
                self.phase,
                self.dtype,
                {"rows": self.rows, **shape},
                frozenset(semantics),
                self.schemes.get(site, ()),
                count,
            )
        )

    def streams(self) -> None:
        arch = self.arch
        shape = {"n": arch.streams, "d": arch.hidden}
        # One run of layers enters its first block and leaves its last apart from the steps between.
        runs = 2 if arch.mtp and self.phase is not Phase.DRAFT else 1
        self.ask("hyper_pre", shape, runs)
        self.ask("hyper_mix_pre", shape, 2 * arch.layers - runs)
        self.ask("hyper_mix", shape, runs)
        self.ask("hyper_head", shape, 1)

    def attention(self, page_tokens: int) -> None:
        arch = self.arch
        csa, hca = arch.kinds.count("csa"), arch.kinds.count("hca")
        here = arch.chunk_heads if self.phase is Phase.CHUNK and arch.chunk_heads else arch.heads
        head = {"hq": here, "d": arch.head_dim, "rotated": arch.rope_dim}
        seqs = self.rows if self.phase in (Phase.DECODE, Phase.VERIFY) else 1
        context = min(arch.max_context, TYPICAL_CONTEXT)
        span = {**head, "seqs": seqs, "context": context, "window": arch.window}
        key = {"heads": arch.index_heads, "d": arch.index_dim, "rotated": arch.rope_dim}
        sparse = {"ratio": arch.csa, "top_k": arch.index_topk, "page": page_tokens // arch.csa}
        self.ask("rmsnorm", {"d": arch.q_rank}, arch.layers, site="rmsnorm.q")
        self.ask("latent_qkv", {**head, "page": page_tokens}, arch.layers)
        for name, ratio, count, overlap in (
            ("csa", arch.csa, csa, ("overlap",)),
            ("hca", arch.hca, hca, ()),
        ):
            shape = {"seqs": seqs, "d": arch.head_dim, "ratio": ratio, "rotated": arch.rope_dim}
            self.ask("compress", shape, count, *overlap, site=f"compress.{name}")
        shape = {"seqs": seqs, "d": arch.index_dim, "ratio": arch.csa, "rotated": arch.rope_dim}
        self.ask("compress_index", shape, csa, "overlap")
        self.ask("index_query", key, csa)
        self.ask("attn_sparse", span, arch.kinds.count("window"), site="attn_sparse.window")
        if arch.shards > 1 and self.phase in SHORT:
            self.over_parts({**key, **sparse, "seqs": seqs, "context": context}, span, csa)
        else:
            self.ask("index_select", {**key, **sparse, "seqs": seqs, "context": context}, csa)
            self.ask("attn_sparse", {**span, **sparse}, csa, "selected", site="attn_sparse.csa")
        dense = {"ratio": arch.hca, "page": page_tokens // arch.hca}
        self.ask("attn_sparse", {**span, **dense}, hca, "entries", site="attn_sparse.hca")
        group = {**head, "hq": arch.heads, "groups": arch.o_groups, "n": arch.o_rank}
        self.ask("out_group", group, arch.layers)

    def over_parts(self, key: Mapping[str, int], span: Mapping[str, int], count: int) -> None:
        """Of `count` layers whose entries and keys are dealt. `key`: the indexer's shape; `span`:
        attention's, with one rank's heads."""
        shards, window = self.arch.shards, span["window"]
        page, all_heads = key["page"] // shards, span["hq"] * shards
        head = {name: extent for name, extent in span.items() if name != "window"}
        self.ask("index_part", {**key, "shards": shards, "page": page}, count)
        self.ask("index_merge", {"top_k": key["top_k"], "shards": shards}, count)
        near = {**head, "top_k": window, "page": window_page(window)}
        self.ask("attn_part", near, count, site="attn_part.window")
        entries = {**head, "hq": all_heads, "top_k": key["top_k"], "page": page}
        self.ask("attn_part", entries, count, site="attn_part.csa")
        self.ask("attn_weigh", {**head, "hq": all_heads, "shards": shards}, count)

    def experts(self) -> None:
        arch = self.arch
        clamp = ("clamp",) if arch.limit else ()
        route = {"k": arch.hidden, "e": arch.experts, "top_k": arch.experts_per_token}
        self.ask("moe_route_hash", route, arch.hash_layers)
        self.ask("moe_route", route, arch.layers - arch.hash_layers)
        shape = {
            "e": arch.experts // arch.expert_ranks,
            "top_k": arch.experts_per_token,
            "d": arch.hidden,
            "f": arch.expert_ffn,
        }
        schemes = {
            site: names for site, names in self.schemes.items() if site.startswith("experts.")
        }
        self.schemes = {**self.schemes, "moe_experts": tuple(dict.fromkeys(_flat(schemes)))}
        self.ask("moe_experts", shape, arch.layers, *clamp)
        self.ask("swiglu_clamp", {"f": arch.ffn}, arch.layers)

    def ends(self, logit_rows: int) -> None:
        arch = self.arch
        self.ask("embed", {"n": arch.vocab_size // arch.ranks, "d": arch.hidden}, 1)
        self.ask("rmsnorm", {"d": arch.hidden}, 1)
        self.ask("sample", {"v": arch.vocab_size, "rows": logit_rows}, 1)

    def products(self, weights: Iterable[WeightSpec], logit_rows: int) -> None:
        """One request for each site of `linear` and `linear_f32`, counted over the layers."""
        counts: dict[str, int] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for spec in weights:
            counts[spec.site] = counts.get(spec.site, 0) + 1
            shapes[spec.site] = spec.shape
        for site, count in counts.items():
            op, head = site.partition(".")[0], site == "linear.lm_head"
            if op in ("linear", "linear_f32"):
                n, k = shapes[site]
                n = n // self.arch.ranks if head else n
                shape = {"rows": logit_rows if head else self.rows, "n": n, "k": k}
                self.ask("linear_f32" if head else op, shape, count, site=site)


def _flat(schemes: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [name for names in schemes.values() for name in names]


def products_of(arch: DeepSeekV4Arch) -> tuple[WeightSpec, ...]:
    """The matrices; of experts, which are no product of their own, one stands for all."""
    return replace(arch, experts=1).packed_weights()
