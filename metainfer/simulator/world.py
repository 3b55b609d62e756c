"""A resolved plan as a world to simulate: its limits, caches, prices."""

from __future__ import annotations

from metainfer.core.errors import RefusedError
from metainfer.core.step import Phase
from metainfer.planner.amounts import Price
from metainfer.planner.bound import bound
from metainfer.planner.drafts import MODEL
from metainfer.planner.resolve import Resolved
from metainfer.platform.facts import Facts
from metainfer.scheduler.config import SchedulerConfig
from metainfer.simulator.run import World


def world_of(resolved: Resolved, facts: Facts) -> World:
    """The world of a plan on a machine; prices are measured ones where there are any.

    Raises:
        RefusedError: the family has no cost model, or the machine's rates are unknown.
    """
    plan, chosen = resolved.plan, resolved.chosen
    price: Price | None = chosen.calibration
    if price is None:
        price = bound(facts, plan.model.dtype)
        if price is not None and price.rate is None:
            raise RefusedError(
                f"the {plan.model.dtype} matrix rate of {facts.device.name} is unknown, so no "
                "prompt can be priced.",
                "Give the machine file dot_flops, or calibrate on the machine.",
                code="unknown_rate",
            )
    if chosen.cost is None or price is None:
        raise RefusedError(
            f"steps of {plan.model.family} on {facts.device.name} cannot be priced: no cost model, "
            "or the memory's read rate is unknown.",
            "Give the machine file read_bytes_s, or calibrate on the machine.",
            code="unknown_rate",
        )
    limits = plan.limits
    config = SchedulerConfig(
        max_context=limits.max_context,
        max_running=min(resolved.sizes.slots, -(-limits.max_running // plan.kv_domains)),
        step_tokens=limits.step_tokens,
        mixed_prefill_tokens=limits.mixed_prefill_tokens,
        max_waiting=1 << 30,  # a workload is served whole
        max_drafts=plan.draft.depth,
        model_drafts=plan.draft.method == MODEL,
        adaptive_drafts=plan.draft.adaptive,
        split_phases=plan.layouts[0].splits_phases,
        prefill_from=plan.prefill_from,
        layouts={Phase(phase): name for phase, name in plan.phase_layout.items()},
    )
    calibration = chosen.calibration
    return World(
        config=config,
        sizes=resolved.sizes,
        domains=plan.kv_domains,
        cost=chosen.cost,
        price=price,
        caching=plan.prefix_cache,
        request_s=0.0 if calibration is None else calibration.request_s,
        token_s=0.0 if calibration is None else calibration.token_s,
    )
