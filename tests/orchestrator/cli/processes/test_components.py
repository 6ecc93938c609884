"""The command lines of components, and the checks that they are ready."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import PortInUse, SetupError
from headrace_orchestrator.cli.processes import components
from headrace_orchestrator.cli.processes.supervisor import Component, ProcessSupervisor
from tests.sdk.client.stub_server import StubServer, ok, page

SLEEPER = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


def test_workers_stop_before_policies_and_policies_before_the_orchestrator(tmp_path: Path) -> None:
    orchestrator = components.orchestrator(tmp_path, host="127.0.0.1", port=1)
    policy = components.tiny_policy("tiny-policy", 2)
    worker = components.worker("worker-0", "http://127.0.0.1:1", slots=4, policy_endpoint="", grace_s=1.0)
    assert orchestrator.stage < policy.stage < worker.stage < components.LEARNER_STAGE


def test_a_workers_token_is_in_its_environment_and_in_no_command_line() -> None:
    worker = components.worker(
        "worker-0", "http://127.0.0.1:1", slots=4, policy_endpoint="http://127.0.0.1:2", grace_s=1.0, token="sesame"
    )
    assert worker.environment["HEADRACE_TOKEN"] == "sesame"
    assert "sesame" not in " ".join(worker.command)
    assert worker.command[-2:] == ["--policy-endpoint", "http://127.0.0.1:2"]


def test_a_component_is_ready_when_it_answers(tmp_path: Path, stub: StubServer) -> None:
    stub.on("GET /readyz", page(503), page(503), ok({"epoch": 1}))
    port = int(stub.url.rpartition(":")[2])
    with ProcessSupervisor(tmp_path) as supervisor:
        supervisor.start(Component(name="orchestrator", command=SLEEPER))
        components.await_answer(supervisor, "orchestrator", port, "/readyz", sleep=lambda seconds: None)
    assert len(stub.requests) == 3


def test_a_component_that_does_not_answer_in_time_is_an_error(tmp_path: Path) -> None:
    clock = iter(range(1000))
    with ProcessSupervisor(tmp_path) as supervisor:
        supervisor.start(Component(name="orchestrator", command=SLEEPER))
        with pytest.raises(SetupError, match=r"did not answer at 127\.0\.0\.1:1/readyz within 5 s"):
            components.await_answer(
                supervisor,
                "orchestrator",
                1,
                "/readyz",
                timeout_s=5.0,
                clock=lambda: float(next(clock)),
                sleep=lambda seconds: None,
            )


def test_a_port_of_another_process_is_refused_before_anything_starts(stub: StubServer) -> None:
    with pytest.raises(PortInUse, match="is in use by another process"):
        components.require_free("127.0.0.1", int(stub.url.rpartition(":")[2]))
    components.require_free("127.0.0.1", components.free_port())
