"""A checkpoint's tensors against what a model reads: all faults in one error. No torch.

Faults of one kind in many layers or experts are told once, with their number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from metainfer.core.errors import ModelError, RefusedError
from metainfer.core.verdict import Reason
from metainfer.formats.checks import INPUT_LEAVES, StoredWeight
from metainfer.formats.index import TensorInfo
from metainfer.formats.schemes import is_quantised

FLOATS = ("F32", "F16", "BF16", "F64")
INTEGERS = ("I64", "I32")
#: Stored dtypes of block-scaled elements.
BLOCK_DTYPES = ("F8_E4M3", "I8", "U8")

MISSING, SHAPE, DTYPE, UNUSED = "missing-tensor", "tensor-shape", "tensor-dtype", "unused-tensor"
_CAUSES = {
    MISSING: ("lacks {}", "", "missing_tensor"),
    SHAPE: ("holds {}", " of another shape than its config says", "bad_shape"),
    DTYPE: ("holds {}", " of the wrong dtype", "bad_dtype"),
    UNUSED: ("holds {}", " that the model does not use", "unused_tensor"),
}
_REMEDIES = {
    MISSING: "The download is incomplete, or config.json belongs to another model.",
    UNUSED: "They would be ignored, and the answers might differ; check config.json.",
}


class CheckpointError(RefusedError, ModelError):
    """A checkpoint that cannot be used, with every fault found in its headers."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that a model reads: its logical shape; `integer` for tables of ids."""

    shape: tuple[int, ...]
    integer: bool = False


@dataclass(slots=True)
class Names:
    """Stored tensors by the names that a model knows them by.

    `reasons`: what stands in the way. `unknown`: stored names without meaning. `excused`: prefixes
    of names that are absent because of a reason given. `optional`: tensors known and not read (a
    draft's), by name; their shape is checked where it is not empty. `drafts`: they hold a draft
    layer that the family runs.
    """

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    reasons: list[Reason] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)
    optional: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drafts: bool = False

    def add(self, name: str, info: TensorInfo) -> None:
        if name in self.tensors:
            other = self.tensors[name].name
            self.wrong(f"{other} and {info.name} are both {name}", info.name)
        else:
            self.tensors[name] = info

    def wrong(self, message: str, stored: str) -> None:
        self.reasons.append(Reason("tensor-name", message, {"tensor": stored}))


def logical_shapes(names: Names, wanted: Mapping[str, Wanted]) -> dict[str, tuple[int, int]]:
    """The matrices that are stored in blocks: what `checks.examine` compares with."""
    shapes = {name: each.shape for name, each in wanted.items()} | names.optional
    found = {}
    for name, shape in shapes.items():
        info = names.tensors.get(name)
        packed = name.removesuffix("weight") + "weight_packed" in names.tensors
        if len(shape) == 2 and (packed or (info and info.scheme in BLOCK_DTYPES)):
            found[name] = (shape[0], shape[1])
    return found


def objections(
    names: Names,
    wanted: Mapping[str, Wanted],
    blocks: Mapping[str, StoredWeight],
    told: Iterable[Reason] = (),
    derived: Callable[[str], bool] = lambda name: False,
) -> list[Reason]:
    """Missing tensors, wrong shapes and dtypes of dense ones, and tensors that nobody reads.

    `blocks`: the block-scaled matrices, `told` what `checks.examine` said of them. `derived`:
    names that may be there and follow from others.
    """
    told_of = {reason.data.get(key) for reason in told for key in ("tensor", "scale")}
    found: list[Reason] = []
    for name, each in wanted.items():
        if name in blocks or name in told_of:
            continue
        info = names.tensors.get(name)
        if info is not None:
            found += _dense(info, each)
        elif not name.startswith(tuple(names.excused)):
            message = f"{name} {list(each.shape)} is missing"
            found.append(Reason(MISSING, message, {"tensor": name}))
    for name, shape in names.optional.items():
        if shape and name in names.tensors and name not in blocks and name not in told_of:
            found += _dense(names.tensors[name], Wanted(shape))
    used = {*wanted, *names.optional, *told_of}
    for weight, stored in blocks.items():
        stem = weight.removesuffix("weight")
        used |= {stored.data, stored.scale, stored.second}
        used |= {stem + leaf for leaf in INPUT_LEAVES}
    unused = [name for name in names.tensors if name not in used] + names.unknown
    found += [
        Reason(UNUSED, f"{name} is not used by the model", {"tensor": name})
        for name in unused
        if not derived(name)
    ]
    return found


def _dense(info: TensorInfo, wanted: Wanted) -> list[Reason]:
    told = f"{info.name} {info.scheme} {list(info.shape)}"
    if info.shape != wanted.shape:
        message = f"{told} where the config says {list(wanted.shape)}"
        return [Reason(SHAPE, message, {"tensor": info.name})]
    allowed = INTEGERS if wanted.integer else FLOATS
    if info.scheme in allowed or (is_quantised(info.scheme) and not wanted.integer):
        return []
    message = f"{told} needs to be {' or '.join(allowed)}"
    return [Reason(DTYPE, message, {"tensor": info.name})]


def fold(reasons: Sequence[Reason]) -> list[Reason]:
    """Reasons that differ in numbers of layers and experts alone become one, with their count."""
    groups: dict[tuple[str, str], list[Reason]] = {}
    for reason in reasons:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", reason.message)
        groups.setdefault((reason.code, pattern), []).append(reason)
    folded = []
    for (code, _), group in groups.items():
        first = group[0]
        if len(group) > 1:
            message = f"{first.message} (and {len(group) - 1} more like it)"
            first = Reason(code, message, {**first.data, "count": len(group)})
        folded.append(first)
    return folded


def refusal(where: str, reasons: Sequence[Reason]) -> CheckpointError:
    """The one error of a checkpoint with these faults, counted by kind."""
    counts: dict[str, int] = {}
    for reason in reasons:
        counts[reason.code] = counts.get(reason.code, 0) + 1
    causes = []
    for code, count in counts.items():
        head, tail, _ = _CAUSES.get(code, ("has other faults in {}", "", ""))
        causes.append(head.format(f"{count} tensor{'s' * (count > 1)}") + tail)
    only = next(iter(counts)) if len(counts) == 1 else ""
    return CheckpointError(
        f"{where} {', '.join(causes)}.",
        _REMEDIES.get(only, "Use config.json and weights of one release; fetch them again."),
        reasons=fold(reasons),
        code=_CAUSES[only][2] if only in _CAUSES else "bad_checkpoint",
    )
