"""The draft that a DeepSeek-V4 checkpoint brings: MTP or DSpark, and its tensors. No torch.

Which one follows from the tensors (``num_nextn_predict_layers`` says 1 for both): an MTP stage
joins the next token's embedding with the streams by ``e_proj`` and ``h_proj``, DSpark's first
stage reads layers of the model through ``main_proj``, its last holds the token-pair head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from metainfer.models.deepseek_v4.arch import DeepSeekV4Arch, LayerKind
from metainfer.models.deepseek_v4.weights import packed_weights, plain_weights

_STAGE = re.compile(r"mtp\.(\d+)\.(.+)")


class DraftKind(StrEnum):
    MTP = "mtp"
    DSPARK = "dspark"


@dataclass(frozen=True, slots=True)
class Draft:
    kind: DraftKind
    stages: int


def find_draft(arch: DeepSeekV4Arch, names: Iterable[str]) -> Draft | None:
    """The draft among the publisher's `names`, or None where the file has none.

    Tensors decide; where they are of neither kind, DSpark's config keys do.
    """
    stages, parts = set(), set()
    for name in names:
        match = _STAGE.fullmatch(name)
        if match is not None:
            stages.add(int(match[1]))
            parts.add(match[2].partition(".")[0])
    if not stages:
        return None
    dspark = bool(parts & {"main_proj", "main_norm", "markov_head", "confidence_head"})
    if not dspark and not parts & {"e_proj", "h_proj", "enorm", "hnorm"}:
        dspark = arch.dspark_block > 0
    return Draft(DraftKind.DSPARK if dspark else DraftKind.MTP, max(stages) + 1)


def draft_shapes(
    arch: DeepSeekV4Arch, draft: Draft, *, tapped: int = 3, rank: int = 256
) -> dict[str, tuple[int, ...]]:
    """Logical shape of each tensor of the draft, by the publisher's name.

    A stage is a block without compression, routed by scores. `tapped`: layers of the model that
    DSpark reads; `rank`: width of its token-pair head.
    """
    hidden, streams = arch.hidden, arch.streams
    found: dict[str, tuple[int, ...]] = {}
    for stage in range(draft.stages):
        found |= {f"mtp.{stage}.{name}": shape for name, shape in _block(arch).items()}
    last = draft.stages - 1
    square = (hidden, hidden)
    for stage in range(draft.stages) if draft.kind is DraftKind.MTP else (last,):
        head = f"mtp.{stage}.hc_head"
        found |= {f"mtp.{stage}.norm.weight": (hidden,), f"{head}_fn": (streams, streams * hidden)}
        found |= {f"{head}_base": (streams,), f"{head}_scale": (1,)}
    if draft.kind is DraftKind.MTP:
        for stage in range(draft.stages):
            found |= {f"mtp.{stage}.{name}.weight": square for name in ("e_proj", "h_proj")}
            found |= {f"mtp.{stage}.{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
        return found
    pair = (arch.vocab_size, rank)
    return found | {
        "mtp.0.main_proj.weight": (hidden, tapped * hidden),
        "mtp.0.main_norm.weight": (hidden,),
        f"mtp.{last}.markov_head.markov_w1.weight": pair,
        f"mtp.{last}.markov_head.markov_w2.weight": pair,
        f"mtp.{last}.confidence_head.proj.weight": (1, hidden + rank),
    }


def _block(arch: DeepSeekV4Arch) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer without compression, without ``layers.0.``."""
    one = replace(arch, layers=1, kinds=(LayerKind.WINDOW,), hash_layers=0)
    found: dict[str, tuple[int, ...]] = {}
    for spec in (*packed_weights(one), *plain_weights(one)):
        if spec.layer == 0:
            names = [name.removeprefix("layers.0.") for name in spec.tensors]
            found |= dict(zip(names, spec.tensor_shapes(), strict=True))
    return found
