"""Peer access between GPUs: what the driver claims, and what a data test showed where one ran."""

from __future__ import annotations

from collections.abc import Sequence

from metainfer.doctor.evidence import fact, smi_index
from metainfer.doctor.finding import Finding, information, slows, unknown
from metainfer.doctor.inputs import Inputs
from metainfer.platform.facts import CUDA, LinkFacts
from metainfer.platform.host_text import SMI_PEERS
from metainfer.platform.nvidia_smi import parse_matrix

PROVE = "metainfer doctor --deep copies and compares bytes on every pair."
#: What NVIDIA's peer matrix means by its words.
WORDS = {
    "CNS": "chipset not supported",
    "GNS": "not supported by this GPU",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a registry key",
}


def check(inputs: Inputs) -> list[Finding]:
    facts = inputs.facts
    if facts.device.kind != CUDA or len(facts.devices) < 2:
        return []
    if inputs.proofs is not None:
        return _proven(inputs)
    found = []
    count = len(facts.devices)
    links = {(link.source, link.target): link for link in facts.links}
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    for kind, word in (("peer_read", "read"), ("peer_write", "write")):
        states = {pair: getattr(links.get(pair), kind, None) for pair in pairs}
        refused = [pair for pair in pairs if states[pair] is False]
        unread = [pair for pair in pairs if states[pair] is None]
        finding = f"link.{kind.replace('_', '-')}"
        if refused:
            what = f"the driver refuses peer {word} on {_listed(refused, len(pairs))}."
            remedy = (
                "None by settings: transfers go through host memory. Cards below one switch, or a "
                "driver that allows peer access on this card, would change it."
            )
            risk = "a patched driver voids support, and wrong data was seen with one"
            proof = _claim(inputs, word, kind, refused[0])
            found.append(slows(finding, _places(refused), what, remedy, proof, risk))
        if unread:
            what = f"peer {word} on {_listed(unread, len(pairs))}"
            proof = _claim(inputs, word, kind, unread[0])
            found.append(unknown(finding, _places(unread), what, evidence=proof))
    found += _atomics(inputs, links, pairs)
    if not any(finding.id.startswith(("link.peer-read", "link.peer-write")) for finding in found):
        what = "the driver allows peer access on every pair; only a data test proves it."
        proof = _claim(inputs, "read", "peer_read", pairs[0])
        remedy = PROVE if inputs.local is not None else ""
        found.append(information("link.peer-claimed", "all pairs", what, remedy, proof))
    return found


def _atomics(
    inputs: Inputs, links: dict[tuple[int, int], LinkFacts], pairs: list[tuple[int, int]]
) -> list[Finding]:
    """Native atomics between peers; a machine file that is silent on them says so elsewhere."""
    states = {pair: getattr(links.get(pair), "peer_atomics", None) for pair in pairs}
    none = [pair for pair in pairs if states[pair] is False]
    unread = [pair for pair in pairs if states[pair] is None]
    if none:
        what = (
            f"no native atomics on {_listed(none, len(pairs))}, as usual over PCIe: kernels that "
            "count on them race or spin there."
        )
        proof = _claim(inputs, "atomics", "peer_atomics", none[0])
        return [information("link.peer-atomics", _places(none), what, evidence=proof)]
    if unread and inputs.text is not None:
        proof = _claim(inputs, "atomics", "peer_atomics", unread[0])
        what = f"native atomics on {_listed(unread, len(pairs))}"
        return [unknown("link.peer-atomics", _places(unread), what, evidence=proof)]
    return []


def _proven(inputs: Inputs) -> list[Finding]:
    """The data test's outcome, which overrules every claim."""
    assert inputs.proofs is not None
    good = [proof for proof in inputs.proofs if proof.verdict == "right"]
    found = []
    for verdict, what in (
        ("wrong", "bytes arrive wrong over peer access"),
        ("stuck", "the transfer did not end in time"),
        ("refused", "peer access cannot be opened"),
        ("failed", "the data test itself failed"),
    ):
        bad = [proof for proof in inputs.proofs if proof.verdict == verdict]
        if not bad:
            continue
        pairs = _places([(proof.source, proof.target) for proof in bad])
        proof = f"{bad[0].kind} {bad[0].source}->{bad[0].target}: {bad[0].detail}"
        if verdict == "failed":
            finding = unknown(
                "link.peer-data", pairs, what, "Run metainfer doctor --deep again.", proof
            )
        else:
            remedy = (
                "Peer access is not used on these pairs; set iommu=pt and switch ACS off first."
            )
            finding = slows(f"link.peer-{verdict}", pairs, f"{what}.", remedy, proof)
        found.append(finding)
    if not inputs.proofs:
        found.append(unknown("link.peer-data", "all pairs", "no pair was tested"))
    if good and not found:
        kinds = sorted({proof.kind for proof in good})
        what = f"{', '.join(kinds)} between all pairs were proven by comparing bytes."
        detail = f"{len(good)} tests, {good[0].detail}"
        found.append(information("link.peer-proven", "all pairs", what, evidence=detail))
    return found


def _claim(inputs: Inputs, word: str, kind: str, pair: tuple[int, int]) -> str:
    """What the driver said of one pair, in its own word."""
    if inputs.text is not None:
        command = SMI_PEERS[word]
        body = inputs.text.get(command)
        row, column = (smi_index(inputs, index) for index in pair)
        if body is not None and row is not None and column is not None:
            said = parse_matrix(body).get((row, column), "nothing")
            meaning = f" ({WORDS[said]})" if said in WORDS else ""
            return f"{command}: GPU{row} to GPU{column}: {said}{meaning}"
        if command in inputs.text.refused:
            return inputs.text.why_not(command)
    for number, link in enumerate(inputs.facts.links):
        if (link.source, link.target) == pair:
            return fact(inputs.facts, f"links.{number}.{kind}")
    return "no link between them is listed"


def _listed(pairs: Sequence[tuple[int, int]], total: int) -> str:
    return f"{len(pairs)} of {total} directed pairs"


def _places(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{i}->{j}" for i, j in pairs[:8])
    return f"GPUs {shown}" + (", ..." if len(pairs) > 8 else "")
