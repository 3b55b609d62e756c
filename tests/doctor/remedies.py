"""Ways to break a host text, and an operator who does exactly what a printed remedy says."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from metainfer.doctor.finding import Finding
from metainfer.platform.host_text import COMPILER, LSPCI, SMI_QUERY, HostText

STATUS = "/proc/self/status"
MOUNTS = "/proc/mounts"
OVERCOMMIT = "/proc/sys/vm/overcommit_memory"
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
#: Bits of the ACS control register (PCI Express Base Specification, ACS Control Register).
ACS_BITS = {
    "SrcValid": 0, "TransBlk": 1, "ReqRedir": 2, "CmpltRedir": 3, "UpstreamFwd": 4,
    "EgressCtrl": 5, "DirectTrans": 6,
}  # fmt: skip


def put(text: HostText, **bodies: str) -> HostText:
    return HostText({**text.texts, **bodies}, text.refused)


def with_text(text: HostText, changes: Mapping[str, str]) -> HostText:
    refused = {key: why for key, why in text.refused.items() if key not in changes}
    return HostText({**text.texts, **changes}, refused)


def edit(text: HostText, key: str, pattern: str, new: str, count: int = 0) -> HostText:
    body = re.sub(pattern, new, text.texts[key], count=count, flags=re.MULTILINE)
    return with_text(text, {key: body})


def block(text: HostText, address: str, change: Callable[[str], str]) -> HostText:
    """Change one device's part of the lspci text."""
    parts = re.split(r"(?m)^(?=[0-9a-f]{4}:)", text.texts[LSPCI])
    assert any(part.startswith(address) for part in parts), address
    done = [change(part) if part.startswith(address) else part for part in parts]
    return with_text(text, {LSPCI: "".join(done)})


def gpu(text: HostText, index: int, change: Callable[[str], str]) -> HostText:
    """Change one card's part of ``nvidia-smi -q``."""
    head, *parts = re.split(r"(?m)^(?=GPU [0-9A-F]{8}:)", text.texts[SMI_QUERY])
    parts[index] = change(parts[index])
    return with_text(text, {SMI_QUERY: head + "".join(parts)})


def cards(text: HostText) -> int:
    return len(re.findall(r"(?m)^GPU [0-9A-F]{8}:", text.texts.get(SMI_QUERY, "")))


def set_line(part: str, section: str, key: str, value: str) -> str:
    """``key : value`` in the lines below a heading."""
    head, mark, tail = part.partition(f"{section}\n")
    assert mark, section
    return head + mark + re.sub(rf"(?m)^( *{key} +: ).*$", rf"\g<1>{value}", tail, count=1)


def software(text: HostText, name: str, version: str) -> HostText:
    pairs = {**text.pairs("software"), name: version}
    return with_text(text, {"software": "".join(f"{k}={v}\n" for k, v in pairs.items())})


def environ(text: HostText, changes: Mapping[str, str | None]) -> HostText:
    pairs: dict[str, str | None] = {**text.pairs("environment"), **changes}
    lines = (f"{name}={value}\n" for name, value in pairs.items() if value is not None)
    return with_text(text, {"environment": "".join(lines)})


# breaking


def redirect(text: HostText, rng: random.Random) -> HostText:
    ports = re.findall(
        r"(?m)^(\S+) PCI bridge[^\n]*\n(?:\t[^\n]*\n)*?\t\tACSCtl", text.texts[LSPCI]
    )
    flags = rng.sample(["ReqRedir", "CmpltRedir", "EgressCtrl"], rng.randint(1, 3))

    def change(part: str) -> str:
        head, mark, tail = part.partition("ACSCtl:")
        line, newline, rest = tail.partition("\n")
        for flag in flags:
            line = line.replace(f"{flag}-", f"{flag}+")
        return head + mark + line + newline + rest

    return block(text, rng.choice(ports), change)


def translate(text: HostText, rng: random.Random) -> HostText:
    keys = [key for key in text.texts if re.fullmatch(r"/sys/kernel/iommu_groups/\d+/type", key)]
    hit = rng.sample(keys, rng.randint(1, len(keys)))
    kind = rng.choice(["DMA\n", "DMA-FQ\n"])
    text = edit(text, "/proc/cmdline", r" iommu=pt", "")
    return with_text(text, dict.fromkeys(hit, kind))


def narrow(text: HostText, rng: random.Random) -> HostText:
    index, width = rng.randrange(cards(text)), rng.choice([1, 2, 4, 8])
    text = gpu(text, index, lambda p: set_line(p, "Link Width", "Current", f"{width}x"))
    new = f"Width x{width} (downgraded)"
    if LSPCI not in text.texts:
        return text
    return block(
        text, bus_of(text, index), lambda p: re.sub(r"(LnkSta:.*)Width x\d+", rf"\g<1>{new}", p)
    )


def narrow_uplink(text: HostText, rng: random.Random) -> HostText:
    ups = [
        part.split()[0]
        for part in re.split(r"(?m)^(?=[0-9a-f]{4}:)", text.texts[LSPCI])
        if "Upstream Port" in part
    ]
    if not ups:
        return text
    new = f"Width x{rng.choice([4, 8])}"
    return block(
        text, rng.choice(ups), lambda p: re.sub(r"(LnkSta:.*)Width x\d+", rf"\g<1>{new}", p)
    )


def slow_slot(text: HostText, rng: random.Random) -> HostText:
    most = str(rng.choice([3, 4]))

    def change(part: str) -> str:
        for key in ("Max", "Current", "Device Current", "Host Max"):
            part = set_line(part, "PCIe Generation", key, most)
        return part

    return gpu(text, rng.randrange(cards(text)), change)


def small_window(text: HostText, rng: random.Random) -> HostText:
    index = rng.randrange(cards(text))
    text = gpu(text, index, lambda p: set_line(p, "BAR1 Memory Usage", "Total", "256 MiB"))
    if LSPCI not in text.texts:
        return text
    return block(text, bus_of(text, index), lambda p: p.replace("[size=128G]", "[size=256M]"))


def capped(text: HostText, rng: random.Random) -> HostText:
    watts = f"{rng.randint(150, 599)}.00 W"

    def change(part: str) -> str:
        part = set_line(part, "GPU Power Readings", "Current Power Limit", watts)
        return set_line(part, "GPU Power Readings", "Requested Power Limit", watts)

    return gpu(text, rng.randrange(cards(text)), change)


def throttled(text: HostText, rng: random.Random) -> HostText:
    reason = rng.choice(["HW Thermal Slowdown", "HW Power Brake Slowdown", "SW Thermal Slowdown"])
    return gpu(
        text,
        rng.randrange(cards(text)),
        lambda p: set_line(p, "Clocks Event Reasons", reason, "Active"),
    )


def occupied(text: HostText, rng: random.Random) -> HostText:
    used = rng.randint(2000, 90000)
    rows = "".join(
        f"        GPU instance ID : N/A\n        Process ID : {rng.randint(100, 99999)}\n"
        f"            Type : C\n            Name : /usr/bin/python{n}\n"
        f"            Used GPU Memory : {used // 2} MiB\n"
        for n in range(rng.randint(1, 6))
    )

    def change(part: str) -> str:
        part = set_line(part, "FB Memory Usage", "Used", f"{used} MiB")
        return re.sub(r"(?m)^    Processes +: None\n", f"    Processes\n{rows}", part)

    return gpu(text, rng.randrange(cards(text)), change)


def strict_memory(text: HostText, rng: random.Random) -> HostText:
    return with_text(text, {OVERCOMMIT: "2\n"})


def little_shared(text: HostText, rng: random.Random) -> HostText:
    size = rng.choice(["65536k", "64m", "1000m", "1048575k", "5"])
    line = f"shm /dev/shm tmpfs rw,nosuid,nodev,noexec,relatime,size={size} 0 0\n"
    return with_text(text, {"/.dockerenv": "", MOUNTS: f"overlay / overlay rw 0 0\n{line}"})


def variables(text: HostText, rng: random.Random) -> HostText:
    known = {
        "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "true", "CUDA_LAUNCH_BLOCKING": "yes",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_FORCE_PTX_JIT": "1", "TRITON_INTERPRET": "1",
        "TORCH_CUDA_ARCH_LIST": "8.0;8.6", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "NVIDIA_TF32_OVERRIDE": "0", "METAINFER_CASHE": "/x", "METAINFER_XYZZY": "1",
    }  # fmt: skip
    names = rng.sample(sorted(known), rng.randint(1, 4))
    return environ(text, {name: known[name] for name in names})


def old_software(text: HostText, rng: random.Random) -> HostText:
    name, version = rng.choice(
        [
            ("python", "3.10.9"), ("torch", "2.10.1+cu130"), ("torch", "2.14.0"),
            ("torch", "2.12.1+cpu"), ("triton", "3.6.0"), ("triton", "3.9.0"), ("triton", ""),
        ]
    )  # fmt: skip
    return software(text, name, version)


def old_driver(text: HostText, rng: random.Random) -> HostText:
    version = rng.choice(["11.8", "12.4", "12.9"])
    text = software(text, "torch", "2.12.1+cu130")
    return edit(text, SMI_QUERY, r"^(CUDA Version +: ).*$", rf"\g<1>{version}")


def no_compiler(text: HostText, rng: random.Random) -> HostText:
    texts = {key: body for key, body in text.texts.items() if key != COMPILER}
    return HostText(texts, {**text.refused, COMPILER: "command not found"})


def far_node(text: HostText, rng: random.Random) -> HostText:
    """This process may run on one node only."""
    lists = sorted(key for key in text.texts if key.endswith("/cpulist"))
    allowed = text.texts[rng.choice(lists)].strip()
    return edit(text, STATUS, r"^Cpus_allowed_list:.*$", f"Cpus_allowed_list:\t{allowed}")


def unlike(text: HostText, rng: random.Random) -> HostText:
    index = rng.randrange(1, cards(text))
    return gpu(text, index, lambda p: re.sub(r"(Product Name +: ).*", r"\1NVIDIA RTX 4090", p))


BREAKS = (
    redirect, translate, narrow, narrow_uplink, slow_slot, small_window, capped, throttled,
    occupied, strict_memory, little_shared, variables, old_software, old_driver, no_compiler,
    far_node, unlike,
)  # fmt: skip


# repairing


def bus_of(text: HostText, index: int) -> str:
    listed = re.findall(r"(?m)^GPU 0000([0-9A-F]{4}:\S+)", text.texts[SMI_QUERY])
    return str(listed[index]).lower()


def index_of(finding: Finding) -> int:
    found = re.match(r"GPU (\d+)", finding.where)
    assert found is not None, finding
    return int(found[1])


def clear_acs(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    mask = int(words[2], 16)

    def change(part: str) -> str:
        head, mark, tail = part.partition("ACSCtl:")
        line, newline, rest = tail.partition("\n")
        for flag, bit in ACS_BITS.items():
            if mask >> bit & 1:
                line = line.replace(f"{flag}+", f"{flag}-")
        return head + mark + line + newline + rest

    return block(text, words[1], change)


def pass_through(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    line = text.texts["/proc/cmdline"].strip()
    types = [k for k in text.texts if re.fullmatch(r"/sys/kernel/iommu_groups/\d+/type", k)]
    changed = {"/proc/cmdline": f"{line} {words[1]}\n", **dict.fromkeys(types, "identity\n")}
    return with_text(text, changed)


def full_width(part: str) -> str:
    most = re.search(r"LnkCap:.*Width x(\d+)", part)
    return part if most is None else re.sub(r"(LnkSta:.*)Width x\d+", rf"\1Width x{most[1]}", part)


def reseat(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    index = index_of(finding)

    def change(part: str) -> str:
        most = re.search(r"Link Width\n +Max +: (\d+x)", part)
        assert most is not None
        return set_line(part, "Link Width", "Current", most[1])

    text = gpu(text, index, change)
    return block(text, bus_of(text, index), full_width) if LSPCI in text.texts else text


def recable(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    return block(text, finding.where.removeprefix("switch "), full_width)


def faster_slot(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    def change(part: str) -> str:
        most = re.search(r"Device Max +: (\d+)", part)
        assert most is not None
        for key in ("Max", "Current", "Device Current", "Host Max"):
            part = set_line(part, "PCIe Generation", key, most[1])
        return part

    return gpu(text, index_of(finding), change)


def large_window(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    index = index_of(finding)
    text = gpu(text, index, lambda p: set_line(p, "BAR1 Memory Usage", "Total", "131072 MiB"))
    if LSPCI not in text.texts:
        return text
    return block(text, bus_of(text, index), lambda p: p.replace("[size=256M]", "[size=128G]"))


def raise_cap(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    watts = f"{words[2]}.00 W"
    (index,) = [n for n in range(cards(text)) if bus_of(text, n) == words[1]]
    return gpu(
        text, index, lambda p: set_line(p, "GPU Power Readings", "Current Power Limit", watts)
    )


def cooler(reasons: str) -> Callable[[HostText, Finding, re.Match[str]], HostText]:
    def repair(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
        pattern = rf"(?m)^( *(?:{reasons}) +: )Active$"
        return gpu(text, index_of(finding), lambda p: re.sub(pattern, r"\1Not Active", p))

    return repair


def kill(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    """End the listed processes; their memory comes back only when all are gone."""

    def change(part: str) -> str:
        for number in words[1].split():
            entry = rf"(?m)^ +GPU instance ID.*\n +Process ID : {number}\n(?: {{12}}.*\n)*"
            part = re.sub(entry, "", part)
        if "Process ID" not in part:
            part = set_line(part, "FB Memory Usage", "Used", "4 MiB")
        return part

    return gpu(text, index_of(finding), change)


def equal_cards(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    head, *parts = re.split(r"(?m)^(?=GPU [0-9A-F]{8}:)", text.texts[SMI_QUERY])
    names = [re.search(r"Product Name +: (.*)", part) for part in parts]
    first = names[0]
    assert first is not None
    kept = [p for p, name in zip(parts, names, strict=True) if name and name[1] == first[1]]
    return with_text(text, {SMI_QUERY: head + "".join(kept)})


def allow(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    now = re.search(r"Cpus_allowed_list:\s*(\S+)", text.texts[STATUS])
    assert now is not None
    new = f"Cpus_allowed_list:\t{now[1]},{words[1]}"
    return edit(text, STATUS, r"^Cpus_allowed_list:.*$", new)


def rename(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    value = text.pairs("environment")[finding.where]
    return environ(text, {finding.where: None, words[1]: value})


def install(text: HostText, finding: Finding, words: re.Match[str]) -> HostText:
    return software(text, words[1], f"{words[2]}.0")


#: What an operator does when a remedy says so. The first pattern that occurs in it is followed.
ACTIONS: tuple[tuple[str, Callable[[HostText, Finding, re.Match[str]], HostText]], ...] = (
    (r"setpci -s (\S+) ECAP_ACS\+6\.w=0:([0-9a-f]+)", clear_acs),
    (r"Boot with (iommu=pt)", pass_through),
    (r"Reseat the card", reseat),
    (r"Check the switch's cable", recable),
    (r"Move the card to a faster slot", faster_slot),
    (r"Enable resizable BAR", large_window),
    (r"nvidia-smi -i ([\da-f:.]+) -pl (\d+)", raise_cap),
    (r"Improve airflow", cooler("HW Thermal Slowdown|SW Thermal Slowdown")),
    (r"Check power cables", cooler("HW Power Brake Slowdown")),
    (r"kill ([\d ]+)", kill),
    (r"sysctl vm\.overcommit_memory=(\d)", lambda t, f, w: with_text(t, {OVERCOMMIT: w[1]})),
    (r"--shm-size=(\d+)g", lambda t, f, w: edit(t, MOUNTS, r"size=\w+", f"size={w[1]}g")),
    (r"echo (\w+) > /sys", lambda t, f, w: with_text(t, {HUGE_PAGES: f"[{w[1]}] never"})),
    (r"^unset (\w+)", lambda t, f, w: environ(t, {w[1]: None})),
    (r"Did you mean (\w+)\?", rename),
    (r"pip install '(\w+)==([\d.]+)\.\*'", install),
    (r"pip install 'metainfer\[gpu\]'", lambda t, f, w: software(t, "triton", "3.7.1")),
    (r"Use 3\.11 or newer", lambda t, f, w: software(t, "python", "3.11.0")),
    (r"Install torch's CUDA build", lambda t, f, w: software(t, "torch", "2.12.1+cu130")),
    (
        r"Install a driver for CUDA (\d+)",
        lambda t, f, w: edit(t, SMI_QUERY, r"^(CUDA Version +: ).*$", rf"\g<1>{w[1]}.0"),
    ),
    (r"Install gcc", lambda t, f, w: with_text(t, {COMPILER: "cc (GCC) 13.3.0\n"})),
    (r"Allow processors ([\d,-]+) too", allow),
    (r"Choose equal ones", equal_cards),
)


def follow(text: HostText, finding: Finding) -> HostText:
    """Do what the printed remedy says, and nothing else."""
    for pattern, action in ACTIONS:
        words = re.search(pattern, finding.remedy)
        if words is not None:
            return action(text, finding, words)
    raise AssertionError(f"nobody could follow this: {finding.remedy}")
