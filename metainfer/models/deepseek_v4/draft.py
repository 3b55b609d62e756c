"""The multi-token-prediction layer (MTP) of the April release: drafts beside the model.

Row t joins the streams that the model left for token t (before the head's collapse) with the
embedding of token t + 1, at rotary position t:

    S_k = e_proj . RMSNorm_e(embed(token_{t+1})) + h_proj . RMSNorm_h(R_t,k)       k = 0 .. N - 1

then one layer without compression, a collapse and a norm of its own, and the shared head give the
guess for token t + 2. Deeper guesses feed the layer's own streams and guess back in.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from metainfer.core.step import Phase
from metainfer.kernels.table import OpTable, PhaseOps
from metainfer.models.common.inputs import GroupInputs, SegmentInputs
from metainfer.models.common.lanes import alone
from metainfer.models.deepseek_v4.layer import read_layer
from metainfer.models.deepseek_v4.model import DeepSeekV4Model
from metainfer.models.deepseek_v4.weights import MTP
from metainfer.ops.linear.packed import PackedWeight


class MtpDrafter:
    """Fills its window's cache behind every segment, and proposes greedily where asked."""

    def __init__(
        self,
        model: DeepSeekV4Model,
        packed: Mapping[str, PackedWeight],
        plain: Mapping[str, Tensor],
        cache: Mapping[str, Any],
        table: OpTable,
    ) -> None:
        arch = model.arch
        self._model, self._cache, self._table = model, cache, table
        self._layer = read_layer(arch, arch.layers, packed, plain, model.tables)
        self._join = (packed[f"{MTP}e_proj"], packed[f"{MTP}h_proj"])
        self._norms = (plain[f"{MTP}enorm"], plain[f"{MTP}hnorm"])
        self._collapse = tuple(plain[f"{MTP}hc_head_{leaf}"] for leaf in ("fn", "base", "scale"))
        self._norm = plain[f"{MTP}norm"]

    @property
    def group(self) -> int:
        """The cache group of its window."""
        number: int = self._cache["local"].group
        return number

    @torch.inference_mode()
    def read(self, step: Any) -> Tensor:
        """Streams [T, N, D] behind the draft layer; `executor.model_drafts` states the contract."""
        next_ids = torch.from_numpy(step.next_ids).to(step.inputs.ids.device)
        return self._streams(step.hidden.streams, next_ids, step.inputs, step.ops)

    @torch.inference_mode()
    def propose(self, starts: Any) -> Sequence[Sequence[int]]:
        """For each run as many ids as it wants. Where ranks of other domains meet at the experts,
        all take as many steps, of as many rows."""
        ops, wanted, level = self._table.phase(Phase.DRAFT), starts.wanted, starts.level
        going = list(range(len(wanted)))
        at, pages, streams = starts.positions, starts.pages, starts.left
        guesses, asked = [self._guess(streams, starts.ops)], [going]
        for ahead in range(1, max(1 + len(level), max(wanted, default=0))):
            last = guesses[-1]
            # A run goes no further than it wants: at the context's end there is no next position.
            kept = [n for n, i in enumerate(going) if wanted[i] > ahead]
            if len(kept) < len(going):
                rows = torch.tensor(kept, dtype=torch.int64, device=at.device)
                at, pages, streams, last = at[rows], pages[rows], streams[rows], last[rows]
                going = [going[n] for n in kept]
            padding = max(0, level[ahead - 1] - len(going)) if level else 0
            inputs = self._following(pages, at + ahead, last, padding)
            if padding:
                streams = torch.cat((streams, streams.new_zeros(padding, *streams.shape[1:])))
            streams = self._streams(streams, inputs.ids, inputs, ops)[: len(going)]
            guesses.append(self._guess(streams, ops))
            asked.append(going)
        found: list[list[int]] = [[] for _ in wanted]
        for i, token in zip(itertools.chain(*asked), torch.cat(guesses).tolist(), strict=True):
            found[i].append(token)
        return found

    def _streams(
        self, streams: Tensor, next_ids: Tensor, inputs: SegmentInputs, ops: PhaseOps
    ) -> Tensor:
        """Streams [T, N, D] behind the draft layer, from those behind the model or itself."""
        eps, (tokens, count, width) = self._model.arch.norm_eps, streams.shape
        e_proj, h_proj = self._join
        word = ops.rmsnorm(self._model.ends.words(next_ids, ops), self._norms[0], eps)
        flat = ops.rmsnorm(streams.reshape(-1, width), self._norms[1], eps)  # [T N, D]
        joined = ops.linear(flat, h_proj).view(tokens, count, width)
        joined = joined + ops.linear(word, e_proj).unsqueeze(1)
        return alone(self._model.run([self._layer], [self._cache], joined, inputs, ops))

    def _guess(self, streams: Tensor, ops: PhaseOps) -> Tensor:
        """The likeliest id behind each row: [rows] int64."""
        if not len(streams):
            return torch.zeros(0, dtype=torch.int64, device=streams.device)
        arch = self._model.arch
        x = ops.hyper_head(streams, *self._collapse, norm_eps=arch.norm_eps, eps=arch.hyper_eps)
        x = ops.rmsnorm(x, self._norm, arch.norm_eps)
        return self._model.ends.logits(x, ops.linear_f32).argmax(dim=-1)

    def _following(
        self, pages: Tensor, positions: Tensor, ids: Tensor, padding: int
    ) -> SegmentInputs:
        """One row for each sequence that goes on, at `positions` [S] beyond what it computed, with
        the pages [S, W] of its window; `padding` rows behind them belong to none."""
        local = self._cache["local"]
        page = pages.gather(1, (positions // local.entries).unsqueeze(1)).squeeze(1).long()
        slots = page * local.entries + positions % local.entries
        query_start = torch.arange(len(ids) + 1, dtype=torch.int32, device=ids.device)
        # The draft layer reads no other group.
        groups = [GroupInputs(None, slots)] * local.group
        groups.append(GroupInputs(pages, pad(slots, (0, padding), value=-1)))
        return SegmentInputs(
            ids=pad(ids, (0, padding)),
            positions=pad(positions, (0, padding)),
            query_start=query_start,
            context_lens=(positions + 1).int(),
            groups=tuple(groups),
            logit_rows=None,
        )
