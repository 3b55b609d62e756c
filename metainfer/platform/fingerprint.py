"""What a measurement on this machine depends on, as the key of its record.

Device order counts: a table measured for pairs (0, 1) says nothing once the devices were listed in
another order. Readings that change by themselves (free memory, a link trained down while idle) and
measured values stay out.
"""

from __future__ import annotations

from metainfer.core.records import Fingerprint
from metainfer.platform.facts import Facts

#: Libraries that a timing can depend on.
SOFTWARE = ("torch", "triton", "numpy", "nvidia_driver", "cuda_driver", "nvidia_nccl")


def fingerprint(facts: Facts) -> Fingerprint:
    """Ordered devices, power caps, maximum links, peer access, host limits, driver, libraries."""
    devices = [
        {
            "name": device.name,
            "uuid": device.uuid,
            "bus_id": device.bus_id,
            "capability": device.capability,
            "units": device.units,
            "memory_bytes": device.memory_bytes,
            "power_cap_w": device.power_cap_w,
        }
        for device in facts.devices
    ]
    links = [
        {
            "ends": [link.source, link.target],
            "kind": link.kind,
            "generation": link.max_generation,
            "width": link.width,
            "peer": [link.peer_read, link.peer_write, link.peer_atomics],
        }
        for link in facts.links
    ]
    host = facts.host
    return Fingerprint(
        {
            "platform": facts.platform,
            "devices": devices,
            "links": links,
            "processor": host.processor,
            "usable_cores": host.usable_cores,
            "memory_bytes": host.memory_bytes,
            "iommu": host.iommu,
            "software": {name: facts.software.get(name) for name in SOFTWARE},
        }
    )
