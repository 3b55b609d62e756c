"""Power cap against the card's default and maximum, and reasons why clocks are held back now."""

from __future__ import annotations

from metainfer.doctor.evidence import fact, smi_line, smi_of, where
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA
from metainfer.platform.host_text import SMI_QUERY
from metainfer.platform.text_facts import POWER_CAP

#: Heading of the section, newest driver first.
SECTIONS = ("Clocks Event Reasons", "Clocks Throttle Reasons")
#: Path below it -> (what it means, remedy, risk).
HEAT = "Improve airflow: fans, dust, spacing of cards, room temperature."
THROTTLES = {
    "HW Slowdown/HW Thermal Slowdown": ("it is too hot and halves its clocks", HEAT),
    "SW Thermal Slowdown": ("it is hot and lowers its clocks", HEAT),
    "HW Slowdown/HW Power Brake Slowdown": (
        "the power supply or the chassis asks it to halve its clocks",
        "Check power cables and supply: the card's power-brake line is active.",
    ),
}
CAPPED = "SW Power Cap"


def check(inputs: Inputs) -> list[Finding]:
    if inputs.facts.device.kind != CUDA:
        return []
    found: list[Finding] = []
    for index in range(len(inputs.facts.devices)):
        found += [*_cap(inputs, index), *_throttles(inputs, index)]
    return found


def _cap(inputs: Inputs, index: int) -> list[Finding]:
    device = inputs.facts.devices[index]
    cap, usual, most = device.power_cap_w, device.power_default_w, device.power_max_w
    place = where(index, device)
    proof = smi_line(inputs, index, POWER_CAP, "power_cap_w")
    if cap is None or usual is None:
        return [unknown("gpu.power", place, "its power cap", evidence=proof)]
    if cap < usual:
        what = f"its power cap is {cap:.0f} W of {usual:.0f} W; matrix speed follows the cap."
        # By address: the tool numbers cards by bus, CUDA by speed or as CUDA_VISIBLE_DEVICES says.
        card = device.bus_id or str(index)
        remedy = f"nvidia-smi -i {card} -pl {usual:.0f}, if cooling and supply allow it."
        risk = "more heat and load on the power supply; back to the old value at the next boot"
        return [slows("gpu.power", place, what, remedy, proof, risk)]
    if most is not None and most > cap:
        what = f"its power cap is {cap:.0f} W, it accepts up to {most:.0f} W."
        proof = fact(inputs.facts, f"devices.{index}.power_max_w")
        return [information("gpu.power-max", place, what, evidence=proof)]
    return []


def _throttles(inputs: Inputs, index: int) -> list[Finding]:
    if inputs.text is None:
        return []  # a described machine has no moment at which it could be held back
    device = inputs.facts.devices[index]
    place = where(index, device)
    gpu = smi_of(inputs, device.bus_id)
    section = None
    if gpu is not None:
        section = next((s for s in SECTIONS if gpu.text(f"{s}/HW Slowdown") is not None), None)
    if gpu is None or section is None:
        refused = inputs.text.why_not(SMI_QUERY) if gpu is None else gpu.line(f"{SECTIONS[0]}/Idle")
        what = "whether its clocks are held back now"
        return [unknown("gpu.throttle", place, what, evidence=refused)]
    found = []
    for path, (what, remedy) in THROTTLES.items():
        if gpu.text(f"{section}/{path}") == "Active":
            proof = f"nvidia-smi -q: {section}: {gpu.line(f'{section}/{path}')}"
            risk = "the machine may be down meanwhile"
            found.append(slows("gpu.throttle", place, f"{what}.", remedy, proof, risk))
    if gpu.text(f"{section}/{CAPPED}") == "Active":
        proof = f"nvidia-smi -q: {section}: {gpu.line(f'{section}/{CAPPED}')}"
        what = "it runs at its power cap now."
        found.append(information("gpu.throttle", place, what, evidence=proof))
    return found
