"""Which modules must import without torch, transformers and triton. Every module is in one list.

A module of a starred room is starred, and so is every package (``__init__`` imports nothing).
In a mixed room each module must be named (patterns of `fnmatch`), as starred or as heavy; a new one
that is in neither list fails the test, so that the question is asked once, when it is new.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from tree import packages

STARRED_ROOMS = (
    "core",
    "platform",
    "workers",
    "text",
    "grammar",
    "kernels",
    "scheduler",
    "planner",
    "kv.book",
    "doctor",
    "server",
    "cli",
    "simulator",
)

STARRED = (
    "__main__",
    "formats.adapter_config",
    "formats.adapters",
    "formats.blocks",
    "formats.extents",
    "formats.catalogue",
    "formats.checks",
    "formats.completeness",
    "formats.drawn",
    "formats.gguf_header",
    "formats.gguf_names",
    "formats.index",
    "formats.readahead",
    "formats.safetensors_header",
    "formats.safetensors_writer",
    "formats.schemes",
    "formats.source",
    "models.arch",
    "models.registry",
    "models.*.arch",
    "models.*.placement",
    "models.*.caches",
    "models.*.config",
    "models.*.cost",
    "models.*.drafts",
    "models.*.draws",
    "models.*.names",
    "models.*.requests",
    "models.*.shapes",
    "models.*.weights",
    "models.common.adapters",
    "models.common.config",
    "models.common.rope",
    "ops.catalog",
    "ops.declare",
    "ops.declare_entries",
    "ops.*.impls",
    "ops.*.impls_triton",
    "ops.*.spec",
    "ops.*.tiles",
    "ops.moe_experts.sorting",
    "ops.*.audit",
    "comm.agree",
    "comm.api",
    "comm.driver",
    "comm.errors",
    "comm.fabric.*",
    "comm.guard",
    "comm.layout",
    "comm.loader",
    "comm.pieces",
    "comm.segment",
    "comm.model*",
    "comm.peers",
    "comm.plan*",
    "comm.request",
    "comm.topology*",
    "engine.client",
    "engine.devices",
    "engine.drift",
    "engine.elsewhere",
    "engine.grammars",
    "engine.inproc",
    "engine.overseer",
    "engine.protocol",
    "engine.recorder",
    "engine.stacks",
    "engine.steps",
    "engine.model_text",
    "engine.text_stream",
    "engine.verdicts",
    "executor.domains",
    "executor.null",
    "executor.protocol",
    "executor.slots",
    "executor.speculative",
)

HEAVY = (
    "comm.backends.*",
    "comm.emulated_ranks",
    "comm.exact",
    "comm.host_ranks",
    "engine.rank",
    "executor.ranks",
    "formats.activation",
    "formats.block_codecs",
    "formats.checkpoint",
    "formats.convert",
    "formats.elements",
    "formats.export",
    "formats.lossless",
    "formats.quant",
    "formats.random_source",
    "formats.shards",
    "models.*.draft",
    "models.*.model",
    "models.*.angles",
    "models.*.build",
    "models.*.layer",
    "models.common.*",
    "ops.case",
    "ops.case_caches",
    "ops.common",
    "ops.mistakes",
    "ops.qualify",
    "ops.strides",
    "ops.trace",
    "ops.triton_entries",
    "ops.*.ref",
    "ops.*.cases",
    "ops.*.torch_*",
    "ops.*.cpu_*",
    "ops.*.triton*",
    "ops.*.cuda*",
    "ops.*.vendor_*",
    "ops.linear.fp8",
    "ops.lora.rows",
    "ops.linear.onednn_layout",
    "ops.linear.packed",
    "ops.linear.rounding",
    "ops.linear.stored",
    "ops.moe_experts.layouts",
    "ops.moe_experts.mxfp4",
    "ops.rope.tables",
    "ops.sample.draw",
    "ops.sample.inputs",
    "engine.engine",
    "engine.machine",
    "engine.process",
    "executor.adapters",
    "executor.assemble",
    "executor.graphs",
    "executor.finite",
    "executor.inputs",
    "executor.loading",
    "executor.local",
    "executor.peaks",
    "executor.prompts",
    "executor.sampler",
    "executor.spread",
    "executor.static",
    "executor.transfer",
    "kv.store.*",
    "bench.*",
    "verifier.*",
)


def in_starred_room(module: str) -> bool:
    return any(module == room or module.startswith(room + ".") for room in STARRED_ROOMS)


def is_starred(module: str) -> bool:
    return (
        in_starred_room(module)
        or module in packages()
        or any(fnmatchcase(module, pattern) for pattern in STARRED)
    )


def is_named(module: str) -> bool:
    """In a starred room or matched by one of the lists."""
    return is_starred(module) or any(fnmatchcase(module, pattern) for pattern in HEAVY)
