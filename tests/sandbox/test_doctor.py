"""The report of doctor: a row with evidence for each runtime, remedies for failures, and no silent downgrade."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox import doctor
from headrace_sandbox.doctor import CheckVerdict, DoctorRow, best_of, check_runtime, diagnose
from headrace_sandbox.result import ExecResult, Isolation, Limits, Output, Usage
from headrace_sandbox.runtimes import registry
from headrace_sandbox.runtimes import self_test as selftest
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, not_offered
from headrace_sandbox.runtimes.process.runtime import ProcessRuntime
from headrace_sandbox.runtimes.registry import ready_runtime
from tests.sandbox.test_cli import headrace

Answer = Callable[[PythonProgram], Awaitable[ExecResult]]


def answered(stdout: bytes = b"", limit: Any = None, exit_code: int | None = 0) -> ExecResult:
    isolation = Isolation(runtime="third", versions={"third": "3"}, active=["memory_bytes"])
    stream = Output(head=stdout, total_bytes=len(stdout))
    return ExecResult(
        exit_code=exit_code, signal=None, stdout=stream, stderr=Output(), limit=limit, wall_s=0.1, start_s=0.1,
        usage=Usage(), isolation=isolation,
    )  # fmt: skip


class Third:
    """A runtime of a third party. ``looks``: the results of the isolation probe. The other parameters are
    misbehaviours."""

    name = "third"
    isolation = answered().isolation

    def __init__(self, looks: dict[str, bool] | None = None, greedy: int = 1, hangs: bool = False) -> None:
        self._looks = {"no network": True} if looks is None else looks
        self._greedy = greedy
        self._hangs = hangs
        self.closed = False

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        raise not_offered(self.name, "commands")

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        if self._hangs:
            await asyncio.Event().wait()
        return {
            selftest.PRINT: answered(b"1\n"),
            selftest.PROBE: answered(json.dumps(self._looks).encode()),
            selftest.ENDLESS: answered(limit="time", exit_code=None),
            selftest.LARGE_ALLOCATION: answered(exit_code=self._greedy),
        }[program.code]

    async def open(self, template: Any, ttl_s: float) -> Any:
        raise not_offered(self.name, "sandboxes")

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Offers a runtime ``third`` by an entry point."""

    def offer(make: Callable[[], Any]) -> None:
        point = SimpleNamespace(name="third", load=lambda: make)
        monkeypatch.setattr(registry, "entry_points", lambda group, name="third": [point] if name == "third" else [])

    return offer


async def check_third() -> DoctorRow:
    return await check_runtime("third", lambda _: None)


async def test_a_runtime_of_a_third_party_has_a_row_with_evidence(third: Any) -> None:
    third(Third)
    report = await diagnose(lambda _: None)
    assert [row.name for row in report.runtimes] == ["third"]
    row = report.runtimes[0]
    assert (row.verdict, row.found) == ("ok", "no network, an end in time, bounded memory")
    assert (row.versions, row.active) == ({"third": "3"}, ["memory_bytes"])
    assert row.cost_s.keys() == {"code"}
    assert report.best == "third"


@pytest.mark.parametrize(
    ("make", "evidence"),
    [
        (lambda: Third(looks={"no network": False}), "does not hold: no network"),
        (lambda: Third(greedy=0), "does not hold: bounded memory"),
        (lambda: Third(looks={}).nothing, "AttributeError: 'Third' object has no attribute 'nothing'"),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
async def test_a_runtime_that_does_not_isolate_or_breaks_has_failed(third: Any, make: Any, evidence: str) -> None:
    third(make)
    row = await check_third()
    assert (row.verdict, row.found) == ("fail", evidence)
    assert row.hint


async def test_a_runtime_that_hangs_is_a_finding(third: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "SELF_TEST_S", 0.1)
    monkeypatch.setattr(registry, "MAKE_S", 0.1)
    third(lambda: Third(hangs=True))
    assert "did not end within 0.1 s" in (await check_third()).found
    monkeypatch.setattr(doctor, "CLOSE_S", 0.1)
    stuck = Third()
    stuck.close = asyncio.Event().wait  # type: ignore[assignment,method-assign]
    third(lambda: stuck)
    assert "did not close within 0.1 s" in (await check_third()).found
    third(lambda: time.sleep(1))
    assert "was not made within 0.1 s" in (await check_third()).found


async def test_a_runtime_that_fails_its_self_test_is_refused_with_the_evidence(third: Any) -> None:
    runtime = Third(looks={"no network": False})
    third(lambda: runtime)
    with pytest.raises(SandboxFailure, match="does not hold: no network") as caught:
        await ready_runtime("third")
    assert (caught.value.kind, caught.value.retryable, runtime.closed) == ("self-test-failed", False, True)
    good = Third()
    third(lambda: good)
    assert await ready_runtime("third") is good
    assert not good.closed


async def test_a_runtime_that_cannot_be_loaded_says_why(third: Any) -> None:
    def load() -> Any:
        raise ImportError("no module named wheel_of_another_platform")

    third(load)
    with pytest.raises(SandboxFailure, match="wheel_of_another_platform") as caught:
        await ready_runtime("third")
    assert caught.value.kind == "runtime-missing"


async def test_process_is_never_more_than_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    row = await check_runtime("process", lambda _: None)
    assert row.verdict == "warn"
    assert "not a sandbox" in row.found
    assert best_of([row]) is None
    result = await selftest.self_test(ProcessRuntime())
    assert "no process of this machine" not in result.proven


def test_the_best_runtime_that_passes_is_reported() -> None:
    def row(name: str, cost_s: float, *, any_command: bool = False, verdict: CheckVerdict = "ok") -> DoctorRow:
        return DoctorRow(verdict=verdict, name=name, found="", cost_s={"code": cost_s}, any_command=any_command)

    python_alone = [row("slow", 0.5), row("fast", 0.1)]
    any_command = [row("slow-any", 2.0, any_command=True), row("fast-any", 1.0, any_command=True)]
    assert best_of([*python_alone, *any_command]) == "fast-any"
    assert best_of(python_alone) == "fast"
    assert best_of([row("unsafe", 0.1, any_command=True, verdict="warn")]) is None
    assert best_of([]) is None


@pytest.mark.parametrize(
    ("files", "remedies"),
    [
        ({"sys/kernel/apparmor_restrict_unprivileged_userns": "1"}, [doctor.APPARMOR]),
        ({"sys/kernel/unprivileged_userns_clone": "0"}, [doctor.USERNS_CLONE]),
        ({"sys/user/max_user_namespaces": "0"}, [doctor.NO_USERNS]),
        ({"self/status": "NoNewPrivs:\t1\nSeccomp:\t2"}, [doctor.CONTAINER]),
        (
            {"sys/kernel/apparmor_restrict_unprivileged_userns": "1", "self/status": "x\nSeccomp:\t2"},
            [doctor.APPARMOR, doctor.CONTAINER],
        ),
        ({}, [doctor.APPARMOR, doctor.USERNS_CLONE, doctor.NO_USERNS, doctor.CONTAINER]),
    ],
)
def test_the_remedy_names_the_cause_of_refused_namespaces(files: dict[str, str], remedies: list[str]) -> None:
    assert doctor.remedy(lambda name: files.get(name, "")) == "\n".join(remedies)


@pytest.mark.component("bubblewrap")
def test_doctor_prints_the_report_for_people_and_for_scripts() -> None:
    report = json.loads(headrace("doctor", "--json").stdout)
    rows = {row["name"]: row for row in report["runtimes"]}
    assert rows["bubblewrap"]["verdict"] == "ok"
    assert "no network" in rows["bubblewrap"]["found"]
    assert rows["bubblewrap"]["cost_s"].keys() == {"code", "command"}
    assert rows["process"]["verdict"] == "warn"
    assert (report["default"], report["best"]) == ("bubblewrap", "bubblewrap")


@pytest.mark.component("bubblewrap")
def test_doctor_exits_with_1_if_no_runtime_isolates_and_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = headrace("doctor", env={"PATH": "/nowhere", "HEADRACE_RUNSC": "/nowhere/runsc"})
    assert "apt-get install bubblewrap" in outcome.stdout
    assert "user namespaces" not in outcome.stdout
