"""Vector instructions of the processor, when it is the device that computes."""

from __future__ import annotations

from metainfer.doctor.evidence import fact
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CPU

AVX2 = frozenset({"avx2", "fma"})
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})


def check(inputs: Inputs) -> list[Finding]:
    device = inputs.facts.device
    if device.kind != CPU:
        return []
    features = device.features
    if features is None:
        what = "which vector instructions it has"
        proof = fact(inputs.facts, "devices.0.features")
        return [unknown("cpu.features", device.name, what, evidence=proof)]
    proof = (
        f"/proc/cpuinfo: {' '.join(sorted(features & (AVX2 | AVX512 | {'asimd'}))) or 'neither'}"
    )
    found = []
    if not (features >= AVX2 or "asimd" in features):
        what = "neither AVX2 nor Advanced SIMD: C kernels take their scalar path."
        found.append(slows("cpu.vectors", device.name, what, "Use a newer processor.", proof))
    elif "asimd" not in features and not features >= AVX512:
        what = "no AVX-512: C kernels take their AVX2 path."
        found.append(information("cpu.vectors", device.name, what, evidence=proof))
    dots = device.dot_types
    if dots is not None and "bfloat16" not in dots:
        what = "no bfloat16 matrix instructions: bfloat16 is computed through float32."
        found.append(information("cpu.bfloat16", device.name, what, "Use --dtype float32.", proof))
    return found
