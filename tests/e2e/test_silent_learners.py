"""Learners that are closed or killed, against a real orchestrator: neither is said to train or to wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Client
from headrace.wire.messages import RunStatus
from tests.e2e.processes import Processes, answers, free_port, wait_for

LEARNER = """
import sys
import headrace.client.sync_client, headrace.client.leases

headrace.client.sync_client.HEARTBEAT_S = headrace.client.leases.HEARTBEAT_S = 0.2
with headrace.client.sync_client.Client(sys.argv[1]) as client:
    client.doing("run", "training")
    try:
        client.pull("run", timeout_s=float(sys.argv[2]))
    except headrace.errors.NothingToServe:
        pass
    if sys.argv[3] == "stay":
        sys.stdin.read()
"""
"""A learner with short heartbeats: address, seconds of its pull, and whether it stays or closes its client."""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path / "logs") as running:
        yield running


@pytest.fixture
def url(processes: Processes, tmp_path: Path) -> str:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    processes.orchestrator(tmp_path / "data", port).start()
    wait_for("the orchestrator answers", lambda: answers(url + "/readyz"))
    with Client(url) as client:
        client.create_run({"name": "run", "environments": [{"id": "math:Arithmetic-v0"}]})
    return url


def status(url: str) -> RunStatus:
    with Client(url) as client:
        return client.run("run")


def test_a_learner_that_closes_its_client_is_gone_at_once(processes: Processes, url: str) -> None:
    processes.add("learner", "-c", LEARNER, url, "0.1", "close").start()
    wait_for("it is gone", lambda: status(url).learner_doing == "gone")
    assert not status(url).learner_waiting


def test_a_learner_that_is_killed_while_it_waits_does_not_wait_and_is_silent_soon(
    processes: Processes, url: str
) -> None:
    learner = processes.add("learner", "-c", LEARNER, url, "600", "stay").start()
    wait_for("it waits", lambda: status(url).learner_waiting)
    learner.kill()
    wait_for("it does not wait any more", lambda: not status(url).learner_waiting)
    wait_for("it is silent", lambda: status(url).learner_silent)
    found = status(url)
    assert found.learner_doing != "waiting"
    assert found.learner_heard_s > 0.6
