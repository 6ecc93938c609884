"""The process supervisor: runs components as child processes, and restarts them.

* A child that dies is restarted, after a delay that doubles up to a bound.
* A child that ran for long starts over with the first delay.
* Children die with their parent, however it dies (on Linux).
* Stopping sends SIGTERM first and kills after a grace period.
* Later stages stop before earlier ones.
* Each child's output goes to its own file.
* The tail of a log begins at the last start.

A supervisor belongs to the main thread: the kernel's parent-death signal follows the thread that started a child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Self

from headrace.errors import SetupError
from headrace.store.regular_files import open_to_append, open_to_read
from headrace_orchestrator.cli.processes import parent_guard

FIRST_RESTART_S = 0.5
"""Delay before the first restart."""

MAX_RESTART_S = 30.0
"""Longest delay before a restart: a repaired component should be back within half a minute."""

STEADY_S = 30.0
"""Running time after which a child starts over with the first delay."""

TAIL_CHARS = 1500
"""Number of characters of its log that an error quotes when a child cannot start."""

_POLL_S = 0.02
"""Interval between checks of stopping children."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """A process to run. ``environment`` is added to this process's own. Later stages stop first."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    stage: int = 0
    restart: bool = True


class ProcessEvent(NamedTuple):
    """A start or end of a component. ``detail``: its pid, or the way it ended."""

    component: str
    what: Literal["started", "ended", "restarting"]
    detail: str


@dataclass
class _Child:
    component: Component
    process: subprocess.Popen[bytes]
    started_at: float
    log_start: int
    deaths: int = 0
    restart_at: float | None = None


def restart_delay_s(deaths: int) -> float:
    """The delay before the next start after this number of consecutive deaths."""
    return min(MAX_RESTART_S, FIRST_RESTART_S * 2.0 ** min(deaths - 1, 16))


class ProcessSupervisor:
    """A set of children by name. As a context manager it stops them all at the end."""

    def __init__(
        self,
        logs: Path,
        *,
        on_event: Callable[[ProcessEvent], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = 10.0,
    ) -> None:
        self.logs = logs
        self.grace_s = grace_s
        self._on_event = on_event
        self._clock = clock
        self._children: dict[str, _Child] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, component: Component) -> int:
        """Start a component; returns its pid."""
        if component.name in self._children:
            raise SetupError(f"A component named {component.name!r} is already running.")
        log_start = self._log_size(component.name)
        child = _Child(component, self._spawn(component), self._clock(), log_start)
        self._children[component.name] = child
        self._on_event(ProcessEvent(component.name, "started", str(child.process.pid)))
        return child.process.pid

    def pid(self, name: str) -> int | None:
        """The pid of a component, or None while it is not running."""
        child = self._children.get(name)
        return child.process.pid if child and child.process.poll() is None else None

    def exit_code(self, name: str) -> int | None:
        """The exit code of a component that has ended, negative for a signal; None while it runs."""
        return self._children[name].process.poll()

    def log_file(self, name: str) -> Path:
        """The file of the component's output."""
        return self.logs / f"{name}.log"

    def poll(self) -> None:
        """Check for dead children, and restart those that are due. Call it several times a second."""
        now = self._clock()
        for child in self._children.values():
            if child.restart_at is not None:
                if now >= child.restart_at:
                    self._restart(child)
            elif (code := child.process.poll()) is not None and child.component.restart:
                self._schedule_restart(child, code, now)

    def require(self, name: str) -> None:
        """Raise SetupError, with the end of its log, if the component is not running."""
        if self.pid(name) is not None:
            return
        code = self.exit_code(name)
        raise SetupError(
            f"{name} ended while starting ({_exit_text(code)}). The end of its log:\n{self.tail(name)}",
            hint=f"Its log is {self.log_file(name)}.",
        )

    def tail(self, name: str) -> str:
        """The end of a component's log since its last start."""
        with open_to_read(self.log_file(name)) as log:
            log.seek(self._children[name].log_start)
            return log.read().decode(errors="replace")[-TAIL_CHARS:].strip()

    def stop(self, *names: str) -> None:
        """Send SIGTERM to these components, kill them after the grace period, and forget them."""
        stopping = [self._children.pop(name) for name in names if name in self._children]
        for child in stopping:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        while any(child.process.poll() is None for child in stopping) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for child in stopping:
            if child.process.poll() is None:
                child.process.kill()
            self._on_event(ProcessEvent(child.component.name, "ended", _exit_text(child.process.wait())))

    def close(self) -> None:
        """Stop all, later stages first."""
        for stage in sorted({child.component.stage for child in self._children.values()}, reverse=True):
            self.stop(*[name for name, child in self._children.items() if child.component.stage == stage])

    def _schedule_restart(self, child: _Child, code: int, now: float) -> None:
        child.deaths = 1 if now - child.started_at >= STEADY_S else child.deaths + 1
        delay = restart_delay_s(child.deaths)
        child.restart_at = now + delay
        self._on_event(
            ProcessEvent(child.component.name, "restarting", f"{_exit_text(code)}; starting again in {delay:g} s")
        )

    def _restart(self, child: _Child) -> None:
        child.log_start = self._log_size(child.component.name)
        child.process = self._spawn(child.component)
        child.started_at = self._clock()
        child.restart_at = None
        self._on_event(ProcessEvent(child.component.name, "started", str(child.process.pid)))

    def _log_size(self, name: str) -> int:
        file = self.log_file(name)
        return file.stat().st_size if file.exists() else 0

    def _spawn(self, component: Component) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", parent_guard.__file__, str(os.getpid()), *component.command]
        with open_to_append(self.log_file(component.name)) as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **component.environment},
                # With its own session, Ctrl-C in the terminal reaches only the parent, which stops all in order.
                start_new_session=True,
            )


def _exit_text(code: int | None) -> str:
    if code is None:
        return "still running"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}"
