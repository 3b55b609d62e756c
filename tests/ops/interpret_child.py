"""Run by the interpreter tests in a process of its own: ``TRITON_INTERPRET`` binds at import.

Arguments: implementation ids with dtypes (``rope/triton:float16``). Prints one JSON line for each.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"

from metainfer.kernels.audit import target_facts
from metainfer.ops.catalog import builtin_registry
from metainfer.ops.qualify import qualify


def main() -> None:
    # The interpreter evaluates sigmoid(-100) through an overflowing exp.
    warnings.filterwarnings("ignore", message="overflow encountered in exp")
    registry = builtin_registry()
    impls = {impl.id: impl for impl in registry.impls()}
    facts = target_facts("sm_90", {"triton": "3.9.0", "torch": "2.13.0"})
    for argument in sys.argv[2:]:
        name, _, dtype = argument.partition(":")
        verdict = qualify(impls[name], dtype, "cpu", facts, registry, seed=int(sys.argv[1]))
        answer = {"name": argument, "reasons": [reason.message for reason in verdict.reasons]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
