"""The processes of the demo: an orchestrator, workers, tiny policies and learners, on free loopback ports.

* All processes end with the block, however it ends.
* An example that is not installed is named.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.client.sync_client import Client
from headrace.errors import SetupError
from headrace_orchestrator.cli.processes import components
from headrace_orchestrator.cli.processes.components import LEARNER_STAGE, await_answer, free_port
from headrace_orchestrator.cli.processes.supervisor import Component, ProcessSupervisor

WORKERS = 2
SLOTS = 16
"""Concurrent episodes of each worker: enough to keep two cores busy."""

GRACE_S = 5.0


class DemoService:
    """The demo's orchestrator, with its workers, policies and learners."""

    def __init__(self, data: Path, supervisor: ProcessSupervisor, sleep: Callable[[float], None]) -> None:
        self.supervisor = supervisor
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = Client(self.url, learner="demo", keepalive=False, retry_for_s=15.0)
        self._data = data
        self._sleep = sleep

    def start(self) -> None:
        """Start the orchestrator and its workers; returns when the orchestrator answers."""
        self.supervisor.start(components.orchestrator(self._data, host="127.0.0.1", port=self.port))
        await_answer(self.supervisor, "orchestrator", self.port, "/readyz", sleep=self._sleep)
        for number in range(WORKERS):
            name = f"worker-{number}"
            self.supervisor.start(components.worker(name, self.url, slots=SLOTS, policy_endpoint="", grace_s=0.0))

    def start_policy(self, name: str) -> str:
        """Start a new tiny policy at version 0.0; returns its address."""
        port = free_port()
        self.supervisor.start(components.tiny_policy(name, port))
        await_answer(self.supervisor, name, port, "/health", sleep=self._sleep)
        return f"http://127.0.0.1:{port}"

    def start_learner(self, name: str, *arguments: str) -> None:
        """Start the learner of the examples. If it fails it is not restarted: the demo prints its log."""
        command = [sys.executable, str(example("learner.py")), "--url", self.url, *arguments]
        self.supervisor.start(Component(name=name, command=command, stage=LEARNER_STAGE, restart=False))


@contextmanager
def demo_service(data: Path, sleep: Callable[[float], None]) -> Iterator[DemoService]:
    """Run the service for the length of the block."""
    with ProcessSupervisor(data / "logs", grace_s=GRACE_S) as supervisor:
        service = DemoService(data, supervisor, sleep)
        with service.client:
            service.start()
            yield service


def example(name: str) -> Path:
    """The path of an example: in the folder ``examples`` of a checkout, or inside the package of a wheel."""
    packaged = resources.files("headrace_orchestrator") / "_examples" / name
    checkout = Path(__file__).parents[4] / "examples" / name
    for path in (Path(str(packaged)), checkout):
        if path.is_file():
            return path
    raise SetupError(f"The example {name} is not installed.", hint="Install the wheel again, or run from a checkout.")


def example_json(name: str) -> dict[str, Any]:
    """Read an example that is JSON."""
    content: dict[str, Any] = json.loads(example(name).read_text())
    return content


class JsonLines:
    """The JSON lines of a file to which another process appends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Read the complete lines added since the last call, leaving out those that are not JSON objects."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            text = stream.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [entry for line in complete.splitlines() if (entry := _object(line)) is not None]


def _object(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"{"):
        return None
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return entry
