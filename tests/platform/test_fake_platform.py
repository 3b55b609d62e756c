"""A vendor's package installed beside us is found, chosen and asked; no line of ours names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packages import FAKE, install

from metainfer.core.errors import RefusedError
from metainfer.core.ledger import Origin
from metainfer.core.step import Phase
from metainfer.core.verdict import reject
from metainfer.kernels import conditions
from metainfer.kernels.choice import Policy
from metainfer.kernels.impl import Context, Evidence, Impl, OpRequest, Quality
from metainfer.kernels.registry import Registry
from metainfer.kernels.select import select
from metainfer.ops.catalog import builtin_registry
from metainfer.platform.base import Platform
from metainfer.platform.discovery import installed, select_platform

REQUEST = OpRequest("rmsnorm", "norm", Phase.DECODE, "float32", {"rows": 4, "d": 64})


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package on this process's path, gone again afterwards."""
    target = install(FAKE, tmp_path / "site")
    monkeypatch.syspath_prepend(str(target))
    before = set(sys.modules)
    yield target
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "acme_platform":
            del sys.modules[name]


def test_auto_takes_the_vendor_before_ours(acme: Path) -> None:
    chosen = select_platform(environ={})
    assert chosen.platform.name == "acme" and isinstance(chosen.platform, Platform)
    assert chosen.origin is Origin.PROBE
    losers = {loser.value: loser.reasons[0].message for loser in chosen.losers}
    assert set(losers) == {"cuda", "cpu"}
    assert "acme comes first" in losers["cpu"]


def test_its_facts_reach_the_core(acme: Path) -> None:
    facts = select_platform("acme").platform.facts()
    device = facts.device
    assert facts.platform == "acme" and device.kind == "fake"
    assert device.shared_bytes_per_block == 65_536 and device.hardware_queues == 1
    assert device.dot_types is not None and not any("float8" in kind for kind in device.dot_types)
    assert facts.software["triton"] is None
    assert facts.origins["devices.0"].startswith("vendor: ")


def test_no_streams_and_no_graphs_are_none_not_errors(acme: Path) -> None:
    platform = select_platform("acme").platform
    assert platform.stream() is None and platform.graph() is None
    assert platform.defaults({}).page_multiple == 64
    assert platform.weight_formats() == {"BF16": {"linear"}}
    assert 0 < platform.memory().free < platform.memory().total
    with platform.guard(0):
        platform.synchronize()


def test_conditions_refuse_it_with_both_numbers(acme: Path) -> None:
    context = Context(REQUEST, select_platform("acme").platform.facts())
    said = [
        check(context).reasons[0].message
        for check in (
            conditions.shared_memory(101_376),
            conditions.dot_type("float8_e4m3fn"),
            conditions.feature("graphs"),
            conditions.capability((8, 0)),
            conditions.package("triton"),
            conditions.device_kind("cuda"),
        )
    ]
    assert said[0] == "needs 101,376 B of shared memory per block, this card allows 65,536 B"
    assert "Acme One" in said[1] and "missing on Acme One" in said[2]
    assert "unknown" in said[3]
    assert said[4] == "triton is not installed"
    assert said[5] == "runs on cuda, this device is fake"


def registry_with(platform: Platform) -> Registry:
    registry = builtin_registry()
    for declared in platform.providers():
        assert isinstance(declared, Impl)
        registry.add(declared)
    return registry


def test_its_implementation_is_chosen_where_ours_cannot_run(acme: Path) -> None:
    platform = select_platform("acme").platform
    evidence = {"rmsnorm/acme": Evidence.THIS_CARD}
    found = select(registry_with(platform), [REQUEST], platform.facts(), Policy(evidence=evidence))
    choice = found.bundle.choices[0]
    assert choice.impl.name == "acme" and choice.quality is Quality.NATIVE
    reasons = {loser.impl: [r.code for r in loser.reasons] for loser in choice.rejected}
    assert "device" in reasons["torch"] and "device" in reasons["c"]
    assert "reference" in reasons["ref"]


def test_its_implementation_computes_what_the_reference_does(acme: Path) -> None:
    torch = pytest.importorskip("torch")
    platform = select_platform("acme").platform
    registry = registry_with(platform)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(5, 33, generator=generator).to(platform.torch_device())
    weight = torch.randn(33, generator=generator)
    own, reference = (
        next(i for i in registry.of("rmsnorm") if i.name == name).resolve()(x, weight, 1e-5)
        for name in ("acme", "ref")
    )
    torch.testing.assert_close(own, reference)


def test_an_op_without_its_implementation_is_refused_with_every_reason(acme: Path) -> None:
    platform = select_platform("acme").platform
    swiglu = OpRequest("swiglu", "mlp", Phase.DECODE, "float32", {"rows": 4, "f": 64})
    with pytest.raises(RefusedError) as caught:
        select(registry_with(platform), [swiglu], platform.facts(), Policy())
    text = str(caught.value)
    assert "runs on" in text and "this device is fake" in text
    assert "--allow-fallback" in text


def test_a_named_platform_without_its_device_is_fatal(
    acme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_DEVICE", "0")
    with pytest.raises(RefusedError) as caught:
        select_platform("acme")
    assert (
        caught.value.reasons == reject("device", "no Acme board answers (ACME_DEVICE is 0)").reasons
    )


def test_auto_without_its_device_says_why_it_lost(
    acme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_DEVICE", "0")
    chosen = select_platform(environ={})
    assert chosen.platform.name in ("cpu", "cuda")
    assert chosen.losers[0].value == "acme"
    assert "ACME_DEVICE" in chosen.losers[0].reasons[0].message


def test_the_environment_names_it(acme: Path) -> None:
    chosen = select_platform(environ={"METAINFER_PLATFORM": "cpu"})
    assert chosen.platform.name == "cpu" and chosen.origin is Origin.ENV
    chosen = select_platform("acme", environ={"METAINFER_PLATFORM": "cpu"})
    assert chosen.platform.name == "acme" and chosen.origin is Origin.FLAG


def test_it_is_found_in_a_fresh_process_without_torch(tmp_path: Path) -> None:
    target = install(FAKE, tmp_path / "site")
    code = """
import json, sys
from metainfer.platform.discovery import select_platform
platform = select_platform().platform
platform.facts(), platform.providers()
print(json.dumps([platform.name, "torch" in sys.modules]))
"""
    environ = {**os.environ, "PYTHONPATH": str(target)}
    environ.pop("METAINFER_PLATFORM", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ["acme", False]


def test_without_the_package_there_is_no_entry() -> None:
    assert all(entry.name != "acme" for entry in installed())
