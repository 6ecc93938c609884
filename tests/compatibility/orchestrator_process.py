"""A process of ``headrace orchestrator`` on a data directory."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.processes import Processes, answers, free_port, wait_for

HEADRACE = Path(sys.executable).with_name("headrace")
"""The command in this environment."""


class Orchestrator:
    """``headrace orchestrator``; it has the same address after a restart."""

    def __init__(self, processes: Processes, data: Path, *arguments: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = ("orchestrator", "--data", str(data), "--port", str(port), *arguments)
        self._process = processes.add(f"orchestrator-{port}", *command, python=str(HEADRACE))

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._process.start()
        wait_for("the orchestrator is ready", lambda: answers(f"{self.url}/readyz"))

    def kill(self) -> None:
        """Kill it, as a crash would."""
        self._process.kill()

    def end(self) -> None:
        """End it gracefully."""
        assert self._process.end() == 0, self._process.tail()
