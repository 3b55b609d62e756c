"""One rank's collectives: plans made once, agreed on, carried out by the backend each names.

`auto` may fall back, once, when a plan is made, on the record: the plan's decision lists every
backend that was refused or slower. A running collective never changes its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from metainfer.comm.agree import Exchange, agree
from metainfer.comm.plan import AUTO, CommPlan, Offer, choose, plan_digest
from metainfer.comm.plan_file import Key
from metainfer.comm.plan_offers import Ability, offers
from metainfer.comm.plan_tiers import Tier
from metainfer.comm.request import Request
from metainfer.comm.topology import Topology
from metainfer.core.digest import to_plain
from metainfer.core.errors import InternalError


class Backend(Protocol):
    """What carries a plan out: one rank of a group that is open."""

    @property
    def run(self) -> Callable[..., Any]:
        """``run(plan, given, out=None)``, and with `side` and `rows` where it has slabs."""
        ...

    def close(self) -> None: ...


class Communicator:
    """`backends`: name -> open backend; ``host:copy`` may have one of its own. `abilities` also
    names those that could not be opened, with the reason, so that a refusal can be read."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        abilities: Sequence[Ability],
        *,
        topology: Topology | None = None,
        tiers: Mapping[Key, Sequence[Tier]] | None = None,
        forced: str = AUTO,
        deterministic: bool = False,
    ) -> None:
        self._backends = dict(backends)
        self._abilities = tuple(abilities)
        self._topology = topology
        self._tiers = dict(tiers or {})
        self._forced, self._deterministic = forced, deterministic
        self._plans: dict[Request, CommPlan] = {}
        self._by_name: dict[tuple[str, Request], CommPlan] = {}
        self._agreed: set[Request] = set()
        self._ruled = False
        self.calls: Counter[str] = Counter()

    def plan(self, request: Request) -> CommPlan:
        """The plan for `request`, made on first asking.

        Raises:
            RefusedError: nobody can run it, or the forced backend cannot; with every reason.
        """
        found = self._plans.get(request)
        if found is None:
            key = (request.op.value, request.world, request.dtype)
            found = choose(
                request,
                self.offers(request),
                self._tiers.get(key, ()),
                forced=self._forced,
                deterministic=self._deterministic,
            )
            self._plans[request] = found
        return found

    def offers(self, request: Request) -> tuple[Offer, ...]:
        """What each backend says of `request`."""
        return offers(request, self._abilities, self._topology)

    def graph_safe(self, method: str, request: Request) -> bool:
        """Whether ``backend:algorithm`` can be captured."""
        return any(each.key == method and each.graph_safe for each in self.offers(request))

    def run_by(self, method: str, request: Request, given: Any, out: Any) -> Any:
        """Carry out `request` by ``backend:algorithm``, whatever its plan: for who measures. Every
        rank calls the same. Raises as `run`."""
        key = (method, request)
        plan = self._by_name.get(key)
        if plan is None:
            plan = choose(request, self.offers(request), forced=method)
            self._by_name[key] = plan
        backend = self._backends.get(method) or self._backends[plan.backend]
        return backend.run(plan, given, out)

    def agree(self, exchange: Exchange) -> str:
        """Compare all plans made so far with the other ranks'; their common digest.

        Raises:
            DisagreementError: on every rank, naming the plans that differ.
        """
        plans = list(self._plans.values())
        common = agree("collective plans", plan_digest(plans), exchange)
        self._agreed.update(self._plans)
        return common

    def agree_on_rules(self, exchange: Exchange) -> str:
        """Compare what plans follow from with the other ranks; the common digest.

        A plan is a pure function of these, so any request may be planned from here on when it first
        occurs: the sizes of eager steps are not known beforehand.

        Raises:
            DisagreementError: on every rank, naming the rules that differ.
        """
        rules = {
            "abilities": to_plain(self._abilities),
            "topology": to_plain(self._topology),
            "tiers": {"/".join(map(str, key)): to_plain(of) for key, of in self._tiers.items()},
            "forced": self._forced,
            "deterministic": self._deterministic,
        }
        common = agree("rules of collectives", rules, exchange)
        self._ruled = True
        return common

    def run(self, request: Request, given: Any, out: Any = None, **extras: Any) -> Any:
        """Carry out an agreed request; `extras` are `side` and `rows` of the slab backends.

        Raises:
            InternalError: neither its plan nor the rules were agreed on before.
            RefusedError: nobody can run it.
            CommError: the group is broken.
        """
        if not self._ruled and request not in self._agreed:
            raise InternalError(
                f"{request.name} was not planned and agreed on before its first call"
            )
        plan = self.plan(request)
        method = f"{plan.backend}:{plan.algorithm}"
        backend = self._backends.get(method) or self._backends[plan.backend]
        self.calls[method] += 1
        return backend.run(plan, given, out, **extras)

    def describe(self) -> dict[str, object]:
        """Plans with their losers, and calls by path; a planned path without calls is `unused`."""
        planned = {f"{plan.backend}:{plan.algorithm}" for plan in self._plans.values()}
        total = sum(self.calls.values())
        return {
            "plans": [plan.to_json() for plan in self._plans.values()],
            "share": {name: count / total for name, count in sorted(self.calls.items())},
            "unused": sorted(planned - set(self.calls)) if total else [],
        }

    def close(self) -> None:
        """Close every backend, the last opened first."""
        for backend in reversed(list(self._backends.values())):
            backend.close()
