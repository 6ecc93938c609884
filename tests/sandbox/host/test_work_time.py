"""The clock of a program's work, with looks that the test makes up, and looks at real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.host.work_time import Activity, WorkClock, look_at_descendants
from headrace_sandbox.result import Limits

LOOK_S = 0.05


class SimulatedProgram:
    """A program in simulated time. ``cpu_s`` and ``is_runnable`` are functions of the time since its start."""

    def __init__(
        self, cpu_s: Callable[[float], float], is_runnable: Callable[[float], bool], limits: Limits | None = None
    ) -> None:
        self.now = 0.0
        look = lambda: Activity(cpu_s(self.now), is_runnable(self.now))  # noqa: E731
        self.clock = WorkClock(look, limits or Limits(), lambda: self.now)

    def work_after(self, whole_s: float, seed: int = 0) -> float:
        chance = random.Random(seed)
        while self.now < whole_s:
            passed_s = LOOK_S * chance.uniform(0.5, 1.5)
            self.now += passed_s
            self.clock.add_look(passed_s)
        return self.clock.work_s / self.now * whole_s


def test_waiting_for_a_processor_that_others_use_is_not_work() -> None:
    starved = SimulatedProgram(lambda now: 0.0, lambda now: True)
    assert starved.work_after(100.0) == 0.0
    share = SimulatedProgram(lambda now: 0.1 * now, lambda now: True)
    assert share.work_after(100.0) == pytest.approx(10.0)


def test_a_program_that_its_own_threads_or_its_own_quota_of_processors_hold_up_works() -> None:
    threads = SimulatedProgram(lambda now: now, lambda now: True)  # of which one computes at a time
    assert threads.work_after(100.0) == pytest.approx(100.0)
    half = SimulatedProgram(lambda now: 0.5 * now, lambda now: True, Limits(cpus=0.5))
    assert half.work_after(100.0) == pytest.approx(100.0)

    def used_at_once(now: float) -> float:  # eight threads use up each period of 0.1 s in an eighth of it
        return 0.1 * (now // 0.1) + min(0.1, 8 * (now % 0.1))

    assert SimulatedProgram(used_at_once, lambda now: True).work_after(100.0) == pytest.approx(100.0, rel=0.1)


def test_a_program_that_sleeps_works() -> None:
    assert SimulatedProgram(lambda now: 0.0, lambda now: False).work_after(100.0) == pytest.approx(100.0)


@pytest.mark.parametrize("computes", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("period_s", [0.01, 0.05, 0.3])
def test_a_program_that_computes_and_sleeps_in_turns_cannot_stretch_its_limit(computes: float, period_s: float) -> None:
    def cpu_s(now: float) -> float:
        periods, part = divmod(now, period_s)
        return periods * computes * period_s + min(part, computes * period_s)

    program = SimulatedProgram(cpu_s, lambda now: now % period_s < computes * period_s)
    assert program.work_after(200.0) >= 0.7 * 200.0


def test_a_program_that_gets_no_processor_for_very_long_is_a_failure_of_ours() -> None:
    limits = Limits(wall_s=20.0)
    starved = SimulatedProgram(lambda now: 0.0, lambda now: True, limits)
    starved.work_after(limits.whole_s - 1.0)
    assert starved.clock.next_look_s() is not None
    starved.work_after(limits.whole_s)
    with pytest.raises(SandboxFailure) as caught:
        starved.clock.next_look_s()
    assert (caught.value.kind, caught.value.retryable) == ("program-starved", True)


def test_all_time_counts_where_the_processes_cannot_be_seen() -> None:
    now = 0.0
    clock = WorkClock(lambda: None, Limits(), lambda: now)
    now = 3.0
    clock.add_look(0.1)
    assert clock.work_s == 3.0


def test_a_look_at_descendants_sees_threads_and_children_of_children() -> None:
    compute = "import threading; threading.Thread(target=exec, args=('while True: pass',)).start()"
    nested = 'sh -c \'"$0" -c "$1" & wait\' "$0" "$1" & wait'
    with subprocess.Popen(["sh", "-c", nested, sys.executable, compute], start_new_session=True) as shell:
        try:
            until = time.monotonic() + 20
            while (seen := look_at_descendants(shell.pid)) is None or seen.cpu_s < 0.2 or not seen.is_runnable:
                assert time.monotonic() < until, seen
                time.sleep(0.02)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
