"""Rates of a probed card that no probe can read, from the shipped file of a machine that has it."""

from __future__ import annotations

from dataclasses import replace

from metainfer.platform.facts import DeviceFacts, Facts
from metainfer.platform.machine_catalog import SHIPPED, find_machine

RATES = ("read_bytes_s", "dot_flops")


def with_card_rates(facts: Facts) -> Facts:
    """`facts` with the matrix rates (and the memory rate where it is unknown) of known cards.

    A card is known when a shipped machine file has one of its capability whose product name, word
    by word, is in the name that the driver gives. What was probed stays; origins name the file.
    """
    devices, origins = list(facts.devices), dict(facts.origins)
    for index, device in enumerate(devices):
        if device.kind != "cuda" or device.dot_flops:
            continue
        for name in SHIPPED:
            known = find_machine(name).facts
            card = known.devices[0] if known.devices else None
            if card is None or not card.dot_flops or not _same(device, card):
                continue
            rate = device.read_bytes_s or card.read_bytes_s
            devices[index] = replace(device, dot_flops=card.dot_flops, read_bytes_s=rate)
            for path, said in known.origins.items():
                _, _, rest = path.partition("devices.0.")
                if rest.startswith(RATES):
                    origins.setdefault(f"devices.{index}.{rest}", f"{said} (machine file {name})")
            break
    return replace(facts, devices=tuple(devices), origins=origins)


def _same(probed: DeviceFacts, card: DeviceFacts) -> bool:
    words = probed.name.lower().split()
    return probed.capability == card.capability and all(
        word in words for word in card.name.lower().split()
    )
