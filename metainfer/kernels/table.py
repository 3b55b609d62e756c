"""The run-time table: what was chosen at start, as plain attributes. No torch.

``table.phase(Phase.DECODE).rmsnorm(x, weight, eps)`` costs an attribute and a call. `linear` looks
its implementation up by ``weight.site``. An op that a model uses at several sites (attention with
and without a window) is fetched once by `PhaseOps.at`.

With a `Trace`, every call is counted by phase and implementation, and `Trace.inside` says whether
an op is running; without one nothing is wrapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from metainfer.core.errors import InternalError
from metainfer.core.step import Phase
from metainfer.kernels.choice import Choice, Selection
from metainfer.kernels.impl import resolve_attribute

OPS = (
    "embed",
    "rmsnorm",
    "add_rmsnorm",
    "linear",
    "swiglu",
    "rope",
    "kv_write",
    "attn_paged",
    "sample",
    "linear_f32",
    "swiglu_clamp",
    "hyper_pre",
    "hyper_mix_pre",
    "hyper_mix",
    "hyper_head",
    "latent_qkv",
    "compress",
    "compress_index",
    "index_query",
    "index_select",
    "attn_sparse",
    "out_group",
    "moe_route",
    "moe_route_hash",
    "moe_experts",
    "lora",
    "attn_part",
    "attn_paged_part",
    "attn_weigh",
    "index_part",
    "index_merge",
)

BY_WEIGHT = ("linear", "linear_f32")
"""Ops whose implementation is looked up by the weight's site."""

# Op signatures are in ops/README.md; tensors cannot be named in a room without torch.
Function = Callable[..., Any]


class Trace:
    """Calls by (phase, site, implementation id), and how deep in table ops we are."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[Phase, str, str]] = Counter()
        self._depth = 0

    @property
    def inside(self) -> bool:
        """An op of the table is running."""
        return self._depth > 0

    def by_impl(self, phase: Phase) -> dict[str, int]:
        """Calls in `phase` by implementation id."""
        counts: Counter[str] = Counter()
        for (where, _, impl), count in self.calls.items():
            if where is phase:
                counts[impl] += count
        return dict(counts)

    def wrap(self, function: Function, phase: Phase, site: str, impl: str) -> Function:
        """`function`, counted."""
        key = (phase, site, impl)

        def traced(*args: Any, **kwargs: Any) -> Any:
            self.calls[key] += 1
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return traced


class PhaseOps:
    """The ops of one phase. An attribute exists for every op of the selection.

    An op with one site, or with a site named like the op, or with the same implementation at all
    sites is the attribute itself; otherwise the attribute refuses and `at` must be used.
    """

    __slots__ = ("_impls", "_rounds", "_sites", "phase", *OPS)

    embed: Function
    rmsnorm: Function
    add_rmsnorm: Function
    linear: Function
    swiglu: Function
    rope: Function
    kv_write: Function
    attn_paged: Function
    sample: Function
    linear_f32: Function
    swiglu_clamp: Function
    hyper_pre: Function
    hyper_mix_pre: Function
    hyper_mix: Function
    hyper_head: Function
    latent_qkv: Function
    compress: Function
    compress_index: Function
    index_query: Function
    index_select: Function
    attn_sparse: Function
    out_group: Function
    moe_route: Function
    moe_route_hash: Function
    moe_experts: Function
    lora: Function
    attn_part: Function
    attn_paged_part: Function
    attn_weigh: Function
    index_part: Function
    index_merge: Function

    def __init__(self, phase: Phase, functions: Mapping[str, tuple[Choice, Function]]) -> None:
        self.phase = phase
        self._sites = {site: function for site, (_, function) in functions.items()}
        self._impls = {site: choice.impl.id for site, (choice, _) in functions.items()}
        self._rounds = {
            site: resolve_attribute(choice.impl.rounds)
            for site, (choice, _) in functions.items()
            if choice.impl.rounds
        }
        for op in OPS:
            sites = [site for site, (choice, _) in functions.items() if choice.request.op == op]
            if sites:
                setattr(self, op, self._attribute(op, sites))

    def at(self, site: str) -> Function:
        """The function chosen at `site`. Look it up at start, not per call."""
        function = self._sites.get(site)
        if function is None:
            listed = ", ".join(self._sites)
            raise InternalError(
                f"no op was selected at {site!r} in {self.phase}; there is: {listed}"
            )
        return function

    def rounding(self, site: str) -> Function | None:
        """What the function at `site` does to rows, beside its weight, before anything else; it
        takes the result for them. None: it takes rows as they are."""
        return self._rounds.get(site)

    def impl(self, site: str) -> str:
        """Implementation id at `site`."""
        return self._impls[site]

    def _attribute(self, op: str, sites: list[str]) -> Function:
        if op in BY_WEIGHT:
            return _by_site({site: self._sites[site] for site in sites})
        if op in sites:
            return self._sites[op]
        if len({self._impls[site] for site in sites}) == 1:
            return self._sites[sites[0]]
        return _ambiguous(op, sites)


class OpTable:
    """All phases of a selection, resolved: imports happen here, once."""

    def __init__(self, choices: Selection | Iterable[Choice], trace: Trace | None = None) -> None:
        listed = choices.bundle.choices if isinstance(choices, Selection) else tuple(choices)
        self.choices = tuple(listed)
        self.trace = trace
        phases: dict[Phase, dict[str, tuple[Choice, Function]]] = {}
        for choice in self.choices:
            request, impl = choice.request, choice.impl
            function = impl.resolve()
            if choice.tuned is not None:
                function = partial(function, **choice.tuned.values)
            if trace is not None:
                function = trace.wrap(function, request.phase, request.site, impl.id)
            phases.setdefault(request.phase, {})[request.site] = (choice, function)
        self._phases = {phase: PhaseOps(phase, chosen) for phase, chosen in phases.items()}

    def phase(self, phase: Phase) -> PhaseOps:
        """The ops of `phase`.

        Raises:
            InternalError: nothing was selected for it; a neighbour's choice is never borrowed.
        """
        ops = self._phases.get(phase)
        if ops is None:
            raise InternalError(f"no ops were selected for the {phase} phase")
        return ops

    @property
    def phases(self) -> tuple[Phase, ...]:
        return tuple(self._phases)


def _by_site(functions: Mapping[str, Function]) -> Function:
    table = dict(functions)

    def linear(x: Any, weight: Any) -> Any:
        return table[weight.site](x, weight)

    return linear


def _ambiguous(op: str, sites: list[str]) -> Function:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InternalError(f"{op} runs differently at {', '.join(sites)}; fetch it with at(site)")

    return refuse
