"""Machine files: the shipped ones, exact round trips, contradictions with file and line."""

from __future__ import annotations

import dataclasses
import random
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from fake_nvidia import Nvml, view

from metainfer.core.errors import UsageError, UserError
from metainfer.platform.capability import instructions
from metainfer.platform.cpu import cpu_facts
from metainfer.platform.cuda import cuda_facts
from metainfer.platform.facts import DeviceFacts, Facts, HostFacts, LinkFacts
from metainfer.platform.machine_catalog import SHIPPED, find_machine, machine_name, save_machine
from metainfer.platform.machine_checks import LANE_BYTES_S
from metainfer.platform.machine_file import (
    MachineFile,
    complete_origins,
    parse,
    render,
    unknown_values,
)
from metainfer.platform.probe_cuda import probe_cuda
from metainfer.platform.probe_host import probe_host
from metainfer.platform.software import versions
from metainfer.platform.toml_lines import Lines

GOOD = """\
schema = 1
name = "2x-card"
platform = "cuda"
devices = 2

[host]
numa_nodes = { value = 2, origin = "field: a report" }

[[device]]
count = 2
kind = "cuda"
name = { value = "Card", origin = "vendor: sheet" }
capability = { value = [8, 0], origin = "vendor: sheet" }
memory_bytes = { value = 1000, origin = "vendor: sheet" }
power_cap_w = { value = 300, origin = "probed: NVML" }
power_max_w = { value = 300.0, origin = "probed: NVML" }
dot_flops.bfloat16 = { value = 1e14, origin = "measured: once" }

[[link]]
ends = "host-to-each"
kind = { value = "pcie", origin = "vendor: sheet" }
max_generation = { value = 4, origin = "vendor: sheet" }
max_width = { value = 16, origin = "vendor: sheet" }
bytes_s = { value = 25e9, origin = "field: a report" }
"""


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


def refusal(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(text, "my.toml")
    assert caught.value.code == "bad_machine_file" and caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def test_the_example_of_this_file_is_good() -> None:
    machine = parse(GOOD, "my.toml")
    facts = machine.facts
    assert machine.name == "2x-card" and len(facts.devices) == 2
    assert facts.devices[0] == facts.devices[1] and facts.device.capability == (8, 0)
    assert facts.device.power_cap_w == 300.0 and facts.device.dot_flops == {"bfloat16": 1e14}
    assert [(x.source, x.target) for x in facts.links] == [(-1, 0), (-1, 1)]
    assert facts.origins["devices.1.memory_bytes"] == "vendor: sheet"
    assert facts.origins["links.1.bytes_s"] == "field: a report"


def test_the_instruction_set_follows_and_says_so() -> None:
    facts, rules = parse(GOOD, "x").facts, instructions((8, 0))
    assert rules is not None and facts.device.dot_types == rules.dot_types
    for name in ("dot_types", "storage_types", "features"):
        assert facts.origins[f"devices.1.{name}"].startswith("derived: ")
    said = changed("memory_bytes", 'dot_types = { origin = "unknown: not told" }\nmemory_bytes')
    assert parse(said, "x").facts.device.dot_types is None  # said to be unknown: left so


def test_nothing_else_is_filled_in() -> None:
    device, host = parse(GOOD, "x").facts.device, parse(GOOD, "x").facts.host
    assert device.shared_bytes_per_block is None and device.units is None
    assert device.read_bytes_s is None and host.memory_bytes is None and host.read_bytes_s is None
    other = changed("count = 2\n", "count = 1\n").replace("[[link]]", OTHER_CARD + "\n[[link]]")
    first, second = parse(other, "x").facts.devices
    assert first.memory_bytes == 1000 and second.memory_bytes is None  # not from its neighbour


OTHER_CARD = """[[device]]
kind = "cuda"
name = { value = "Card", origin = "vendor: sheet" }
"""

CONTRADICTIONS = {
    "capability against types": (
        "memory_bytes",
        'dot_types = { value = ["float8_e4m3fn"], origin = "field: x" }\nmemory_bytes',
        "dot_types lists float8_e4m3fn, which capability 8.0 does not have",
        "dot_types",
    ),
    "capability against features": (
        "memory_bytes",
        'features = { value = ["wgmma"], origin = "field: x" }\nmemory_bytes',
        "features lists wgmma, which capability 8.0 does not have",
        "features",
    ),
    "count against list": (
        "devices = 2", "devices = 3", "devices is 3, the tables describe 2", "devices = 3",
    ),
    "name against list": ('"2x-card"', '"4x-card"', "4x-card says 4 devices", "4x-card"),
    "negative size": ("value = 1000", "value = -1000", "memory_bytes is -1000", "-1000"),
    "no memory": ("value = 1000", "value = 0", "memory_bytes is 0, it must be above 0", "= 0,"),
    "negative rate": ("value = 1e14", "value = -1.0", "bfloat16 is -1.0", "dot_flops"),
    "not a number": ("value = 1e14", "value = nan", "bfloat16 must be a number", "dot_flops"),
    "unknown key": (
        "memory_bytes", "memory_byte", "memory_byte is not a key here (did you mean memory_bytes?)",
        "memory_byte",
    ),
    "unknown table": ("[host]", "[hosts]", "hosts is not a key here", "[hosts]"),
    "unknown key of a value": (
        "value = 1000,", "value = 1000, unit = 3,", "unit is not a key here", "unit",
    ),
    "unknown element type": ("dot_flops.bfloat16", "dot_flops.bf16", "bf16 is not a key", "bf16"),
    "wrong type": ("value = 1000", 'value = "1 GB"', "memory_bytes must be a whole number", "1 GB"),
    "a truth value is no number": ("value = 1000", "value = true", "memory_bytes must be a whole",
                                   "true"),
    "wrong pair": ("[8, 0]", "[8]", "capability must be two whole numbers", "[8]"),
    "power": (
        "value = 300,", "value = 301,",
        "power_cap_w is 301 W, above the card's maximum of 300 W", "301",
    ),
    "link rate": (
        "25e9", "32e9", "bytes_s is 32.0 GB/s, generation 4 x16 carries at most 31.5 GB/s", "32e9",
    ),
    "link width": ("value = 16", "value = 15", "max_width is 15; possible", "15"),
    "link generation": ("value = 4,", "value = 9,", "max_generation is 9; known", "9,"),
    "trained above its maximum": (
        "bytes_s =", 'width = { value = 32, origin = "field: x" }\nbytes_s =',
        "width is 32, above max_width 16", "width = { value = 32",
    ),
    "link ends": ('"host-to-each"', "[[0, 2]]", "there is no link [0, 2] among 2 devices", "0, 2"),
    "link to itself": ('"host-to-each"', "[[1, 1]]", "there is no link [1, 1]", "1, 1"),
    "link twice": ('"host-to-each"', "[[0, 1], [0, 1]]", "[0, 1] stands here a second", "ends"),
    "no origin": ('memory_bytes = { value = 1000, origin = "vendor: sheet" }',
                  "memory_bytes = 1000", "memory_bytes has no origin", "memory_bytes"),
    "an origin of no kind": ('1000, origin = "vendor: sheet"', '1000, origin = "a friend"',
                             "origin 'a friend' is not of the form", "friend"),
    "an origin without detail": ('1000, origin = "vendor: sheet"', '1000, origin = "vendor"',
                                 "origin 'vendor' is not of the form", "1000"),
    "a guess": ('1000, origin = "vendor: sheet"', '1000, origin = "seed: usual"',
                "origin 'seed: usual' is not of the form", "seed"),
    "unknown with a value": ('1000, origin = "vendor: sheet"', '1000, origin = "unknown: why"',
                             "memory_bytes has a value and says it is unknown", "1000"),
    "an origin for nothing": ('value = 1000, origin', "origin", "and no value", "memory_bytes"),
    "schema": ("schema = 1", "schema = 2", "schema is 2, this reads 1", "schema"),
    "kind": ('kind = "cuda"', 'kind = "cpu"', "kind is cpu, the machine's platform is cuda",
             'kind = "cpu"'),
    "count": ("count = 2", "count = 0", "count is 0", "count = 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_file_and_line(name: str) -> None:
    old, new, what, place = CONTRADICTIONS[name]
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    said = refusal(text)
    assert what in said
    assert re.search(rf"my\.toml:{line_of(text, place)}: [^;]*{re.escape(what)}", said), said


def test_all_complaints_are_listed_in_one_pass() -> None:
    text = changed("value = 1000", "value = -1").replace("25e9", "99e9").replace("[8, 0]", '"8.0"')
    said = refusal(text)
    assert said.count("my.toml:") == 3
    lines = [int(number) for number in re.findall(r"my\.toml:(\d+)", said)]
    assert lines == sorted(lines)


def test_no_toml_is_refused_at_its_line() -> None:
    said = refusal(changed("count = 2", "count = = 2"))
    assert f"my.toml:{line_of(GOOD, 'count = 2')}: no TOML" in said


def test_a_node_that_the_host_does_not_have() -> None:
    text = changed("memory_bytes", 'numa_node = { value = 2, origin = "probed: x" }\nmemory_bytes')
    assert "numa_node is 2, the host has 2, from 0" in refusal(text)


@pytest.mark.parametrize("generation", LANE_BYTES_S)
def test_a_link_at_its_limit_is_no_contradiction(generation: int) -> None:
    limit = LANE_BYTES_S[generation] * 16
    text = changed("value = 4,", f"value = {generation},")
    assert parse(text.replace("25e9", repr(limit)), "x").facts.links[0].bytes_s == limit
    assert "carries at most" in refusal(text.replace("25e9", repr(limit * 1.001)))


def test_lines_of_nested_keys() -> None:
    text = '\n'.join(('a = [', '  [1, 2],', ']', '[t]', 'b.c = 1', '[[d]]', 'e = "[x] # = "',
                      '[[d]]', 'e = 2', '[d.sub]', 'f = 3'))  # fmt: skip
    lines = Lines(text)
    assert tomllib.loads(text)["d"][1]["sub"]["f"] == 3
    assert [lines.of(path) for path in (("a",), ("t", "b", "c"), ("d", 0, "e"), ("d", 1, "e"))] == [
        1, 5, 7, 9,
    ]  # fmt: skip
    assert lines.of(("d", 1, "sub", "f")) == 11
    assert lines.of(("d", 1, "e", "value")) == 9 and lines.of(("nowhere",)) == 1


def random_facts(rng: random.Random) -> Facts:
    """Any machine: about half of all values unknown, some devices alike."""

    def some(kind: str) -> object:
        if rng.random() < 0.5:
            return None
        base = kind.removesuffix(" | None")
        return {
            "str": lambda: rng.choice(["plain", 'quo"te \\ and \t tab', "ünïcode ×", "\x7f"]),
            "int": lambda: rng.randrange(1, 1 << 40),
            "float": lambda: rng.choice([1e-9, 1e17, 0.1, float(rng.randrange(1 << 50))]),
            "bool": lambda: rng.random() < 0.5,
            "tuple[int, int]": lambda: (7, rng.randrange(6, 9)),  # no rule for these
            "frozenset[str]": lambda: frozenset(rng.sample(["a", "b c", "d"], rng.randrange(4))),
        }[base]()

    def filled(cls: type, **fixed: object) -> dict[str, object]:
        own = {f.name: f for f in dataclasses.fields(cls) if f.name not in fixed}
        made = {n: some(str(f.type)) for n, f in own.items() if "Mapping" not in str(f.type)}
        return {**{n: v for n, v in made.items() if v is not None}, **fixed}

    rates = {"bfloat16": 1.5e14} if rng.random() < 0.5 else {}
    devices: list[DeviceFacts] = []
    for _ in range(rng.randrange(1, 4)):
        made = filled(DeviceFacts, kind="acme", name="Card", dot_flops=rates, power_max_w=1e300,
                      numa_node=None)  # fmt: skip
        devices += [DeviceFacts(**made)] * rng.randrange(1, 4)  # type: ignore[arg-type]
    links = [
        LinkFacts(**filled(LinkFacts, source=i, target=j, kind="acme-bus", width=1, generation=1,
                           max_width=2, max_generation=3))  # type: ignore[arg-type]
        for i in range(-1, len(devices)) for j in range(len(devices)) if i != j
    ]  # fmt: skip
    facts = Facts(
        platform="acme",
        devices=tuple(devices),
        host=HostFacts(**filled(HostFacts)),  # type: ignore[arg-type]
        links=tuple(links),
        software={"torch": "2.12", "acme kit": None},
        origins={"host": "probed: x", "software.torch": "field: y", "links.0": "vendor: z"},
    )
    return complete_origins(facts)


def test_any_machine_reads_back_exactly(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        machine = MachineFile(name="here", facts=random_facts(rng), about='a "b"', source="f")
        assert parse(render(machine), "f") == machine


def test_an_origin_stands_once_in_the_text() -> None:
    text = render(parse(GOOD, "f"))
    assert "[origins]" not in text and text.count("[[device]]") == 1
    assert text.count('"field: a report"') == 2  # as in the source: one value, one table of links


def test_an_origin_is_kept_for_every_device_of_its_own(seed: int) -> None:
    machine = parse(GOOD, "f")
    origins = {**machine.facts.origins, "devices.1.memory_bytes": "probed: driver"}
    facts = dataclasses.replace(machine.facts, origins=dict(sorted(origins.items())))
    again = parse(render(dataclasses.replace(machine, facts=facts)), "f").facts
    assert again == facts and again.origins["devices.0.memory_bytes"] == "vendor: sheet"


def test_what_the_probes_read_is_explained_and_reads_back_exactly() -> None:
    def no_nvml() -> object:
        raise ImportError

    host = probe_host()
    for nvml in (Nvml, no_nvml):
        probed = probe_cuda(lambda: (view(), ""), nvml, Path("/none"))
        for facts in (cuda_facts(probed, host, versions()), cpu_facts(host, versions())):
            assert complete_origins(facts) is facts  # every value has its origin already
            machine = MachineFile(name="here", facts=facts, source="f")
            assert parse(render(machine), "f") == machine


def test_a_value_without_an_origin_gets_its_platform() -> None:
    facts = Facts(platform="acme", devices=(DeviceFacts(kind="acme", name="A", units=4),))
    completed = complete_origins(facts)
    assert completed.origins == {"devices": "probed: platform acme"}
    assert complete_origins(completed) is completed
    assert parse(render(MachineFile(name="a", facts=facts)), "x").facts == completed


@pytest.mark.parametrize("name", SHIPPED)
class TestShipped:
    def test_reads_back_exactly(self, name: str) -> None:
        machine = find_machine(name)
        assert machine.name == name
        assert parse(render(machine), machine.source) == machine

    def test_every_value_says_where_it_is_from(self, name: str) -> None:
        facts = find_machine(name).facts
        kinds = {said.partition(":")[0] for said in facts.origins.values()}
        assert kinds <= {"measured", "vendor", "field", "derived", "unknown"}
        assert ("measured" in kinds) == ("h200" in name)  # the one card that we have
        if name != "cpu":
            assert len(facts.devices) == int(name.partition("x")[0])
        assert complete_origins(facts) is facts and facts.software == {}

    def test_what_is_unknown_is_listed(self, name: str) -> None:
        unknown = unknown_values(find_machine(name).facts)
        assert {"host.iommu", "device.hardware_queues"} <= set(unknown)
        assert ("device.ecc" in unknown) == ("links.host.width" in unknown or name == "8x-b300")
        assert ("device.power_cap_w" in unknown) == (name != "cpu")
        assert not {"device.uuid", "device.bus_id"} & set(unknown)
        assert ("device.memory_bytes" in unknown) == (name == "cpu")


def test_the_names_of_the_contract_have_a_file_each() -> None:
    folder = resources.files("metainfer.platform") / "machines"
    files = {item.name for item in folder.iterdir() if item.name.endswith(".toml")}
    assert files == {f"{name}.toml" for name in SHIPPED} and len(SHIPPED) == 13


#: name -> capability, multiprocessors, GB, GB/s, shared bytes per block, PCIe generation.
SHEET = {
    "8x-rtx-pro-6000d": ((12, 0), 156, 84, 1400, 101_376, 5),
    "8x-rtx-pro-6000": ((12, 0), 188, 96, 1792, 101_376, 5),
    "8x-l20": ((8, 9), 92, 48, 864, 101_376, 4),
    "8x-l40s": ((8, 9), 142, 48, 864, 101_376, 4),
    "8x-4090": ((8, 9), 128, 24, 1008, 101_376, 4),
    "8x-5090": ((12, 0), 170, 32, 1792, 101_376, 5),
    "8x-a800-pcie": ((8, 0), 108, 80, 1935, 166_912, 4),
    "1x-h200": ((9, 0), 132, 141, 4300, 232_448, 5),
}


@pytest.mark.parametrize("name", SHEET)
def test_the_numbers_of_the_hardware_list(name: str) -> None:
    facts = find_machine(name).facts
    card, link = facts.device, facts.links[0]
    assert (
        card.capability,
        card.units,
        (card.memory_bytes or 0) / 1e9,
        (card.read_bytes_s or 0) / 1e9,
        card.shared_bytes_per_block,
        link.max_generation,
    ) == SHEET[name]
    assert link.generation is None and link.width is None  # as the slot trains


def test_a_name_that_is_not_known_gets_the_list() -> None:
    with pytest.raises(UsageError) as caught:
        find_machine("8x-RTX-4090")
    said = str(caught.value)
    assert "Did you mean 8x-4090?" in said and all(name in said for name in SHIPPED)
    assert caught.value.code == "unknown_machine" and "\n" not in said


@pytest.mark.parametrize(
    "reference", ["", "no-such-thing-at-all", "8x-4090.toml", "/nowhere/m.toml"]
)
def test_nothing_is_made_up_for_an_unknown_name(reference: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_machine(reference)
    assert caught.value.code == "unknown_machine"


def test_a_saved_file_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    machine = dataclasses.replace(find_machine("8x-4090"), name=machine_name(path))
    save_machine(machine, path)
    assert find_machine(str(path)).facts == machine.facts
    assert machine_name(Path("8x-mine.toml")) == "mine"  # a name makes no claim of its own
    with pytest.raises(UsageError, match=r"\.toml"):
        save_machine(machine, tmp_path / "mine.txt")
    with pytest.raises(UserError, match="cannot be written"):
        save_machine(machine, tmp_path / "missing" / "mine.toml")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        find_machine(str(path))
