"""Compile audit: build every kernel that shipped plans choose, for cards that are not here.

For each variant and target: refused by the implementation's own conditions (with reasons), or built
in a child process and checked: shared memory within the card's limit, no unexplained spill, the
matrix instruction that it claims. Results are committed in ``compile_manifest.json``, keyed by
source hash, compiler version and target; the tests rebuild what changed and a sample of the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from metainfer.core.errors import UsageError
from metainfer.core.step import Phase
from metainfer.core.verdict import Verdict, reject, require
from metainfer.kernels.evidence import Qualification, evidence_for
from metainfer.kernels.impl import Context, Evidence, Impl, OpRequest
from metainfer.kernels.registry import Registry
from metainfer.kernels.select_op import objections
from metainfer.kernels.variant import Variant
from metainfer.platform.capability import instructions
from metainfer.platform.facts import DeviceFacts, Facts

#: Target -> (capability, opt-in shared memory per block in bytes), from the CUDA programming
#: guide's table of technical specifications.
TARGETS: Mapping[str, tuple[tuple[int, int], int]] = MappingProxyType(
    {
        "sm_75": ((7, 5), 65_536),
        "sm_80": ((8, 0), 166_912),
        "sm_86": ((8, 6), 101_376),
        "sm_89": ((8, 9), 101_376),
        "sm_90": ((9, 0), 232_448),
        "sm_120": ((12, 0), 101_376),
    }
)
DEFAULT_TARGETS = ("sm_80", "sm_89", "sm_90", "sm_120")
MANIFEST = Path(__file__).with_name("compile_manifest.json")
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """The outcome of one variant on one target. `ok`: built and every check passed."""

    impl: str
    kernel: str
    target: str
    ok: bool
    source: str = ""
    shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    mma: tuple[str, ...] = ()
    compiler: str = ""
    refused: bool = False
    reasons: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def to_json(self) -> dict[str, Any]:
        """A row of ``kernels compile --json``."""
        body: dict[str, Any] = {
            "kernel": self.kernel,
            "target": self.target,
            "ok": self.ok,
            "shared_bytes": self.shared_bytes,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "mma": list(self.mma),
            "compiler": self.compiler,
            "impl": self.impl,
            "refused": self.refused,
            "reasons": list(self.reasons),
            "source": self.source,
        }
        return body

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Build:
        known = {key: value for key, value in body.items() if key in Build.__dataclass_fields__}
        known["mma"], known["reasons"] = tuple(body["mma"]), tuple(body["reasons"])
        return Build(**known)


def plain_target(target: str) -> str:
    """``sm_120`` for ``sm_120a``: the compiler adds the suffix where a kernel needs it."""
    return target.removesuffix("a")


def target_facts(target: str, software: Mapping[str, str | None] | None = None) -> Facts:
    """A card of capability `target` as far as the target alone tells.

    Raises:
        UsageError: an unknown target.
    """
    target = plain_target(target)
    if target not in TARGETS:
        raise UsageError(
            f"compile target {target!r} is not known.",
            f"There is: {', '.join(TARGETS)}.",
            code="unknown_target",
        )
    capability, shared = TARGETS[target]
    rules = instructions(capability)
    device = DeviceFacts(
        kind="cuda",
        name=target,
        capability=capability,
        shared_bytes_per_block=shared,
        dot_types=rules.dot_types if rules else None,
        storage_types=rules.storage_types if rules else None,
        features=rules.features if rules else None,
    )
    return Facts(platform="cuda", devices=(device,), software=software or {"triton": "3.6.0"})


def refusal(impl: Impl, variant: Variant, target: str) -> Verdict:
    """What the implementation's own conditions say about this shape on this target."""
    facts = target_facts(target)
    phase = next(phase for phase in Phase if phase in impl.phases)
    request = OpRequest(impl.op, impl.op, phase, variant.dtype, variant.shape)
    return objections(impl, Context(request, facts, impl.requires_layout))


def compile_all(
    targets: Sequence[str] = DEFAULT_TARGETS,
    *,
    registry: Registry,
    variants: Iterable[Variant],
    triton: Path | None = None,
) -> list[Build]:
    """Build every variant for every target; refused ones carry their reasons.

    `registry` and `variants` are those of `metainfer.ops.catalog`. `triton`: a folder with another
    release, put before the installed one.
    """
    chosen = tuple(variants)
    targets = [plain_target(target) for target in targets]
    impls = {impl.id: impl for impl in registry.impls()}
    results: dict[tuple[int, str], Build] = {}
    jobs: list[tuple[int, str]] = []
    for target in targets:
        for place, variant in enumerate(chosen):
            if not variant.serves(target):
                continue
            verdict = refusal(impls[variant.impl], variant, target)
            if verdict.accepted:
                jobs.append((place, target))
            else:
                reasons = tuple(reason.message for reason in verdict.reasons)
                results[place, target] = Build(
                    impl=variant.impl,
                    kernel=variant.name,
                    target=target,
                    ok=False,
                    refused=True,
                    source=variant.source(),
                    reasons=reasons,
                )
    answers = _run([_job(chosen[place], target) for place, target in jobs], triton)
    for (place, target), answer in zip(jobs, answers, strict=True):
        results[place, target] = judge(chosen[place], target, answer)
    order = [(place, target) for target in targets for place in range(len(chosen))]
    return [results[key] for key in order if key in results]


def compile_kernel(variant: Variant, target: str, *, triton: Path | None = None) -> Build:
    """Build one variant for one target, whatever its conditions say."""
    return judge(variant, target, _run([_job(variant, target)], triton)[0])


def judge(variant: Variant, target: str, answer: Mapping[str, Any]) -> Build:
    """The checks on what the compiler answered."""
    limit = TARGETS[target][1]
    if not answer["ok"]:
        verdict = reject("compile", str(answer["error"]))
    else:
        shared, spill = answer["shared_bytes"], answer["spill_bytes"]
        found = answer["mma"]
        verdict = require(
            shared <= limit, "shared-memory", f"uses {shared:,} B of shared memory of {limit:,} B"
        )
        verdict &= require(
            spill is not None and spill <= variant.spill_bytes,
            "spill",
            f"spills {spill} B, {variant.spill_bytes} B are explained",
        )
        serial = answer.get("serial", "")
        verdict &= require(
            not serial, "mma-serial", f"waits for each matrix instruction by itself: {serial}"
        )
        repeated = answer.get("repeated", "")
        verdict &= require(
            not repeated, "mma-repeated", f"a product takes some channels twice: {repeated}"
        )
        verdict &= require(
            bool(found) == bool(variant.mma) and any(variant.mma in name for name in found)
            if variant.mma
            else not found,
            "mma",
            f"claims {variant.mma or 'no matrix instruction'}, uses {', '.join(found) or 'none'}",
        )
    return Build(
        impl=variant.impl,
        kernel=variant.name,
        target=target,
        ok=verdict.accepted,
        source=variant.source(),
        shared_bytes=answer.get("shared_bytes"),
        registers=answer.get("registers"),
        spill_bytes=answer.get("spill_bytes"),
        mma=tuple(answer.get("mma", ())),
        compiler=answer.get("compiler", ""),
        reasons=tuple(reason.message for reason in verdict.reasons),
        seconds=answer.get("seconds", 0.0),
    )


def load_manifest(path: Path = MANIFEST) -> list[Build]:
    """The committed results; empty when there are none."""
    if not path.exists():
        return []
    return [Build.from_json(entry) for entry in json.loads(path.read_text())["entries"]]


def save_manifest(builds: Iterable[Build], path: Path = MANIFEST) -> None:
    """Write results, one line each, sorted."""
    rows = sorted(builds, key=lambda b: (b.impl, b.kernel, b.target, b.compiler))
    lines = ",\n".join(json.dumps(build.to_json(), sort_keys=True) for build in rows)
    path.write_text(f'{{"schema": 1, "entries": [\n{lines}\n]}}\n')


def refresh_manifest(
    registry: Registry,
    variants: Sequence[Variant],
    *,
    only: Callable[[Variant], bool] = lambda variant: True,
    targets: Sequence[str] = DEFAULT_TARGETS,
    tritons: Sequence[Path | None] = (None,),
    path: Path = MANIFEST,
) -> list[Build]:
    """Build with every release in `tritons`, replace those rows, drop rows of older sources.
    A kernel in CUDA C++ is built by the nvcc that is here.

    `variants`: all there are; `only` picks those to build, the others keep their rows while their
    source is unchanged, as a release that is not given does. The file is read again after the
    builds: rows that someone else added meanwhile stay.
    """
    chosen = [variant for variant in variants if only(variant)]
    built = [
        build
        for triton in tritons
        for build in compile_all(targets, registry=registry, variants=chosen, triton=triton)
    ]
    current = {(v.impl, v.name): v.source() for v in variants}
    kept = {
        (b.impl, b.kernel, b.target, b.compiler): b
        for b in [*load_manifest(path), *built]
        if current.get((b.impl, b.kernel)) == b.source
    }
    save_manifest(kept.values(), path)
    return list(kept.values())


def list_kernels(
    registry: Registry, facts: Facts, records: Sequence[Qualification] = ()
) -> list[dict[str, Any]]:
    """Rows of ``kernels list``: what exists, what it needs, how we know that it works here.

    Conditions of shape are not asked: `blockers` holds what stops a kernel on this device whatever
    the model.
    """
    evidence = evidence_for(facts, records)
    rows = []
    for impl in registry.impls():
        shapeless = {"shape", "instantiation", "weight-scheme"}
        request = OpRequest(impl.op, impl.op, Phase.DECODE, next(iter(sorted(impl.dtypes))), {})
        context = Context(request, facts, impl.requires_layout)
        reasons = [
            reason
            for condition in impl.conditions
            for reason in condition(context).reasons
            if reason.code not in shapeless
        ]
        rows.append(
            {
                "kernel": impl.id,
                "op": impl.op,
                "provider": impl.provider,
                "dtypes": sorted(impl.dtypes),
                "phases": [phase.value for phase in Phase if phase in impl.phases],
                "layouts": dict(impl.requires_layout),
                "honours": sorted(impl.honours),
                "numerics": impl.numerics.value,
                "graph_safe": impl.graph_safe,
                "evidence": evidence.get(impl.id, Evidence.NONE).value,
                "conditions": [reason.to_json() for reason in reasons],
                "runs_here": not reasons,
            }
        )
    return rows


def _job(variant: Variant, target: str) -> dict[str, Any]:
    major, minor = TARGETS[target][0]
    if variant.cuda is not None:
        return {
            "file": str(variant.cuda.file),
            "defines": variant.cuda.defines,
            "function": variant.kernel,
            "shared": variant.shared_bytes,
            "arch": f"{target}a",  # with the instructions of this very capability
        }
    return {
        "kernel": variant.kernel,
        "args": list(variant.args.items()),
        "warps": variant.warps,
        "stages": variant.stages,
        "arch": major * 10 + minor,
    }


def _run(jobs: Sequence[Mapping[str, Any]], triton: Path | None) -> list[dict[str, Any]]:
    """Answers in order. A child that dies costs the job it was at; the rest go to a new one."""
    answers: list[dict[str, Any]] = []
    while len(answers) < len(jobs):
        left = jobs[len(answers) :]
        got, ending = _child(left, triton)
        answers += got
        if len(got) < len(left):
            answers.append({"ok": False, "error": ending})
    return answers


def _child(jobs: Sequence[Mapping[str, Any]], triton: Path | None) -> tuple[list[Any], str]:
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [str(triton.resolve())] if triton else []
    paths += [package_root, os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as cache:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "TRITON_CACHE_DIR": cache,
            "TRITON_DEFAULT_FP_FUSION": "1",
        }
        env.pop("TRITON_INTERPRET", None)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "metainfer.kernels.audit_worker"],
                input="".join(json.dumps(job) + "\n" for job in jobs),
                capture_output=True,
                text=True,
                env=env,
                timeout=TIMEOUT_S + 5.0 * len(jobs),
            )
        except subprocess.TimeoutExpired as late:
            lines = (late.stdout or b"").decode().splitlines()
            return [json.loads(line) for line in lines], "the compiler did not end"
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    tail = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    return answers, f"the compiler ended with {done.returncode}: {tail}"
