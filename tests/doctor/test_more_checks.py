"""Checks on tables, on a model's plan, on containers and on what a data test showed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sample_machines import (
    card,
    healthy,
    processor,
    with_card,
    with_facts,
    with_host,
    with_local,
    with_software,
    without_local,
)

from metainfer.core.intent import Intent
from metainfer.core.step import Phase
from metainfer.core.verdict import Reason
from metainfer.doctor.checks import (
    architecture,
    container,
    foreign_environment,
    handshake,
    memory,
    numa,
    pages,
    peers,
    power,
    software,
)
from metainfer.doctor.data_files import rows
from metainfer.doctor.finding import Finding, Severity
from metainfer.doctor.inputs import Inputs
from metainfer.doctor.model_view import ModelView, view_of
from metainfer.doctor.peer_test import PeerProof
from metainfer.engine import elsewhere
from metainfer.kernels import evidence
from metainfer.kernels.choice import Bundle, Candidate, Choice, Selection
from metainfer.kernels.impl import Evidence, Impl, OpRequest, Quality
from metainfer.kv.book.form import plain
from metainfer.kv.book.spec import CacheSpec, GroupKind, form_groups
from metainfer.planner.opening import open_model
from metainfer.platform.host_text import SMI_QUERY, HostText


def one(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def with_texts(inputs: Inputs, **texts: str) -> Inputs:
    assert inputs.text is not None
    kept = {**inputs.text.texts, **{key.replace("__", "/"): body for key, body in texts.items()}}
    return dataclasses.replace(inputs, text=HostText(kept, inputs.text.refused))


def text(inputs: Inputs, changes: dict[str, str]) -> Inputs:
    assert inputs.text is not None
    return dataclasses.replace(inputs, text=HostText({**inputs.text.texts, **changes}))


# environment variables of others


def variables(**environ: str) -> Inputs:
    return with_local(healthy(), environ=environ)


OFF_WORDS = ("0", "false", "", "no", "off", "False", " 0 ")


@pytest.mark.parametrize("word", OFF_WORDS)
def test_off_means_off_for_every_switch(word: str) -> None:
    for variable in foreign_environment.table().values():
        if variable.kind == "switch":
            assert foreign_environment.effect(variable, word) == ""
            assert foreign_environment.effect(variable, "1") == variable.on
        if variable.kind == "enable":
            assert foreign_environment.effect(variable, word) == variable.off
            assert foreign_environment.effect(variable, "1") == variable.on


def test_the_table_is_whole() -> None:
    for row in rows("environment.toml", "variable"):
        assert row["origin"]
        if row["kind"] in ("switch", "value", "enable"):
            assert row["on"] and row["severity"] in ("slows", "information")
        if row["kind"] == "enable":
            assert row["off"]


@pytest.mark.parametrize(
    ("name", "value", "grade", "words"),
    [
        ("NCCL_P2P_DISABLE", "1", "slows", "through host memory only"),
        ("CUDA_LAUNCH_BLOCKING", "true", "slows", "nothing overlaps"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "slows", "one hardware queue"),
        ("TRITON_INTERPRET", "1", "slows", "in Python"),
        ("NCCL_ALGO", "Ring", "information", "held to these"),
        ("NCCL_NVLS_ENABLE", "0", "information", "no NVLink multicast"),
        ("NVIDIA_TF32_OVERRIDE", "0", "slows", "lose their tensor cores"),
    ],
)
def test_a_variable_that_removes_or_requires_a_path(
    name: str, value: str, grade: str, words: str
) -> None:
    seen = one(foreign_environment.check(variables(**{name: value})))
    assert seen.id == "env.foreign" and seen.severity.value == grade and words in seen.what
    assert seen.where == name and seen.evidence == f"{name}={value}"
    assert seen.remedy == f"unset {name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_P2P_DISABLE", "0"), ("CUDA_DEVICE_MAX_CONNECTIONS", "8"), ("NCCL_ALGO", ""),
        ("CUDA_MODULE_LOADING", "LAZY"), ("CUDA_HOME", "/usr/local/cuda"), ("PATH", "/bin"),
        ("CUDA_VISIBLE_DEVICES", "0"),
    ],
)  # fmt: skip
def test_a_variable_that_does_nothing_here(name: str, value: str) -> None:
    assert foreign_environment.check(variables(**{name: value})) == []


def test_names_that_are_not_in_the_table_are_unknown_not_ignored() -> None:
    seen = one(foreign_environment.check(variables(NCCL_NEW="7", TORCH_ODD="x", CUDA_EMPTY="")))
    assert seen.id == "env.unlisted.unknown" and seen.what.startswith("unknown: ")
    assert seen.evidence == "NCCL_NEW=7; TORCH_ODD=x"


def test_variables_of_another_engine_change_nothing_here() -> None:
    seen = one(foreign_environment.check(variables(VLLM_SKIP_P2P_CHECK="1")))
    assert seen.id == "env.engine" and seen.severity is Severity.INFORMATION
    assert "Only vllm reads it" in seen.what


def test_without_cards_only_what_matters_anywhere() -> None:
    environ = {"NCCL_P2P_DISABLE": "1", "NCCL_NEW": "1", "TRITON_INTERPRET": "1"}
    found = foreign_environment.check(with_local(processor(), environ=environ))
    assert one(found).where == "TRITON_INTERPRET"
    assert foreign_environment.check(without_local(variables(NCCL_P2P_DISABLE="1"))) == []


# software


@pytest.mark.parametrize(
    ("torch", "triton", "pinned"),
    [
        ("2.11.0", "3.6.0", None), ("2.11.0", "3.7.1", "3.6"), ("2.12.1", "3.7.1", None),
        ("2.13.0", "3.6.0", "3.7"), ("2.13.0", "3.9.0", "3.7"), ("git", "3.9.0", None),
    ],
)  # fmt: skip
def test_library_pairs(torch: str, triton: str, pinned: str | None) -> None:
    found = software._pairs(with_software(healthy(), torch=torch, triton=triton))
    if pinned is None:
        assert found == []
    else:
        seen = one(found)
        assert f"pins Triton {pinned}" in seen.what and "dependencies" in seen.evidence
        assert seen.remedy == f"pip install 'triton=={pinned}.*'"


@pytest.mark.parametrize(
    ("torch", "driver", "blocked"),
    [
        ("2.12.0+cu130", "12.9", True), ("2.12.0+cu130", "13.0", False),
        ("2.12.0+cu128", "12.4", False), ("2.12.0+cu126", "13.0", False), ("2.12.0", "11.8", False),
        ("2.12.0+cu130", None, False),
    ],
)  # fmt: skip
def test_a_driver_too_old_for_torch_blocks(torch: str, driver: str | None, blocked: bool) -> None:
    found = software._driver(with_software(healthy(), torch=torch, cuda_driver=driver))
    assert [f.id for f in found] == (["software.driver-pair"] if blocked else [])
    if blocked:
        assert one(found).severity is Severity.BLOCKER and "13.0" in one(found).what


def test_b01_an_installed_package_does_not_make_a_card_capable() -> None:
    inputs = with_software(healthy(), flash_mla="1.0", deep_gemm="2.5")
    assert [f.where for f in software._cards(inputs)] == ["flash_mla"]
    old = with_facts(inputs, devices=(card(capability=(8, 9)),) * 2)
    assert [f.where for f in software._cards(old)] == ["flash_mla", "deep_gemm"]
    assert "this card has 8.9" in software._cards(old)[0].what
    hopper = with_facts(inputs, devices=(card(capability=(9, 0)),) * 2)
    assert software._cards(hopper) == []


# containers


@pytest.mark.parametrize(
    ("texts", "inside"),
    [
        ({"/.dockerenv": ""}, "/.dockerenv exists"),
        ({"/run/.containerenv": "engine=podman"}, "/run/.containerenv exists"),
        ({"/proc/1/cgroup": "0::/kubepods.slice/pod1"}, "/proc/1/cgroup: 0::/kubepods.slice/pod1"),
        ({"/proc/mounts": "overlay / overlay rw 0 0"}, "/proc/mounts: overlay / overlay"),
        ({"/proc/1/cgroup": "0::/init.scope", "/proc/mounts": "/dev/sda / ext4 rw 0 0"}, ""),
        ({}, None),
    ],
)
def test_what_gives_a_container_away(texts: dict[str, str], inside: str | None) -> None:
    assert container.container(HostText(texts)) == inside


@pytest.mark.parametrize(
    ("options", "small"),
    [
        ("rw,size=65536k", True), ("rw,size=64m", True), ("rw,size=16g", False), ("rw", False),
        ("rw,size=1048576k", False), ("rw,size=1048575k", True), ("rw,size=4096", True),
    ],
)  # fmt: skip
def test_shared_memory_of_a_container(options: str, small: bool) -> None:
    mounts = f"overlay / overlay rw 0 0\nshm /dev/shm tmpfs {options} 0 0\n"
    found = container.check(text(healthy(), {"/proc/mounts": mounts}))
    assert [f.id for f in found] == ["container.inside"] + (["container.shm"] if small else [])
    assert all(f.severity is Severity.INFORMATION for f in found)
    assert not small or "--collectives nccl" in found[1].what


def test_on_the_host_its_shared_memory_is_not_our_business() -> None:
    mounts = "/dev/sda / ext4 rw 0 0\nshm /dev/shm tmpfs size=64k 0 0\n"
    assert container.check(text(healthy(), {"/proc/mounts": mounts})) == []


# memory, power


def smi(body: str) -> Inputs:
    return text(healthy(1), {SMI_QUERY: f"GPU 00000000:41:00.0\n{body}"})


def test_memory_of_others_without_a_visible_process() -> None:
    seen = one(memory._device(smi("    FB Memory Usage\n        Used : 40960 MiB\n"), 0))
    assert "40.0 of 84.0 GiB" in seen.what and "not visible from here" in seen.what
    assert memory._device(smi("    FB Memory Usage\n        Used : 900 MiB\n"), 0) == []
    unread = one(memory._device(smi("    FB Memory Usage\n        Used : N/A\n"), 0))
    assert unread.id == "gpu.memory.unknown" and unread.evidence == "Used : N/A"


def test_older_drivers_call_throttling_otherwise() -> None:
    body = (
        "    Clocks Throttle Reasons\n        SW Power Cap : Active\n        HW Slowdown : Active\n"
        "            HW Thermal Slowdown : Active\n        SW Thermal Slowdown : Not Active\n"
    )
    found = power._throttles(smi(body), 0)
    assert [(f.id, f.severity.value) for f in found] == [
        ("gpu.throttle", "slows"),
        ("gpu.throttle", "information"),
    ]
    assert one(power._throttles(smi("    Fan Speed : 3 %\n"), 0)).id == "gpu.throttle.unknown"


def test_a_card_below_its_highest_cap_is_only_a_note() -> None:
    found = power._cap(with_card(healthy(), power_max_w=700.0), 1)
    assert one(found).id == "gpu.power-max" and one(found).severity is Severity.INFORMATION


# memory nodes


def nodes(allowed: str, second: int | None = 1) -> Inputs:
    inputs = with_host(healthy(), numa_nodes=2)
    devices = (card(numa_node=0), card(numa_node=second, bus_id="0000:42:00.0"))
    return text(
        with_facts(inputs, devices=devices),
        {
            "/sys/devices/system/node/node0/cpulist": "0-15\n",
            "/sys/devices/system/node/node1/cpulist": "16-31\n",
            "/sys/devices/system/node/node0/distance": "10 32\n",
            numa.STATUS: f"Name:\tx\nCpus_allowed_list:\t{allowed}\n",
        },
    )


def test_nodes_and_where_this_process_may_run() -> None:
    assert [f.id for f in numa.check(nodes("0-31"))] == ["numa.spread"]
    spread, away = numa.check(nodes("0-15"))
    assert "10 32" in spread.evidence and "GPU 0 on node 0; GPU 1 on node 1" in spread.what
    assert away.id == "numa.affinity" and away.where == "GPU 1" and "16-31" in away.remedy
    assert [f.id for f in numa.check(nodes("3,20"))] == ["numa.spread"]
    assert [f.id for f in numa.check(nodes("0-31", None))] == ["numa.node.unknown"]
    assert numa.check(healthy()) == []


# what the data test showed


def proven(*rows_: tuple[int, int, str, str]) -> list[Finding]:
    proofs = tuple(PeerProof(i, j, kind, verdict, "detail") for i, j, kind, verdict in rows_)
    return peers.check(dataclasses.replace(healthy(), proofs=proofs))


def test_b15_a_data_test_overrules_the_driver() -> None:
    all_right = [(0, 1, "read", "right"), (1, 0, "read", "right")]
    assert one(proven(*all_right)).id == "link.peer-proven"
    for verdict in ("wrong", "stuck", "refused"):
        seen = one(proven((0, 1, "write", verdict), (1, 0, "write", "right")))
        assert seen.id == f"link.peer-{verdict}" and seen.severity is Severity.SLOWS
        assert seen.where == "GPUs 0->1" and "write 0->1: detail" in seen.evidence
    failed = one(proven((0, 1, "copy", "failed"), (1, 0, "copy", "right")))
    assert failed.id == "link.peer-data.unknown"
    assert one(proven()).id == "link.peer-data.unknown"
    mixed = proven((0, 1, "read", "wrong"), (1, 0, "read", "stuck"))
    assert {f.id for f in mixed} == {"link.peer-wrong", "link.peer-stuck"}


def test_b14_atomics_between_peers_are_told() -> None:
    inputs = healthy()
    links = tuple(dataclasses.replace(x, peer_atomics=False) for x in inputs.facts.links)
    found = {f.id: f for f in peers.check(with_facts(inputs, links=links))}
    assert set(found) == {"link.peer-atomics", "link.peer-claimed"}
    assert "2 of 2 directed pairs" in found["link.peer-atomics"].what
    silent = tuple(dataclasses.replace(x, peer_atomics=None) for x in inputs.facts.links)
    inputs = with_facts(inputs, links=silent)
    assert "link.peer-atomics.unknown" in {f.id for f in peers.check(inputs)}
    assert [f.id for f in peers.check(without_local(inputs))] == ["link.peer-claimed"]


# kernels of another architecture


def test_the_arch_list_against_the_card() -> None:
    covers = architecture.covers
    assert covers("8.0;12.0", (12, 0)) and covers("12.0", (12, 1)) and covers("9.0+PTX", (12, 0))
    assert not covers("8.0 8.6", (12, 0)) and not covers("9.0", (12, 0))
    assert not covers("8.9", (8, 6)) and covers("8.0", (8, 9)) and not covers("12.1", (12, 0))
    assert covers("9.0a", (9, 0)) and not covers("12.0a", (12, 1))
    assert covers("Hopper;Blackwell", (12, 0)) and not covers("Hopper", (12, 0))


@pytest.mark.parametrize(
    ("value", "finding"),
    [("8.0;8.6", "env.arch-list"), ("12.0", None), ("", None), ("9.0+PTX", None)],
)
def test_extensions_built_for_other_cards(value: str, finding: str | None) -> None:
    found = architecture.check(variables(TORCH_CUDA_ARCH_LIST=value))
    assert [f.id for f in found] == ([finding] if finding else [])
    unread = with_card(with_card(variables(TORCH_CUDA_ARCH_LIST="8.0")), capability=None)
    bare = with_facts(unread, devices=(unread.facts.devices[1],) * 2)
    assert one(architecture.check(bare)).id == "env.arch-list.unknown"


def impl(name: str) -> Impl:
    return Impl(op="op", name=name, load="x:y", provider="triton", dtypes=frozenset({"bfloat16"}))


def choice(
    name: str,
    how: Evidence = Evidence.OTHER_CARD,
    quality: Quality = Quality.COMPATIBLE,
    rejected: tuple[Candidate, ...] = (),
) -> Choice:
    request = OpRequest("op", "op", Phase.DECODE, "bfloat16", {})
    return Choice(request, impl(name), quality, how, "", rejected)


def view(*choices: Choice) -> ModelView:
    bundle = Bundle(layouts={}, choices=choices)
    return ModelView(selection=Selection(bundle=bundle, refused=()))


def test_kernels_that_never_ran_on_this_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = {
        "op/here": (evidence.Run("sm_120", "cases"),),
        "op/there": (evidence.Run("sm_90", "cases on an H200"),),
    }
    monkeypatch.setattr(architecture, "shipped", lambda: ran)
    model = view(choice("here"), choice("there"), choice("none", Evidence.COMPILED),
                 choice("own", Evidence.THIS_CARD))  # fmt: skip
    seen = one(architecture.check(dataclasses.replace(healthy(), model=model)))
    assert seen.id == "ops.other-architecture" and "never ran on sm_120" in seen.what
    assert "op/there" in seen.what and "op/none" in seen.what and "op/here" not in seen.what
    assert "sm_90: cases on an H200" in seen.evidence and "'compiled only'" in seen.evidence
    assert architecture.check(dataclasses.replace(healthy(), model=view(choice("here")))) == []


# pages and layouts


def cache(layer: int, **changes: object) -> CacheSpec:
    form = plain("kv@1", 128, "bfloat16", parts=2, heads=8)
    fields: dict[str, object] = {
        "layer": layer, "name": "kv", "kind": GroupKind.PAGED, "form": form,
    }  # fmt: skip
    return CacheSpec(**{**fields, **changes})  # type: ignore[arg-type]


def with_model(model: ModelView) -> Inputs:
    return dataclasses.replace(healthy(), model=model)


def test_b08_the_group_table_says_logical_physical_and_ratio() -> None:
    latent = plain("latent@1", 512, "bfloat16")
    specs = (
        cache(0),
        cache(1, name="entries", form=latent, tokens_per_entry=4),
        cache(2, name="local", form=latent, kind=GroupKind.WINDOW, window=128, page_tokens=64),
    )
    groups = form_groups(specs, page_tokens=256)
    model = dataclasses.replace(view(), groups=groups)
    seen = one(pages.check(with_model(model)))
    assert seen.id == "pages.groups" and "multiples of 256 tokens" in seen.what
    assert "kv: 256 tokens a page, 256 entries" in seen.evidence
    assert "entries-1of4: 256 tokens a page, 64 entries" in seen.evidence
    assert "kernels walk 64 at a time, one entry per 4 tokens" in seen.evidence
    assert "local-window128: 64" in seen.evidence
    coarse = form_groups((cache(0), cache(1, name="x", page_tokens=1152)), page_tokens=256)
    seen = one(pages.check(with_model(dataclasses.replace(view(), groups=coarse))))
    assert seen.id == "pages.grid" and seen.severity is Severity.SLOWS and "2304" in seen.what


def test_b08_a_kernel_that_only_the_page_refuses_is_named() -> None:
    page = Reason("instantiation", "page is 128; instantiated for 64", {"extent": "page"})
    card_ = Reason("capability", "needs 9.0", {})
    lost = (
        Candidate("op/fast", (page,)),
        Candidate("op/other", (page, card_)),
        Candidate("op/slower", ()),
    )
    seen = one(
        pages.check(with_model(view(choice("ref", quality=Quality.REFERENCE, rejected=lost))))
    )
    assert seen.id == "pages.refused" and "op/fast" in seen.what and "for 64" in seen.what
    native = choice("good", quality=Quality.NATIVE, rejected=lost)
    assert pages.check(with_model(view(native))) == []


def test_b09_a_borrower_must_read_what_its_source_writes() -> None:
    other = plain("kv@2", 128, "bfloat16", parts=2, heads=8)
    assert handshake.handshake((cache(0), cache(1, kv_source=0))) == []
    seen = one(handshake.handshake((cache(0), cache(1, kv_source=0, form=other))))
    assert seen.id == "cache.handshake" and seen.severity is Severity.BLOCKER
    assert "layer 1" in seen.where and "layout 'kv@1' against 'kv@2'" in seen.evidence
    index = cache(1, name="index", index_source=0)
    seen = one(handshake.handshake((cache(0), index)))
    assert "keeps none of that name" in seen.what


def test_a_real_plan_passes_its_own_handshake() -> None:
    intent = Intent(model="random:qwen3-8b", context=4096)
    there = elsewhere.describe("8x-l20", intent)
    model = view_of(there.resolve(open_model(intent.model), intent))
    inputs = Inputs(facts=there.facts, model=model)
    assert handshake.check(inputs) == [] and model.caches
    assert one(pages.check(inputs)).id == "pages.groups"
    assert one(architecture.check(inputs)).id == "ops.other-architecture"
    assert Path(pages.__file__).exists()
