"""Errors, verdicts, ledger, environment, digests, records, requests: the rules, one by one."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metainfer.core import env, records
from metainfer.core.clock import VirtualClock
from metainfer.core.digest import canonical_json, digest, to_plain
from metainfer.core.errors import InternalError, RefusedError, RequestError, UsageError, UserError
from metainfer.core.intent import Intent
from metainfer.core.ledger import DecisionLedger, Origin
from metainfer.core.records import Fingerprint, Record, RecordStore
from metainfer.core.request import SamplingParams
from metainfer.core.step import (
    PENDING,
    NewRequest,
    PageGrant,
    Phase,
    RankTokens,
    RunResult,
    Segment,
    StepPlan,
    StepResult,
    TokenRun,
)
from metainfer.core.verdict import ACCEPT, Reason, all_of, reject, require


class TestVerdict:
    def test_combining_keeps_every_reason_in_order(self) -> None:
        both = reject("a", "first", x=1) & reject("b", "second")
        assert [reason.code for reason in both.reasons] == ["a", "b"]
        assert all_of([ACCEPT, both, reject("c", "third")]).reasons[-1].code == "c"

    def test_truth_value_is_refused(self) -> None:
        with pytest.raises(TypeError):
            bool(ACCEPT)

    def test_require(self) -> None:
        assert require(True, "x", "no").accepted
        assert not require(False, "x", "no").accepted


class TestErrors:
    def test_one_line_with_cause_and_remedy(self) -> None:
        assert str(UserError("No such file.", "Check the path.")) == "No such file. Check the path."

    def test_refusal_carries_all_reasons(self) -> None:
        error = RefusedError("Cannot.", "Do.", reasons=[Reason("a", "one"), Reason("b", "two")])
        assert "one; two" in str(error)
        assert [r["code"] for r in error.to_json()["reasons"]] == ["a", "b"]  # type: ignore[index]

    def test_a_reason_that_is_the_cause_is_told_once(self) -> None:
        reasons = [Reason("memory", "5 B needed"), Reason("x", "two")]
        error = RefusedError("5 B needed on a card.", "Do.", reasons=reasons)
        assert str(error) == "5 B needed on a card. Reasons: two. Do."
        assert str(RefusedError("5 B needed.", "Do.", reasons=reasons[:1])) == "5 B needed. Do."
        assert [r["code"] for r in error.to_json()["reasons"]] == ["memory", "x"]  # type: ignore[index]

    def test_exit_codes(self) -> None:
        assert UserError("x").exit_code == 1
        assert UsageError("x").exit_code == 2

    def test_openai_body(self) -> None:
        body = RequestError("bad", "fix", param="n", code="invalid_value").openai_body()["error"]
        assert body == {
            "message": "bad fix",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }


class TestEnv:
    def test_unknown_name_is_refused_with_the_nearest(self) -> None:
        with pytest.raises(UsageError, match="METAINFER_CACHE"):
            env.check({"METAINFER_CACH": "/x"})

    def test_known_and_foreign_names_pass(self) -> None:
        env.check({"METAINFER_CACHE": "/x", "PATH": "/bin"})

    @pytest.mark.parametrize("text", ["", "0", "false", "False", " no ", "off", None])
    def test_off(self, text: str | None) -> None:
        assert env.is_off(text)

    def test_cache_dir(self) -> None:
        assert env.cache_dir({"METAINFER_CACHE": "/a"}) == Path("/a")
        assert env.cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/metainfer")
        assert env.cache_dir({"XDG_CACHE_HOME": "relative"}) == env.cache_dir({})


class TestLedger:
    def test_a_key_is_decided_once(self) -> None:
        ledger = DecisionLedger()
        ledger.record("x", 1, Origin.FLAG, "asked for")
        with pytest.raises(InternalError):
            ledger.record("x", 2, Origin.DEFAULT, "again")

    def test_origin_of_an_untouched_wish_is_default(self) -> None:
        assert Intent(model="m").origin("goal") is Origin.DEFAULT
        assert Intent(model="m", context=5).origin("context") is Origin.FLAG
        given = Intent(model="m", context=5, origins={"context": Origin.FILE})
        assert given.origin("context") is Origin.FILE


class TestDigest:
    @given(st.dictionaries(st.text(), st.integers() | st.text()))
    def test_order_does_not_count(self, table: dict[str, object]) -> None:
        turned = dict(reversed(list(table.items())))
        assert digest(table) == digest(turned)

    def test_what_has_no_plain_form_is_an_error(self) -> None:
        with pytest.raises(TypeError):
            to_plain(object())

    def test_canonical_json_is_json(self) -> None:
        assert json.loads(canonical_json({"b": (1, 2), "a": Phase.CHUNK})) == {
            "a": "chunk",
            "b": [1, 2],
        }


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The lock of the folder's records is another process's, which stands still."""
    (lock,) = folder.glob(".*.lock")
    script = (
        f"import fcntl; f = open({str(lock)!r}); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(flush=True); input()"
    )
    command = [sys.executable, "-S", "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        try:
            yield
        finally:
            holder.communicate(b"\n")


class TestRecords:
    def store(self, tmp_path: Path, driver: str = "1") -> RecordStore:
        return RecordStore(tmp_path, Fingerprint({"driver": driver, "device": "x"}))

    def test_where_nothing_can_be_written_a_warning_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "speed").write_text("a file where the folder should be")
        store = self.store(tmp_path)
        store._load = lambda kind: {}  # type: ignore[method-assign]
        store.put(Record("speed", "copy", 1.0, {}))
        (line,) = caplog.messages
        assert "is not kept" in line and str(tmp_path / "speed") in line

    def test_round_trip_and_update(self, tmp_path: Path) -> None:
        store = self.store(tmp_path)
        assert store.get("kernels", "a") is None
        store.put(Record("kernels", "a", {"seconds": 1.5}, {"command": "c"}))
        store.put(Record("kernels", "b", 2, {}))
        store.put(Record("kernels", "a", {"seconds": 1.0}, {}))
        assert store.get("kernels", "a").payload == {"seconds": 1.0}  # type: ignore[union-attr]
        assert store.get("kernels", "b").payload == 2  # type: ignore[union-attr]

    def test_nobody_loses_what_others_put_meanwhile(self, tmp_path: Path) -> None:
        """Two engines that prove their kernels at once keep what both found."""

        def puts(writer: int) -> None:
            store = self.store(tmp_path)
            for number in range(12):
                store.put(Record("kernels", f"{writer}/{number}", number, {}))

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(puts, range(6)))
        assert len(self.store(tmp_path).all("kernels")) == 6 * 12

    def test_a_holder_that_stands_still_is_waited_for_once_and_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, clock = self.store(tmp_path), VirtualClock()
        fake = SimpleNamespace(monotonic=clock.now, sleep=clock.advance)
        monkeypatch.setattr(records, "time", fake)
        store.put(Record("kernels", "a", 1, {}))
        assert not caplog.messages and clock.now() == 0
        with held(tmp_path / "kernels"):
            store.put(Record("kernels", "b", 2, {}))
            (line,) = caplog.messages
            assert "another process has held its lock for 5 s" in line and "may be lost" in line
            assert str(store.path("kernels")) in line
            waited = clock.now()
            assert waited == pytest.approx(records.LOCK_WAIT_S, rel=0.01)
            store.put(Record("kernels", "c", 3, {}))  # neither waits nor says it again
            assert clock.now() == waited and caplog.messages == [line]
        assert [record.key for record in store.all("kernels")] == ["a", "b", "c"]
        store.put(Record("kernels", "d", 4, {}))
        with held(tmp_path / "kernels"):
            store.put(Record("kernels", "e", 5, {}))
        assert len(caplog.messages) == 2  # it was had in between

    def test_where_files_have_no_locks_a_warning_says_so_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none(lock: object, how: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        store = self.store(tmp_path)
        monkeypatch.setattr(fcntl, "flock", none)
        for key in "ab":
            store.put(Record("kernels", key, 1, {}))
        (line,) = caplog.messages
        assert "no locks (No locks available)" in line and "may be lost" in line
        assert len(store.all("kernels")) == 2

    def test_another_machine_is_a_miss_that_says_what_changed(self, tmp_path: Path) -> None:
        self.store(tmp_path).put(Record("kernels", "a", 1, {}))
        other = self.store(tmp_path, driver="2")
        assert other.get("kernels", "a") is None
        (known,) = other.other_machines("kernels")
        mine = Fingerprint({"driver": "2", "device": "x"})
        assert mine.differences(known) == ["driver: '1' -> '2'"]

    def test_a_damaged_file_is_an_error(self, tmp_path: Path) -> None:
        store = self.store(tmp_path)
        store.put(Record("kernels", "a", 1, {}))
        store.path("kernels").write_text("{")
        with pytest.raises(UserError, match="Delete it"):
            store.get("kernels", "a")

    def test_a_foreign_fingerprint_in_my_file_is_an_error(self, tmp_path: Path) -> None:
        store, other = self.store(tmp_path), self.store(tmp_path, driver="2")
        other.put(Record("kernels", "a", 1, {}))
        store.path("kernels").write_text(other.path("kernels").read_text())
        with pytest.raises(UserError, match="foreign"):
            store.get("kernels", "a")


class TestSamplingParams:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -0.1),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("min_p", -0.1),
            ("top_k", -1),
            ("presence_penalty", 2.1),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", 1e-45),
            ("repetition_penalty", 0.0099),
            ("max_tokens", -1),
            ("seed", 2**63),
            ("logprobs", 21),
            ("stop_token_ids", (100,)),
            ("logit_bias", {100: 1.0}),
            ("logit_bias", {1: float("nan")}),
        ],
    )
    def test_out_of_range_names_the_field(self, field: str, value: object) -> None:
        with pytest.raises(RequestError) as raised:
            SamplingParams(**{field: value}).check(vocab_size=100)
        assert raised.value.param == field
        assert raised.value.status == 400

    def test_min_tokens_may_not_exceed_max_tokens(self) -> None:
        with pytest.raises(RequestError):
            SamplingParams(min_tokens=5, max_tokens=4).check(100)

    def test_defaults_pass(self) -> None:
        SamplingParams().check(100)


def test_step_types_travel_as_msgpack() -> None:
    plan = StepPlan(
        7,
        (
            Segment(
                Phase.MIXED, "single", (RankTokens((TokenRun(3, 9, (PENDING,), 1, 0, True),), 2),)
            ),
        ),
        new=(NewRequest("a", 3, 0, (1, 2), 2, 0, SamplingParams(seed=4)),),
        pages=(PageGrant(3, 0, 0, (5, 6)),),
        released=(1,),
    )
    raw = msgspec.msgpack.encode(plan)
    assert msgspec.msgpack.decode(raw, type=StepPlan) == plan
    assert plan.tokens == 1
    result = StepResult(7, (RunResult(3, (11, 12), accepted_drafts=1),), 0.1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result


def test_virtual_clock_moves_forward_only() -> None:
    clock = VirtualClock()
    clock.advance(2.0)
    assert clock.now() == 2.0
    with pytest.raises(ValueError):
        clock.advance(-1.0)
