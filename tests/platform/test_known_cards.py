"""A probed card gets the rates of the shipped file that has the same card, and no other's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metainfer.platform.facts import DeviceFacts, Facts, HostFacts
from metainfer.platform.known_cards import with_card_rates


def probed(name: str, capability: tuple[int, int], **more: object) -> Facts:
    device = DeviceFacts(kind="cuda", name=name, capability=capability)
    return Facts(platform="cuda", host=HostFacts(), devices=(replace(device, **more),))


def test_the_same_card_gets_its_rates_with_their_origin() -> None:
    facts = with_card_rates(probed("NVIDIA H200", (9, 0)))
    assert facts.device.dot_flops["bfloat16"] == 690e12
    assert facts.device.read_bytes_s == 4.3e12
    said = facts.origins["devices.0.dot_flops.bfloat16"]
    assert said.startswith("measured") and said.endswith("(machine file 1x-h200)")


def test_what_was_probed_stays() -> None:
    facts = with_card_rates(probed("NVIDIA H200", (9, 0), read_bytes_s=1.0))
    assert facts.device.read_bytes_s == 1.0
    rates = {"bfloat16": 5.0}
    assert with_card_rates(probed("NVIDIA H200", (9, 0), dot_flops=rates)).device.dot_flops == rates


@pytest.mark.parametrize(
    ("name", "capability"),
    [("NVIDIA H20", (9, 0)), ("NVIDIA H200", (8, 0)), ("NVIDIA GH2000", (9, 0)), ("", (9, 0))],
)
def test_another_card_gets_nothing(name: str, capability: tuple[int, int]) -> None:
    facts = probed(name, capability)
    assert with_card_rates(facts) == facts
