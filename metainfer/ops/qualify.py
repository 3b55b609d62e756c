"""Run an implementation's cases on this device. The verdict is evidence, and so is a refusal.

At first start every chosen implementation that has never run on this machine goes through here; a
kernel known only to compile becomes eligible by passing. Inputs are fresh, outputs poisoned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from metainfer.core.step import Phase
from metainfer.core.verdict import ACCEPT, Verdict, all_of, reject
from metainfer.formats.block_codecs import BlockTensor
from metainfer.kernels.evidence import Qualification
from metainfer.kernels.impl import Context, Impl, OpRequest, resolve_attribute
from metainfer.kernels.registry import Registry
from metainfer.kernels.select_op import objections
from metainfer.kv.store.entries import EntryPages, StateRows
from metainfer.ops.case import DTYPES, Case, Weight, allowed, errors, poisoned
from metainfer.ops.case_caches import (
    Single,
    contents,
    exactly,
    held,
    scaled_layout,
    stored_floor,
)
from metainfer.ops.catalog import op_cases
from metainfer.ops.linear.packed import PackedWeight, pack_dense
from metainfer.platform.facts import Facts


def qualify(
    impl: Impl,
    dtype: str,
    device: torch.device | str,
    facts: Facts,
    registry: Registry,
    *,
    seed: int = 0,
    phases: Iterable[Phase] = tuple(Phase),
) -> Verdict:
    """Accepted iff at least one case applies and all that apply pass; else every reason.

    A case applies when the implementation has no objection to its shape in one of `phases`.
    """
    module = op_cases(impl.op)
    wanted = frozenset(phases)
    cases = module.CASES[impl.op](seed)
    more = getattr(module, "FOREIGN", {}).get(impl.op)
    if more is not None and (impl.library or impl.provider == "cuda"):
        cases = cases + more(seed)  # of rows where such kernels change their form
    results = [
        check(impl, case, dtype, device, registry)
        for case in cases
        if applies(impl, case, dtype, facts, wanted)
    ]
    if not results:
        return reject("cases", f"no case of {impl.op} applies to {impl.name} in {dtype} here")
    return all_of(results)


def qualify_all(
    impls: Sequence[Impl],
    dtype: str,
    device: torch.device | str,
    facts: Facts,
    registry: Registry,
    *,
    seed: int = 0,
) -> list[Qualification]:
    """One record per implementation, for `kernels.evidence.evidence_for`."""
    records = []
    for impl in impls:
        verdict = qualify(impl, dtype, device, facts, registry, seed=seed)
        reasons = tuple(reason.message for reason in verdict.reasons)
        records.append(Qualification(impl.id, verdict.accepted, reasons))
    return records


def applies(impl: Impl, case: Case, dtype: str, facts: Facts, phases: frozenset[Phase]) -> bool:
    """Whether `impl` says that it serves `case` in `dtype` in one of `phases`."""
    for phase in Phase:
        if phase in phases and phase in case.phases and phase in impl.phases:
            request = OpRequest(
                case.op, case.op, phase, dtype, case.shape, case.semantics, case.schemes
            )
            if objections(impl, Context(request, facts, impl.requires_layout)).accepted:
                return True
    return False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case of one implementation. `results`: what it gave, on the host; `layouts`: for each,
    the scaled layout that rounded it. `error`, `allowed`: (mean, worst) of the result that is
    nearest to its limit; None where nothing came, or values are compared bit for bit."""

    case: Case
    verdict: Verdict
    args: tuple[Any, ...] = ()
    results: tuple[Tensor, ...] = ()
    layouts: tuple[str, ...] = ()
    error: tuple[float, float] | None = None
    allowed: tuple[float, float] | None = None


def check(
    impl: Impl, case: Case, dtype: str, device: torch.device | str, registry: Registry
) -> Verdict:
    """Run one case and judge it. An exception of the implementation is a reason too."""
    return run_case(impl, case, dtype, device, registry).verdict


def run_case(
    impl: Impl,
    case: Case,
    dtype: str,
    device: torch.device | str,
    registry: Registry,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """`check`, with the numbers. `values`: of a setting of `impl`, its own default without."""
    rounded = held(case.args, impl.requires_layout, dtype)
    try:
        given, run = given_args(impl, case, dtype, device, registry), impl.resolve()
        with poisoned():
            mine = _results(partial(run, **values), case, given)
            if case.ahead is not None and impl.rounds:
                ahead = _results(partial(run, **values), case, _rounded(impl, case, given, values))
                if not _same_bits(mine, ahead):
                    text = f"{case.name}: rows that were rounded ahead give other numbers"
                    return Outcome(case, reject("rounds", text, case=case.name))
    except Exception as error:  # noqa: BLE001 - whatever it raises is a reason
        message = str(error).strip().splitlines() or [""]
        text = f"{case.name}: {type(error).__name__}: {message[0]}"
        return Outcome(case, reject("raised", text, case=case.name))
    return judge(case, rounded, mine, given, dtype, device)


def _rounded(
    impl: Impl, case: Case, given: tuple[Any, ...], values: Mapping[str, Any]
) -> tuple[Any, ...]:
    """`given` with the rows of `case.ahead` as another rank would send them."""
    assert case.ahead is not None
    rows, weight = case.ahead
    sent: Any = resolve_attribute(impl.rounds)(given[rows], given[weight], **values)
    return (*given[:rows], sent, *given[rows + 1 :])


def _same_bits(mine: Any, theirs: Any) -> bool:
    pairs = zip(_flat(mine), _flat(theirs), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def given_args(
    impl: Impl, case: Case, dtype: str, device: torch.device | str, registry: Registry
) -> tuple[Any, ...]:
    """The arguments of `case` as `impl` gets them: rounded, on `device`, weights packed."""
    kind, rounded = DTYPES[dtype], held(case.args, impl.requires_layout, dtype)
    given = _placed(rounded, device, lambda w: _pack(w, impl, registry, kind, device))
    return _sliced(given, case.fused)


def judge(
    case: Case,
    rounded: tuple[Any, ...],
    mine: Any,
    given: tuple[Any, ...],
    dtype: str,
    device: torch.device | str,
) -> Outcome:
    """Judge what an implementation made of `given`: the arguments `rounded` (of `held`) on its
    device, weights packed."""
    kind, module = DTYPES[dtype], op_cases(case.op)
    reference, recipe = module.REFERENCES[case.op], module.RECIPES[case.op]
    ours, layouts = tuple(tensor.cpu() for tensor in _flat(mine)), tuple(_scaled(mine, given))
    if case.exact:
        same_type = _placed(rounded, device, lambda w: _dense(w, kind, kind, device, kind))
        want = _results(reference, case, same_type)
        pairs = zip(ours, _flat(want), strict=True)
        verdict = all_of(_exact(case, index, a, b.cpu()) for index, (a, b) in enumerate(pairs))
        return Outcome(case, verdict, rounded, ours, layouts)
    found = Outcome(case, ACCEPT, rounded, ours, layouts)
    first = _compare(found, reference, recipe, kind, kind)
    pair = getattr(module, "ROUNDED", {}).get(case.op) if _block_scaled(rounded) else None
    if first.verdict.accepted or pair is None:
        return first
    # The other legal arithmetic: activations rounded, weights exactly as stored.
    stored = torch.float64 if kind == torch.float64 else torch.float32
    second = _compare(found, pair[0], pair[1], kind, stored)
    if second.verdict.accepted:
        return second
    return dataclasses.replace(first, verdict=first.verdict & second.verdict)


def truth(
    case: Case,
    args: tuple[Any, ...],
    function: Callable[..., Any],
    kind: torch.dtype,
    weights: torch.dtype,
) -> list[Tensor]:
    """Results of `function` on `args` (of `held`), weights rounded to `weights`: in float64, or in
    `kind` where values are compared bit for bit."""
    exact, wide = (args, kind) if case.exact else (exactly(args, kind), torch.float64)
    placed = _placed(exact, "cpu", lambda w: _dense(w, weights, wide, "cpu", kind))
    return _flat(_results(function, case, placed))


def _compare(
    found: Outcome,
    reference: Callable[..., Any],
    recipe: Callable[..., Any],
    kind: torch.dtype,
    weights: torch.dtype,
) -> Outcome:
    """Its results against `reference` in float64, within the error of `recipe` in `kind`; both on
    weights rounded to `weights`."""
    case, args = found.case, found.args
    recipe_args = _placed(args, "cpu", lambda w: _dense(w, weights, weights, "cpu", kind))
    theirs = _flat(_results(recipe, case, recipe_args))
    exact = truth(case, args, reference, kind, weights)
    rows = zip(found.results, theirs, exact, found.layouts, strict=True)
    judged = [_judge(case, index, *row) for index, row in enumerate(rows)]
    numbers = [(error, limit) for _, error, limit in judged if error is not None]
    worst = max(numbers, key=lambda n: max(n[0][0] / n[1][0], n[0][1] / n[1][1]), default=None)
    return dataclasses.replace(
        found,
        verdict=all_of(verdict for verdict, _, _ in judged),
        error=worst[0] if worst else None,
        allowed=worst[1] if worst else None,
    )


def _block_scaled(args: tuple[Any, ...]) -> bool:
    return any(
        isinstance(raw, BlockTensor) for arg in args if isinstance(arg, Weight) for raw in arg.raws
    )


_Pair = tuple[float, float]


def _judge(
    case: Case, index: int, mine: Tensor, theirs: Tensor, truth: Tensor, layout: str
) -> tuple[Verdict, _Pair | None, _Pair]:
    """Verdict, error and limit. A result has the recipe's dtype (some stay float32 in a bfloat16
    model) and is judged in it; whole numbers (chosen experts, selected entries) must equal the
    truth. What `layout` rounded may lie a step off next to a border. NaN in the truth is memory
    that must stay untouched."""
    where, dtype = f"{case.name}, result {index}", theirs.dtype
    if mine.shape != truth.shape or mine.dtype != dtype:
        got, want = f"{mine.dtype} {list(mine.shape)}", f"{dtype} {list(truth.shape)}"
        text = f"{where}: {got} instead of {want}"
        return reject("result", text, case=case.name), None, (0.0, 0.0)
    if case.rows is not None:
        mine, theirs, truth = mine[: case.rows], theirs[: case.rows], truth[: case.rows]
    if not dtype.is_floating_point:
        return _exact(case, index, mine, truth), None, (0.0, 0.0)
    hole = truth.isnan()
    if not torch.equal(hole, mine.isnan()):
        text = f"{where}: NaN, or writes where nothing belongs"
        return reject("error", text, case=case.name), None, (0.0, 0.0)
    mine, theirs, truth = (t.masked_fill(hole, 0) for t in (mine, theirs, truth))
    found, limit = errors(mine, truth), allowed(errors(theirs, truth), dtype)
    if layout:
        floor = stored_floor(layout, int((~hole).sum()))
        limit = (max(limit[0], floor[0]), max(limit[1], floor[1]))
    if found[0] <= limit[0] and found[1] <= limit[1]:
        return ACCEPT, found, limit
    verdict = reject(
        "error",
        f"{where}: error {found[0]:.2e} mean, {found[1]:.2e} worst; "
        f"allowed {limit[0]:.2e}, {limit[1]:.2e}",
        case=case.name,
        error=found,
        allowed=limit,
    )
    return verdict, found, limit


def _exact(case: Case, index: int, mine: Tensor, want: Tensor) -> Verdict:
    where = f"{case.name}, result {index}"
    if mine.shape != want.shape or mine.dtype != want.dtype:
        got, asked = f"{mine.dtype} {list(mine.shape)}", f"{want.dtype} {list(want.shape)}"
        return reject("result", f"{where}: {got} instead of {asked}", case=case.name)
    if mine.dtype.is_floating_point:
        same = (mine == want) | (mine.isnan() & want.isnan())
    else:
        same = mine == want
    wrong = int((~same).sum())
    if wrong == 0:
        return ACCEPT
    return reject("error", f"{where}: {wrong} of {want.numel()} values differ", case=case.name)


def _results(function: Callable[..., Any], case: Case, args: tuple[Any, ...]) -> Any:
    result = function(*args, **case.kwargs)
    written = tuple(args[index] for index in case.outputs)
    if not written:
        return result
    return written if result is None else (result, *written)


def _flat(result: Any) -> list[Tensor]:
    """The tensors of a result: a tensor, a cache's contents, a tuple, or a dataclass of tensors
    and None."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, EntryPages):
        return [contents(result)]
    if isinstance(result, StateRows):
        return [result.data]
    if dataclasses.is_dataclass(result):
        values = [getattr(result, f.name) for f in dataclasses.fields(result)]
        return [value for value in values if value is not None]
    return [tensor for item in result for tensor in _flat(item)]


def _scaled(result: Any, args: tuple[Any, ...]) -> list[str]:
    """For each tensor of `_flat`, the scaled layout that rounded it, or nothing."""
    parts = result if isinstance(result, tuple) else (result,)
    return [scaled_layout(args, part) for part in parts for _ in _flat(part)]


def _placed(
    args: tuple[Any, ...], device: torch.device | str, pack: Callable[[Weight], PackedWeight]
) -> tuple[Any, ...]:
    """Fresh copies on `device`, weights packed, tensors inside dataclasses moved."""
    placed: list[Any] = []
    for arg in args:
        if isinstance(arg, Weight):
            placed.append(pack(arg))
        elif isinstance(arg, Single):
            placed.append(arg.data.clone(memory_format=torch.contiguous_format).to(device))
        elif isinstance(arg, Tensor):
            placed.append(arg.clone(memory_format=torch.contiguous_format).to(device))
        elif dataclasses.is_dataclass(arg) and not isinstance(arg, type):
            fields = {f.name: getattr(arg, f.name) for f in dataclasses.fields(arg)}
            moved = {
                k: v.clone().to(device) if isinstance(v, Tensor) else v for k, v in fields.items()
            }
            placed.append(dataclasses.replace(arg, **moved))
        else:
            placed.append(arg)
    return tuple(placed)


def _sliced(args: tuple[Any, ...], fused: tuple[int, ...]) -> tuple[Any, ...]:
    """`args` with those at `fused` as neighbouring slices of one tensor."""
    parts = [args[index] for index in fused]
    if not parts:
        return args
    joined = torch.cat([part.flatten(1) for part in parts], dim=1)
    slices = torch.split(joined, [part.shape[1] * part.shape[2] for part in parts], dim=1)
    views = {
        index: piece.view(part.shape)
        for index, piece, part in zip(fused, slices, parts, strict=True)
    }
    return tuple(views.get(index, arg) for index, arg in enumerate(args))


def _pack(
    weight: Weight, impl: Impl, registry: Registry, dtype: torch.dtype, device: torch.device | str
) -> PackedWeight:
    layout = registry.layout(impl.requires_layout[weight.role])
    bias = weight.bias.to(dtype) if weight.bias is not None else None
    packed = layout.resolve()(list(weight.raws), bias, dtype=dtype, device=device, site=impl.op)
    assert isinstance(packed, PackedWeight)
    return packed


def _dense(
    weight: Weight,
    rounded: torch.dtype,
    dtype: torch.dtype,
    device: torch.device | str,
    kind: torch.dtype,
) -> PackedWeight:
    """The weight as decoded, rounded to `rounded`, its bias to `kind`; both held in `dtype`."""
    packed = pack_dense(weight.raws, dtype=rounded, device=device)
    data = {"weight": packed.data["weight"].to(dtype)}
    bias = weight.bias
    moved = bias.to(kind).to(device=device, dtype=dtype) if bias is not None else None
    first = weight.raws[0]
    fmt = first.format if isinstance(first, BlockTensor) else None
    return dataclasses.replace(packed, data=data, bias=moved, format=fmt)
