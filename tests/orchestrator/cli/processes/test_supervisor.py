"""The process supervisor, with small real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import SetupError
from headrace_orchestrator.cli.processes.supervisor import Component, ProcessEvent, ProcessSupervisor, restart_delay_s

SLEEPER = [sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-S",
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)",
]


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Poll real processes, with a bound."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_child_that_dies_is_restarted_after_a_delay_that_doubles_up_to_a_bound(tmp_path: Path) -> None:
    now = 0.0
    events: list[ProcessEvent] = []
    with ProcessSupervisor(tmp_path, on_event=events.append, clock=lambda: now) as supervisor:
        first = supervisor.start(Component(name="sleeper", command=SLEEPER))
        os.kill(first, signal.SIGKILL)
        eventually(lambda: supervisor.pid("sleeper") is None, "the child is dead")

        supervisor.poll()
        assert supervisor.pid("sleeper") is None
        now = 0.49
        supervisor.poll()
        assert supervisor.pid("sleeper") is None
        now = 0.5
        supervisor.poll()

        second = supervisor.pid("sleeper")
        assert second not in (None, first)
        assert [event.what for event in events] == ["started", "restarting", "started"]
        assert events[1].detail == "ended by SIGKILL; starting again in 0.5 s"
    assert [restart_delay_s(deaths) for deaths in (1, 2, 3, 6, 7, 100)] == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0]


def test_a_child_that_ran_for_long_starts_over_with_the_first_delay(tmp_path: Path) -> None:
    now = 0.0
    events: list[ProcessEvent] = []
    with ProcessSupervisor(tmp_path, on_event=events.append, clock=lambda: now) as supervisor:
        for _ in range(2):
            pid = (
                supervisor.start(Component(name="sleeper", command=SLEEPER))
                if not events
                else supervisor.pid("sleeper")
            )
            assert pid is not None
            now += 31.0
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: supervisor.pid("sleeper") is None, "the child is dead")
            supervisor.poll()
            now += 0.5
            supervisor.poll()
    assert [event.detail for event in events if event.what == "restarting"] == [
        "ended by SIGKILL; starting again in 0.5 s"
    ] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_children_die_with_their_parent_however_it_dies_on_linux(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from headrace_orchestrator.cli.processes.supervisor import Component, ProcessSupervisor
supervisor = ProcessSupervisor(Path({str(tmp_path)!r}))
print(supervisor.start(Component(name="stubborn", command={STUBBORN!r})), flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent:
        child = int(parent.stdout.readline())
        log = tmp_path / "stubborn.log"
        eventually(lambda: log.exists() and "up" in log.read_text(), "the child is up")
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: has_ended(child), "the child died with its parent")


def test_stopping_sends_sigterm_first_and_kills_after_a_grace_period(tmp_path: Path) -> None:
    events: list[ProcessEvent] = []
    with ProcessSupervisor(tmp_path, on_event=events.append, grace_s=0.2) as supervisor:
        supervisor.start(Component(name="polite", command=SLEEPER))
        supervisor.start(Component(name="stubborn", command=STUBBORN))
        for name in ("polite", "stubborn"):
            eventually(lambda name=name: "up" in supervisor.log_file(name).read_text(), f"{name} is up")
    ended = {event.component: event.detail for event in events if event.what == "ended"}
    assert ended == {"polite": "ended by SIGTERM", "stubborn": "ended by SIGKILL"}


def test_later_stages_stop_before_earlier_ones(tmp_path: Path) -> None:
    events: list[ProcessEvent] = []
    with ProcessSupervisor(tmp_path, on_event=events.append) as supervisor:
        for stage, name in enumerate(["orchestrator", "policy", "worker"]):
            supervisor.start(Component(name=name, command=SLEEPER, stage=stage))
    assert [event.component for event in events if event.what == "ended"] == ["worker", "policy", "orchestrator"]


def test_a_component_that_cannot_start_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "raise SystemExit('the port is in use')"]
    with ProcessSupervisor(tmp_path) as supervisor:
        supervisor.start(Component(name="orchestrator", command=command))
        eventually(lambda: supervisor.pid("orchestrator") is None, "it ended")
        with pytest.raises(SetupError, match=r"exit code 1(?s:.*)the port is in use") as caught:
            supervisor.require("orchestrator")
    assert "orchestrator.log" in caught.value.hint


def test_each_childs_output_goes_to_its_own_file(tmp_path: Path) -> None:
    with ProcessSupervisor(tmp_path) as supervisor:
        for name in ("one", "two"):
            command = [sys.executable, "-S", "-c", f"import sys; print({name!r}); print('oh', file=sys.stderr)"]
            supervisor.start(Component(name=name, command=command, restart=False))
        for name in ("one", "two"):
            eventually(lambda name=name: supervisor.exit_code(name) == 0, f"{name} ended")
            assert sorted(supervisor.tail(name).split()) == sorted([name, "oh"])


def test_the_tail_of_a_log_begins_at_the_last_start(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text("an error of yesterday\n")
    with ProcessSupervisor(tmp_path) as supervisor:
        supervisor.start(Component(name="one", command=[sys.executable, "-S", "-c", "print('new')"], restart=False))
        eventually(lambda: supervisor.exit_code("one") == 0, "it ended")
        assert supervisor.tail("one") == "new"
