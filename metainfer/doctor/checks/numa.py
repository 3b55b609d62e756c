"""Memory nodes: which GPU hangs on which, their distance, and where this process may run."""

from __future__ import annotations

from metainfer.doctor.evidence import fact, file_line, where
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA
from metainfer.platform.probe_host import members

STATUS = "/proc/self/status"
ALLOWED = "Cpus_allowed_list:"


def check(inputs: Inputs) -> list[Finding]:
    facts = inputs.facts
    if facts.device.kind != CUDA or (facts.host.numa_nodes or 1) < 2:
        return []
    found = []
    nodes: dict[int, list[int]] = {}
    for index, device in enumerate(facts.devices):
        if device.numa_node is None:
            key = f"/sys/bus/pci/devices/{device.bus_id}/numa_node"
            proof = file_line(inputs.text, key)
            what = f"on which of {facts.host.numa_nodes} memory nodes it hangs"
            found.append(unknown("numa.node", where(index, device), what, evidence=proof))
        else:
            nodes.setdefault(device.numa_node, []).append(index)
    if len(nodes) > 1:
        listed = "; ".join(
            f"GPU {', '.join(map(str, gpus))} on node {node}"
            for node, gpus in sorted(nodes.items())
        )
        what = f"{listed}: traffic between them crosses the link between processors."
        first = min(nodes)
        proof = file_line(inputs.text, f"/sys/devices/system/node/node{first}/distance") or fact(
            facts, "devices.0.numa_node"
        )
        found.append(information("numa.spread", "all GPUs", what, evidence=proof))
    return [*found, *_affinity(inputs, nodes)]


def _affinity(inputs: Inputs, nodes: dict[int, list[int]]) -> list[Finding]:
    """Nodes that have GPUs and no processor this process may run on."""
    text = inputs.text
    status = None if text is None else text.get(STATUS)
    if text is None or status is None:
        return []
    line = next((line for line in status.splitlines() if line.startswith(ALLOWED)), "")
    allowed = members(line.partition(":")[2])
    if allowed is None:
        return []
    found = []
    for node, gpus in sorted(nodes.items()):
        listed = text.line(f"/sys/devices/system/node/node{node}/cpulist") or ""
        own = members(listed)
        if own is None or own & allowed:
            continue
        shown = ", ".join(map(str, gpus))
        what = (
            f"this process may not run on memory node {node}, where GPU {shown} hangs: its host "
            "buffers lie across the processor link."
        )
        remedy = f"Allow processors {listed.strip()} too (taskset, the container's cpuset)."
        proof = f"{STATUS}: {' '.join(line.split())}"
        found.append(slows("numa.affinity", f"GPU {shown}", what, remedy, proof))
    return found
