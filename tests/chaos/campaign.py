"""A campaign of kills: orchestrator, workers and a learner of one run, each killed repeatedly while all of them work.

* Phases take turns; a phase that was not reached is tried again. A phase without a kill is a violation, and so are too
  few kills.
* A process that does not reach its crash point in time is killed anyway, and counts as "at any moment"; the next one
  needs fewer passes and gets more time. Only time in which the orchestrator serves counts, not that of its starts.
* The death of an orchestrator may be a power cut: then its disk loses unsynced data.
* An orchestrator that lost its log writer tells its clients in a typed error, and ends by itself with a status.
* A proxy in front of the service records everything that is acknowledged; at the end that is compared with the store.
* A process that ends on its own, or gets an unexpected error, is a violation too.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from headrace import Client
from headrace.errors import HeadraceError
from tests.chaos import roles
from tests.chaos.checker import Findings, check
from tests.chaos.disk import SURVIVING_SHARES, cut_power, mark_all_synced
from tests.chaos.listener import SPEC as QUIET_SPEC
from tests.chaos.listener import LossListener
from tests.chaos.log_writer import LOST
from tests.chaos.plan import Plan
from tests.chaos.roles import PHASES
from tests.e2e.processes import answers, free_port, wait_for
from tests.e2e.recorder import Recorder

ANY_MOMENT = "at any moment"

SPEC: dict[str, Any] = {
    "name": "run",
    "environments": [{"id": "math:Arithmetic-v0"}, {"id": "chaos:Picture"}],
    "group_size": 2,
    "batch_size": 16,
    "max_staleness": 3,
    "attempt_lease_s": 2.0,
    "batch_lease_s": 3.0,
    "sampling": {"max_tokens": 512},
    "limits": {"max_turns": 4},
}

LIFE_S = 3.0
"""Seconds of serving time after which a process that has not reached its crash point is killed."""

LOSS_S = 60.0
"""Seconds for an orchestrator to end after the loss of its log writer; only a faulty one takes as long."""

TOLD_LOSSES = 3
"""Losses of the log writer of which a waiting client must have been told at least once. It may miss one: a start has
no clients yet."""

FINISH_S = 60.0
"""Seconds for the end of the run after the kills."""

PROGRESS_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class CampaignSettings:
    """Settings of a campaign. ``phases``: by role, the phases in which processes die; other roles are not killed."""

    kills: int
    seed: int = 0
    phases: dict[str, Sequence[str]] = field(default_factory=lambda: dict(PHASES))
    any_moment: float = 0.2
    """Share of processes that are killed at any moment."""
    cuts: float = 0.6
    """Share of the orchestrator's deaths that are power cuts."""
    surviving_shares: Sequence[float] = SURVIVING_SHARES
    """See ``cut_power``."""
    sync_s: Sequence[float] = (0.0, 0.0, 0.002, 0.01)
    """Durations of a sync; each orchestrator gets one of these."""
    disk_failures: float = 0.2
    """Share of orchestrators whose disk fails for a moment."""
    pace: float = 1.0
    """Factor of the usual number of passes before a kill, and, above 1, of the time for them."""
    log_file_bytes: int = 128 << 10
    """Size of the log's files; small files are rotated often."""
    fault: str = ""
    within_s: float = 480.0


class ServingClock:
    """A clock that runs while the orchestrator answers requests. Call ``update`` often."""

    def __init__(self, ready: Path) -> None:
        self._ready = ready
        self._updated_at = time.monotonic()
        self._seconds = 0.0

    def update(self) -> None:
        before, self._updated_at = self._updated_at, time.monotonic()
        if self._ready.exists():
            self._seconds += self._updated_at - before

    def seconds(self) -> float:
        return self._seconds


class RoleProcess:
    """A process of one role, which is restarted whenever it dies."""

    def __init__(
        self, role: str, plan: Plan, settings: CampaignSettings, chance: random.Random, serving: ServingClock
    ) -> None:
        self.role = role
        self._plan, self._settings, self._chance, self._serving = plan, settings, chance, serving
        phases = list(settings.phases.get(role, ()))
        chance.shuffle(phases)
        self._turns = deque((phase, 0) for phase in phases)
        self._child: ForkServerProcess | None = None
        self._phase, self._misses = "", 0
        self._clock, self._ends_at = time.monotonic, float("inf")
        self._saw_loss = False
        self.is_cut = False
        """Whether its death is a power cut."""

    def start(self, *, armed: bool = True) -> None:
        """Start the process; ``armed``: with a crash point, if its role has any."""
        plan = replace(self._plan, seed=self._chance.getrandbits(32))
        self._phase, self._ends_at = "", float("inf")
        if armed and self._turns:
            plan = self._armed(plan)
        if self.role == "orchestrator":
            fails = armed and self._chance.random() < self._settings.disk_failures
            fails_at = self._chance.randint(5, 50) if fails else 0
            self.is_cut = armed and self._chance.random() < self._settings.cuts
            sync_s = self._chance.choice(self._settings.sync_s)
            plan = replace(plan, sync_s=sync_s, fails_at=fails_at, is_cut=self.is_cut)
            plan.lost.unlink(missing_ok=True)
            plan.ready.unlink(missing_ok=True)
            self._saw_loss = False
        context = multiprocessing.get_context("forkserver")
        self._child = context.Process(target=roles.ROLES[self.role], args=(plan,), daemon=True, name=plan.name)
        self._child.start()

    def _armed(self, plan: Plan) -> Plan:
        if self._chance.random() < self._settings.any_moment:
            self._phase = ANY_MOMENT
            self._set_lifetime(self._chance.uniform(0.05, LIFE_S / 2), time.monotonic)
            return plan
        self._phase, self._misses = self._turns.popleft()
        self._set_lifetime(LIFE_S * max(1.0, self._settings.pace) * 2**self._misses, self._serving.seconds)
        most = max(1, round(PHASES[self.role][self._phase] * self._settings.pace / 4**self._misses))
        return replace(plan, phase=self._phase, passes=self._chance.randint(1, most))

    def _set_lifetime(self, seconds: float, clock: Callable[[], float]) -> None:
        """Let the process live at most this many seconds from now."""
        self._clock, self._ends_at = clock, clock() + seconds

    def death_phase(self) -> str:
        """The phase in which the process died; empty while it lives. One that lives too long is killed."""
        assert self._child is not None
        if self._child.is_alive():
            self._allow_time_to_end()
            if self._clock() < self._ends_at:
                return ""
            self.end()
            if self._phase != ANY_MOMENT:
                self._turns.appendleft((self._phase, self._misses + 1))
            return ANY_MOMENT
        self.end()
        if self._phase != ANY_MOMENT:
            self._turns.append((self._phase, 0))
        return self._phase

    def _allow_time_to_end(self) -> None:
        """Let an orchestrator that lost its log writer end by itself."""
        if self.has_lost_its_writer and not self._saw_loss:
            self._saw_loss = True
            self._set_lifetime(LOSS_S, time.monotonic)

    @property
    def has_lost_its_writer(self) -> bool:
        """Whether its log writer was killed alone."""
        return self._phase == LOST and self._plan.lost.exists()

    @property
    def survived_loss(self) -> bool:
        """True if it lost its writer and was seen alive after that; the writer may also die while it is killed."""
        return self.has_lost_its_writer and self._saw_loss

    @property
    def exit_code(self) -> int:
        """The exit code of a process that died."""
        assert self._child is not None
        assert self._child.exitcode is not None
        return self._child.exitcode

    def end(self, *, gracefully: bool = False) -> None:
        """Send SIGTERM or SIGKILL, and wait for the end."""
        if self._child is None or not self._child.is_alive():
            return
        if gracefully:
            self._child.terminate()
            self._child.join(10)
        self._child.kill()
        self._child.join()


@dataclass
class Report:
    """The kills and findings of a campaign."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By role and phase."""
    cuts: int = 0
    cut_names: int = 0
    cut_bytes: int = 0
    told_losses: int = 0
    """Number of times that a waiting client was told of the loss of the log writer."""
    findings: Findings = field(default_factory=Findings)
    duration_s: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.kills.values())


class Campaign:
    """A campaign; call ``run`` once. ``on_progress`` is called with lines of text."""

    def __init__(
        self, folder: Path, settings: CampaignSettings, on_progress: Callable[[str], None] = lambda line: None
    ) -> None:
        self.folder = folder
        self.report = Report()
        self._settings, self._on_progress = settings, on_progress
        self._chance = random.Random(settings.seed)
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._plan = Plan(
            folder=folder, url=self._url, port=port, log_file_bytes=settings.log_file_bytes, fault=settings.fault
        )
        self._serving = ServingClock(self._plan.ready)
        self._unexpected: list[str] = []

    def run(self) -> Report:
        """Kill processes, end the run gracefully, and check."""
        begun = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        multiprocessing.set_forkserver_preload(["tests.chaos.roles"])
        with Recorder(self._url) as recorder:
            processes = self._processes(recorder.url)
            try:
                self._begin(processes[0])
                for process in processes[1:]:
                    process.start()
                with LossListener(self._url) as listener:
                    self._crash(processes, begun + self._settings.within_s)
                self.report.told_losses = listener.losses
                self._finish(processes, recorder)
            finally:
                for process in processes:
                    process.end()
        missing = self._too_few() + self._missing_phases() + self._untold_losses()
        self.report.findings.violations += self._unexpected + missing
        self.report.duration_s = time.monotonic() - begun
        return self.report

    def _processes(self, url: str) -> list[RoleProcess]:
        plan = replace(self._plan, url=url)
        names = {"orchestrator": ["orchestrator"], "worker": ["worker-0", "worker-1"], "learner": ["learner"]}
        return [
            RoleProcess(role, replace(plan, name=name), self._settings, self._chance, self._serving)
            for role in names
            for name in names[role]
        ]

    def _begin(self, orchestrator: RoleProcess) -> None:
        orchestrator.start(armed=False)
        wait_for("the orchestrator is ready", lambda: answers(f"{self._url}/readyz"))
        with Client(self._url, keepalive=False) as client:
            client.create_run(SPEC)
            client.create_run(QUIET_SPEC)
        # The run itself is durable, whatever the fault: without a run no violation could show.
        orchestrator.end(gracefully=True)
        mark_all_synced(self.folder / "data", self.folder / "synced")
        orchestrator.start()

    def _crash(self, processes: Sequence[RoleProcess], deadline: float) -> None:
        progress_at = time.monotonic()
        while (self.report.total < self._settings.kills or self._missing_phases()) and time.monotonic() < deadline:
            self._serving.update()
            for process in processes:
                if phase := process.death_phase():
                    self._record_kill(process, phase)
                    process.start()
            time.sleep(0.005)
            if time.monotonic() - progress_at > PROGRESS_EVERY_S:
                progress_at = time.monotonic()
                self._on_progress(f"{self.report.total} of {self._settings.kills} kills, {self.report.cuts} power cuts")

    def _too_few(self) -> list[str]:
        """The violation if time ran out before all kills."""
        if self.report.total >= self._settings.kills:
            return []
        return [f"only {self.report.total} of {self._settings.kills} kills within {self._settings.within_s:g} s"]

    def _missing_phases(self) -> list[str]:
        """Violations for phases in which no process died."""
        phases = [(role, phase) for role, names in self._settings.phases.items() for phase in names]
        return [f"no {role} died while {phase}" for role, phase in phases if not self.report.kills[role, phase]]

    def _untold_losses(self) -> list[str]:
        """The violation if no waiting client was told of several losses of the log writer."""
        losses = self.report.kills["orchestrator", LOST]
        if losses < TOLD_LOSSES or self.report.told_losses:
            return []
        return [f"no client was told of {losses} losses of the log writer"]

    def _record_kill(self, process: RoleProcess, phase: str) -> None:
        if process.survived_loss and phase == ANY_MOMENT:
            self._unexpected.append("an orchestrator did not end after the loss of its log writer")
        stopped = process.has_lost_its_writer and process.exit_code == roles.STOPPED
        if process.exit_code != -signal.SIGKILL and phase != "closing" and not stopped:
            self._unexpected.append(f"{process.role} ended unexpectedly with {process.exit_code} while {phase}")
        self.report.kills[process.role, phase] += 1
        if process.is_cut:
            self._cut()

    def _cut(self) -> None:
        cut = cut_power(self.folder / "data", self.folder / "synced", self._chance, self._settings.surviving_shares)
        self.report.cuts += 1
        self.report.cut_names += cut.names
        self.report.cut_bytes += cut.size_bytes

    def _finish(self, processes: Sequence[RoleProcess], recorder: Recorder) -> None:
        """Kill the orchestrator once more, then start it without a crash point until all episodes are over."""
        orchestrator, *others = processes
        for process in others:
            process.end()
        orchestrator.end()
        if self._settings.cuts:
            self._cut()
        orchestrator.start(armed=False)
        wait_for("the orchestrator is ready", lambda: answers(f"{self._url}/readyz"))
        try:
            with Client(self._url, keepalive=False) as client:
                client.close_run("run")
                wait_for(
                    "no episode is left", lambda: client.run("run").leased + client.run("run").queued == 0, FINISH_S
                )
            self.report.findings = check(self._url, "run", self.folder / "data", recorder.acknowledged)
        except HeadraceError as error:
            self._unexpected.append(f"the service cannot be checked, {error.code}: {error.detail}")
        unexpected_file = self.folder / "unexpected-errors"
        if unexpected_file.exists():
            self._unexpected += unexpected_file.read_text().splitlines()
        orchestrator.end(gracefully=True)
