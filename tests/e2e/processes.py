"""Real processes for end-to-end tests: started, killed, restarted and cleaned up by pid."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]

START_S = 60.0
"""Seconds in which a process must answer. Its imports take a second, or half a minute on a busy machine."""


class Process:
    """One child process, by default of this interpreter, whose output goes to a file."""

    def __init__(
        self, name: str, folder: Path, *command: str, python: str = sys.executable, **environment: str
    ) -> None:
        self.name, self.folder, self.environment = name, folder, environment
        self.command = [python, *command]
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self) -> Process:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
            )
        return self

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.poll()

    def kill(self) -> None:
        """Send SIGKILL, as a crash would, and wait for the end."""
        self.end(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the running process, such as one that stops it."""
        assert self._child is not None
        self._child.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 40.0) -> int:
        """Send the signal and wait for the end. A process that does not end is killed, and the test fails."""
        if self._child is None:
            return 0
        if self._child.poll() is None:
            self._child.send_signal(number)
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(10)
            raise AssertionError(f"{self.name} did not end within {timeout_s} s:\n{self.tail()}") from None

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


class Processes:
    """All processes of a test. They are killed at the end; if the test fails, their logs are shown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Process] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for process in reversed(self.all):
            process.kill()
        if error is not None:
            for process in self.all:
                error.add_note(f"--- {process.name} (exit {process.exit_code})\n{process.tail()}")

    def add(self, name: str, *command: str, python: str = sys.executable, **environment: str) -> Process:
        process = Process(name, self.folder, *command, python=python, **environment)
        self.all.append(process)
        return process

    def orchestrator(self, data: Path, port: int) -> Process:
        return self.add(
            "orchestrator", "-m", "headrace_orchestrator.cli", "orchestrator", "--data", str(data), "--port", str(port)
        )

    def worker(self, name: str, url: str, policy: str, *arguments: str, slots: int = 8, **environment: str) -> Process:
        return self.add(
            name,
            *("-m", "headrace_workers", "--orchestrator", url, "--name", name),
            *("--slots", str(slots), "--policy-endpoint", policy),
            *arguments,
            **environment,
        )

    def tiny_policy(self, port: int, *, model: str = "policy") -> Process:
        return self.add(f"tiny-{model}", "-m", "headrace_workers.tiny_policy", "--port", str(port), "--model", model)


def free_port() -> int:
    """A loopback port that is free now. It is fixed, so that clients find a restarted process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(
    description: str, condition: Callable[[], bool], timeout_s: float = START_S, *, every_s: float = 0.05
) -> None:
    """Poll until the condition holds; fail with its description after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {description}"
        time.sleep(every_s)


def answers(url: str) -> bool:
    """Return whether a GET is answered with 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
