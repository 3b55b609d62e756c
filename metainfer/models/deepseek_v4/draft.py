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

    @torch.inference_mode()
    def propose(self, step: Any) -> Sequence[Sequence[int]]:
        """For each run as many ids as it wants; `executor.speculative` states the contract."""
        device = step.inputs.ids.device
        next_ids = torch.from_numpy(step.next_ids).to(device)
        streams = self._streams(step.hidden.streams, next_ids, step.inputs, step.ops)
        asking = [i for i, count in enumerate(step.wanted) if count]
        if not asking:
            return [()] * len(step.wanted)
        runs = torch.tensor(asking, device=device)
        rows = torch.from_numpy(step.last_rows).to(device)[runs]
        at, streams = step.inputs.positions[rows], streams[rows]  # [S'], [S', N, D]
        guesses, asked = [self._guess(streams, step.ops)], [asking]
        ops = self._table.phase(Phase.DRAFT)
        for ahead in range(1, max(step.wanted)):
            last = guesses[-1]
            # A run goes no further than it wants: at the context's end there is no next position.
            going = [n for n, i in enumerate(asked[-1]) if step.wanted[i] > ahead]
            if len(going) < len(asked[-1]):
                kept = torch.tensor(going, device=device)
                runs, at, streams, last = runs[kept], at[kept], streams[kept], last[kept]
            asked.append([asked[-1][n] for n in going])
            inputs = self._following(step.inputs, runs, at + ahead, last)
            streams = self._streams(streams, last, inputs, ops)
            guesses.append(self._guess(streams, ops))
        found: list[list[int]] = [[] for _ in step.wanted]
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
        arch = self._model.arch
        x = ops.hyper_head(streams, *self._collapse, norm_eps=arch.norm_eps, eps=arch.hyper_eps)
        x = ops.rmsnorm(x, self._norm, arch.norm_eps)
        return self._model.ends.logits(x, ops.linear_f32).argmax(dim=-1)

    def _following(
        self, inputs: SegmentInputs, runs: Tensor, positions: Tensor, ids: Tensor
    ) -> SegmentInputs:
        """One row for each asking sequence, at `positions` [S'] beyond what it computed."""
        local = self._cache["local"]
        pages = inputs.groups[local.group].pages[runs]  # [S', W]
        page = pages.gather(1, (positions // local.entries).unsqueeze(1)).squeeze(1).long()
        slots = page * local.entries + positions % local.entries
        groups = list(inputs.groups)
        groups[local.group] = GroupInputs(pages, slots)
        return SegmentInputs(
            ids=ids,
            positions=positions,
            query_start=torch.arange(len(runs) + 1, dtype=torch.int32, device=runs.device),
            context_lens=(positions + 1).int(),
            groups=tuple(groups),
            logit_rows=None,
        )
