"""A service of real processes for end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.processes import Process, Processes, answers, free_port, wait_for


class Service(NamedTuple):
    """A running orchestrator and tiny policy; tests add workers and learners."""

    processes: Processes
    orchestrator: Process
    url: str
    policy: str
    data: Path

    def restart(self) -> None:
        """Start the orchestrator again and wait until it is ready."""
        self.orchestrator.start()
        wait_for("the orchestrator is ready", lambda: answers(f"{self.url}/readyz"))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    port, policy_port = free_port(), free_port()
    url, policy = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{policy_port}"
    with Processes(tmp_path / "logs") as processes:
        processes.tiny_policy(policy_port).start()
        service = Service(processes, processes.orchestrator(tmp_path / "data", port), url, policy, tmp_path / "data")
        service.restart()
        wait_for("the policy is ready", lambda: answers(f"{policy}/health"))
        yield service
