"""Plug-ins that do not work stop the start, with the cause; nothing is skipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from packages import install_code

from metainfer.core.errors import RefusedError, UsageError
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.verdict import ACCEPT, Verdict, reject
from metainfer.platform.base import API_VERSION, MEMBERS, Platform
from metainfer.platform.cpu import CpuPlatform
from metainfer.platform.cuda import CudaPlatform
from metainfer.platform.discovery import (
    PlatformError,
    builtin_platforms,
    installed,
    select_platform,
)
from metainfer.platform.probe_cuda import CudaProbe


class Vendor(CpuPlatform):
    """A plug-in that works, or fails in a chosen place."""

    def __init__(self, name: str = "vendor", verdict: Verdict = ACCEPT, **fields: object) -> None:
        super().__init__()
        self.name, self.vendor, self.verdict = name, f"{name} inc", verdict
        for key, value in fields.items():
            setattr(self, key, value)

    def detect(self) -> Verdict:
        return self.verdict


@dataclass
class Entry:
    name: str
    made: object
    value: str = "some_package.module:thing"

    def load(self) -> object:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


NO = reject("device", "no board")


def select_with(*entries: Entry, name: str | None = None) -> object:
    return select_platform(name, environ={}, entries=entries, builtins=(CpuPlatform(),))


def test_one_active_vendor_is_taken() -> None:
    quiet = Vendor("quiet", NO)
    chosen = select_platform(
        environ={},
        entries=[Entry("quiet", quiet), Entry("vendor", Vendor())],
        builtins=(CpuPlatform(),),
    )
    assert chosen.platform.name == "vendor"
    assert [loser.value for loser in chosen.losers] == ["quiet", "cpu"]
    assert chosen.losers[0].reasons == NO.reasons
    ledger = DecisionLedger()
    ledger.record("platform", chosen.platform.name, chosen.origin, chosen.why, chosen.losers)


def test_a_class_and_a_factory_are_called() -> None:
    for made in (Vendor, lambda: Vendor()):
        chosen = select_platform(environ={}, entries=[Entry("vendor", made)], builtins=())
        assert chosen.platform.name == "vendor"


def test_two_active_vendors_are_an_error_that_names_both() -> None:
    with pytest.raises(PlatformError, match=r"one \(one inc\) and two \(two inc\)") as caught:
        select_with(Entry("one", Vendor("one")), Entry("two", Vendor("two")))
    assert caught.value.code == "two_platforms"
    assert "--platform one" in caught.value.remedy


def test_naming_one_of_two_is_the_way_out() -> None:
    chosen = select_platform(
        "two",
        environ={},
        entries=[Entry("one", RuntimeError("never loaded")), Entry("two", Vendor("two"))],
        builtins=(CpuPlatform(),),
    )
    assert chosen.platform.name == "two" and chosen.origin is Origin.FLAG


@pytest.mark.parametrize("name", [None, "vendor"])
def test_a_plug_in_that_does_not_import_is_fatal_with_its_traceback(name: str | None) -> None:
    with pytest.raises(PlatformError, match=r"libacme\.so not found") as caught:
        select_with(Entry("vendor", ImportError("libacme.so not found")), name=name)
    error = caught.value
    assert error.code == "platform_raised" and error.exit_code == 1
    assert "Traceback (most recent call last)" in error.detail
    assert "some_package.module:thing" in error.cause
    assert error.to_json()["error"]["cause"] == error.cause  # type: ignore[index]
    assert error.to_json()["detail"] == error.detail


def test_a_broken_plug_in_does_not_stop_another_named_platform() -> None:
    chosen = select_platform(
        "cpu", environ={}, entries=[Entry("vendor", ImportError())], builtins=(CpuPlatform(),)
    )
    assert chosen.platform.name == "cpu"


def test_a_constructor_or_a_detect_that_raises_is_fatal() -> None:
    def constructor() -> Vendor:
        raise RuntimeError("no licence")

    class Detect(Vendor):
        def detect(self) -> Verdict:
            raise RuntimeError("board on fire")

    with pytest.raises(PlatformError, match="cannot be created: RuntimeError: no licence"):
        select_with(Entry("vendor", constructor))
    with pytest.raises(PlatformError, match=r"detect\(\) raised: RuntimeError: board on fire"):
        select_with(Entry("vendor", Detect()))


@pytest.mark.parametrize("version", [API_VERSION + 1, -1, "0"])
def test_another_interface_version_is_fatal(version: object) -> None:
    with pytest.raises(PlatformError, match="interface version") as caught:
        select_with(Entry("vendor", Vendor(api_version=version)))
    assert caught.value.code == "platform_version"
    assert "some_package" in caught.value.remedy


def test_a_missing_member_is_named() -> None:
    class Partial:
        name, vendor, api_version = "vendor", "x", API_VERSION

        def detect(self) -> Verdict:
            return ACCEPT

    with pytest.raises(PlatformError, match="lacks facts, memory, trim") as caught:
        select_with(Entry("vendor", Partial()))
    assert caught.value.code == "platform_incomplete"


def test_a_name_that_differs_from_the_entry_point_is_fatal() -> None:
    with pytest.raises(PlatformError, match="gives a platform named other"):
        select_with(Entry("vendor", Vendor("other")))


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_a_plug_in_may_not_take_our_names(name: str) -> None:
    with pytest.raises(PlatformError, match=f"two platforms are named {name}"):
        select_with(Entry(name, Vendor(name)))


def test_two_plug_ins_of_one_name() -> None:
    with pytest.raises(PlatformError, match=r"a\.b:C and d\.e:F"):
        select_with(Entry("v", Vendor("v"), "a.b:C"), Entry("v", Vendor("v"), "d.e:F"))


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="vendor, cpu") as caught:
        select_with(Entry("vendor", Vendor()), name="vender")
    assert caught.value.exit_code == 2


def test_a_named_platform_that_refuses_gives_all_reasons() -> None:
    verdict = NO & reject("driver", "driver 3 is too old")
    with pytest.raises(RefusedError) as caught:
        select_with(Entry("vendor", Vendor(verdict=verdict)), name="vendor")
    assert [reason.code for reason in caught.value.reasons] == ["device", "driver"]


def test_cuda_is_asked_before_the_processor() -> None:
    assert [platform.name for platform in builtin_platforms()] == ["cuda", "cpu"]
    none = CudaPlatform(lambda: CudaProbe(reason="no driver"))
    chosen = select_platform(environ={}, entries=[], builtins=(none, CpuPlatform()))
    assert chosen.platform.name == "cpu"
    assert [(x.value, x.reasons[0].message) for x in chosen.losers] == [("cuda", "no driver")]
    with pytest.raises(RefusedError, match="no driver"):
        select_platform("cuda", environ={}, entries=[], builtins=(none, CpuPlatform()))


def test_auto_in_words_is_auto() -> None:
    chosen = select_platform("auto", environ={}, entries=[], builtins=(CpuPlatform(),))
    assert chosen.platform.name == "cpu" and chosen.origin is Origin.PROBE


def test_members_are_those_of_the_protocol() -> None:
    own = {name for name in vars(Platform) if not name.startswith("_")}
    own |= set(Platform.__annotations__)
    assert own == set(MEMBERS)
    for platform in builtin_platforms():
        assert isinstance(platform, Platform)


def test_an_installed_plug_in_that_raises_on_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def helper():\n    raise OSError('libbroken.so: undefined symbol')\n\nhelper()\n"
    target = install_code(tmp_path, "broken_plug", code, {"broken": "broken_plug:Thing"})
    monkeypatch.syspath_prepend(str(target))
    assert [entry.name for entry in installed()] == ["broken"]
    with pytest.raises(PlatformError, match="undefined symbol") as caught:
        select_platform(environ={})
    assert "broken_plug.py" in caught.value.detail and "in helper" in caught.value.detail
