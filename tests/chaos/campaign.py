"""Kills without end: orchestrator, workers and a learner of one run, each dying again and again while all of them work.

* Phases take turns, and one that was not come to takes another. One that was left out all the same is a finding, and
  so are too few kills.
* A process that does not come to its point in time is killed where it is, and counts as "at any moment"; the next one
  has less to do and more time. Time is what the orchestrator serves: how long it takes to start is the machine's.
* With an orchestrator's death the power may be cut: then its disk forgets what was not synced.
* An orchestrator that lost the process that writes its log says so in a typed error, and is then killed.
* What was acknowledged is seen by a proxy in front of the service, and held against what is there at the end.
* A process that ends by itself, or meets an error that it has no part in, is a finding too.
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
from headrace.errors import HeadraceError, StoreError, Unavailable
from tests.chaos import roles
from tests.chaos.checker import Findings, check
from tests.chaos.disk import REACHED, cut_power, note_all
from tests.chaos.logwriter import LOST
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
"""A process that has not come to its point by then, in time that was served, is killed where it is."""

STOPPING_S = 60.0
"""For an orchestrator to say that nobody writes its log any more; only one that does not takes so long."""

ENDING_S = 60.0
"""For the end of the run once the kills are over."""

SAY_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Course:
    """What is to happen. ``phases`` by role: those that its processes die in; a role without is left alone."""

    kills: int
    seed: int = 0
    phases: dict[str, Sequence[str]] = field(default_factory=lambda: dict(PHASES))
    any_moment: float = 0.2
    """Share of lives that end at any moment."""
    cuts: float = 0.6
    """Share of the orchestrator's deaths that are power cuts."""
    reached: Sequence[float] = REACHED
    """Of each of them, as ``cut_power`` takes it."""
    sync_s: Sequence[float] = (0.0, 0.0, 0.002, 0.01)
    """How long a sync lasts; one of these a life."""
    refusals: float = 0.2
    """Share of the orchestrator's lives in which its disk refuses for a moment."""
    pace: float = 1.0
    """Deaths come after this share of the usual passes, and lives last as much longer where it is above 1."""
    log_file_bytes: int = 128 << 10
    """Size of the log's files: small ones are rotated often."""
    mutant: str = ""
    within_s: float = 480.0


class Served:
    """Time in which the orchestrator answers requests. ``look`` is to be called often."""

    def __init__(self, ready: Path) -> None:
        self._ready = ready
        self._looked_at = time.monotonic()
        self._seconds = 0.0

    def look(self) -> None:
        before, self._looked_at = self._looked_at, time.monotonic()
        if self._ready.exists():
            self._seconds += self._looked_at - before

    def seconds(self) -> float:
        return self._seconds


class Actor:
    """A process of one role, started again whenever it dies."""

    def __init__(self, role: str, plan: Plan, course: Course, chance: random.Random, served: Served) -> None:
        self.role = role
        self._plan, self._course, self._chance, self._served = plan, course, chance, served
        phases = list(course.phases.get(role, ()))
        chance.shuffle(phases)
        self._turns = deque((phase, 0) for phase in phases)
        self._child: ForkServerProcess | None = None
        self._phase, self._misses = "", 0
        self._clock, self._ends_at = time.monotonic, float("inf")
        self._saw_loss = False
        self.is_cut = False
        """Whether the power goes with it."""

    def start(self, *, armed: bool = True) -> None:
        """Start it; ``armed``: with a point to die at, if its role has any."""
        plan = replace(self._plan, seed=self._chance.getrandbits(32))
        self._phase, self._ends_at = "", float("inf")
        if armed and self._turns:
            plan = self._armed(plan)
        if self.role == "orchestrator":
            refuses = armed and self._chance.random() < self._course.refusals
            refuses_at = self._chance.randint(5, 50) if refuses else 0
            self.is_cut = armed and self._chance.random() < self._course.cuts
            sync_s = self._chance.choice(self._course.sync_s)
            plan = replace(plan, sync_s=sync_s, refuses_at=refuses_at, is_cut=self.is_cut)
            plan.lost.unlink(missing_ok=True)
            plan.ready.unlink(missing_ok=True)
            self._saw_loss = False
        context = multiprocessing.get_context("forkserver")
        self._child = context.Process(target=roles.ROLES[self.role], args=(plan,), daemon=True, name=plan.name)
        self._child.start()

    def _armed(self, plan: Plan) -> Plan:
        if self._chance.random() < self._course.any_moment:
            self._phase = ANY_MOMENT
            self._live(self._chance.uniform(0.05, LIFE_S / 2), time.monotonic)
            return plan
        self._phase, self._misses = self._turns.popleft()
        self._live(LIFE_S * max(1.0, self._course.pace) * 2**self._misses, self._served.seconds)
        most = max(1, round(PHASES[self.role][self._phase] * self._course.pace / 4**self._misses))
        return replace(plan, phase=self._phase, passes=self._chance.randint(1, most))

    def _live(self, seconds: float, clock: Callable[[], float]) -> None:
        """No longer than so many seconds from now."""
        self._clock, self._ends_at = clock, clock() + seconds

    def died(self) -> str:
        """The phase that it died in, or nothing while it lives. One that lives too long is killed."""
        assert self._child is not None
        if self._child.is_alive() and not self._says_that_it_lost_its_writer():
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

    def _says_that_it_lost_its_writer(self) -> bool:
        if not self.has_lost_its_writer:
            return False
        if not self._saw_loss:
            self._saw_loss = True
            self._live(STOPPING_S, time.monotonic)
        with Client(f"http://127.0.0.1:{self._plan.port}", keepalive=False, retry_for_s=0) as client:
            try:
                client.pull("run", timeout_s=0)
            except (StoreError, Unavailable) as error:
                return "the process that writes the log ended" in error.detail
            except HeadraceError:
                pass
        return False

    @property
    def has_lost_its_writer(self) -> bool:
        """Whether the process that writes its log was killed alone."""
        return self._phase == LOST and self._plan.lost.exists()

    @property
    def kept_silent(self) -> bool:
        """Whether it lost its writer and was asked in time; the writer may also die while it is killed itself."""
        return self.has_lost_its_writer and self._saw_loss

    @property
    def exit_code(self) -> int:
        """That of a process that died."""
        assert self._child is not None
        assert self._child.exitcode is not None
        return self._child.exitcode

    def end(self, *, gently: bool = False) -> None:
        """SIGTERM or SIGKILL, and its end."""
        if self._child is None or not self._child.is_alive():
            return
        if gently:
            self._child.terminate()
            self._child.join(10)
        self._child.kill()
        self._child.join()


@dataclass
class Report:
    """What a campaign did and found."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By role and phase."""
    cuts: int = 0
    cut_names: int = 0
    cut_bytes: int = 0
    findings: Findings = field(default_factory=Findings)
    duration_s: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.kills.values())


class Campaign:
    """``run`` once. ``say`` is told how far it is."""

    def __init__(self, folder: Path, course: Course, say: Callable[[str], None] = lambda line: None) -> None:
        self.folder = folder
        self.report = Report()
        self._course, self._say = course, say
        self._chance = random.Random(course.seed)
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._plan = Plan(
            folder=folder, url=self._url, port=port, log_file_bytes=course.log_file_bytes, mutant=course.mutant
        )
        self._served = Served(self._plan.ready)
        self._surprises: list[str] = []

    def run(self) -> Report:
        """Kill, let it end in order, check."""
        begun = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        multiprocessing.set_forkserver_preload(["tests.chaos.roles"])
        with Recorder(self._url) as recorder:
            actors = self._actors(recorder.url)
            try:
                self._begin(actors[0])
                for actor in actors[1:]:
                    actor.start()
                self._crash(actors, begun + self._course.within_s)
                self._finish(actors, recorder)
            finally:
                for actor in actors:
                    actor.end()
        self.report.findings.wrong += self._surprises + self._too_few() + self._left_out()
        self.report.duration_s = time.monotonic() - begun
        return self.report

    def _actors(self, url: str) -> list[Actor]:
        plan = replace(self._plan, url=url)
        names = {"orchestrator": ["orchestrator"], "worker": ["worker-0", "worker-1"], "learner": ["learner"]}
        return [
            Actor(role, replace(plan, name=name), self._course, self._chance, self._served)
            for role in names
            for name in names[role]
        ]

    def _begin(self, orchestrator: Actor) -> None:
        orchestrator.start(armed=False)
        wait_for("the orchestrator is ready", lambda: answers(f"{self._url}/readyz"))
        with Client(self._url, keepalive=False) as client:
            client.create_run(SPEC)
        # The run itself is safe, whatever the fault of a mutant: without it nothing would show.
        orchestrator.end(gently=True)
        note_all(self.folder / "data", self.folder / "vault")
        orchestrator.start()

    def _crash(self, actors: Sequence[Actor], deadline: float) -> None:
        said = time.monotonic()
        while (self.report.total < self._course.kills or self._left_out()) and time.monotonic() < deadline:
            self._served.look()
            for actor in actors:
                if phase := actor.died():
                    self._note(actor, phase)
                    actor.start()
            time.sleep(0.005)
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                self._say(f"{self.report.total} of {self._course.kills} kills, {self.report.cuts} power cuts")

    def _too_few(self) -> list[str]:
        """That time ran out before the kills were done."""
        if self.report.total >= self._course.kills:
            return []
        return [f"only {self.report.total} of {self._course.kills} kills within {self._course.within_s:g} s"]

    def _left_out(self) -> list[str]:
        """Phases that no process has died in."""
        wanted = [(role, phase) for role, phases in self._course.phases.items() for phase in phases]
        return [f"no {role} died while {phase}" for role, phase in wanted if not self.report.kills[role, phase]]

    def _note(self, actor: Actor, phase: str) -> None:
        if actor.kept_silent and phase == ANY_MOMENT:
            self._surprises.append("an orchestrator without the process that writes its log did not say so")
        stopped = actor.has_lost_its_writer and actor.exit_code == roles.STOPPED
        if actor.exit_code != -signal.SIGKILL and phase != "closing" and not stopped:
            self._surprises.append(f"{actor.role} ended by itself with {actor.exit_code} while {phase}")
        self.report.kills[actor.role, phase] += 1
        if actor.is_cut:
            self._cut()

    def _cut(self) -> None:
        cut = cut_power(self.folder / "data", self.folder / "vault", self._chance, self._course.reached)
        self.report.cuts += 1
        self.report.cut_names += cut.names
        self.report.cut_bytes += cut.size_bytes

    def _finish(self, actors: Sequence[Actor], recorder: Recorder) -> None:
        """One more death, then a life without: everything that is out comes to its end."""
        orchestrator, *others = actors
        for actor in others:
            actor.end()
        orchestrator.end()
        if self._course.cuts:
            self._cut()
        orchestrator.start(armed=False)
        wait_for("the orchestrator is ready", lambda: answers(f"{self._url}/readyz"))
        try:
            with Client(self._url, keepalive=False) as client:
                client.close_run("run")
                wait_for("nothing is out", lambda: client.run("run").leased + client.run("run").queued == 0, ENDING_S)
            self.report.findings = check(self._url, "run", self.folder / "data", recorder.seen)
        except HeadraceError as error:
            self._surprises.append(f"the service cannot be checked, {error.code}: {error.detail}")
        surprises = self.folder / "surprises"
        if surprises.exists():
            self._surprises += surprises.read_text().splitlines()
        orchestrator.end(gently=True)
