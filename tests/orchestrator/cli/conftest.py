from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.wire import messages
from headrace_orchestrator.cli.app import cli
from tests.sdk.client.stub_server import StubServer

Headrace = Callable[..., Result]


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as running:
        yield running


@pytest.fixture
def headrace(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> Headrace:
    """Runs the command line against the stub, with output piped."""
    monkeypatch.setenv("HEADRACE_URL", stub.url)
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)

    def call(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(cli, list(arguments), prog_name="headrace", **options)

    return call


def run_status(**fields: Any) -> messages.RunStatus:
    defaults: dict[str, Any] = {
        "name": "guess",
        "state": "active",
        "version": "0.3",
        "spec": {"name": "guess", "estimator": {"gamma": 0.5}},
        "groups": messages.GroupCounts(open=2),
        "credit": 1,
        "in_flight": 7,
        "queued": 3,
        "leased": 4,
        "episodes": {"finished": 20, "truncated": 2, "failed": 1},
        "batches_acked": 3,
        "batches_open": 0,
        "learner_doing": "training",
        "learner_doing_s": 12.0,
        "learner_waiting": False,
        "reasons": [],
        "mean_reward": 0.625,
    }
    return messages.RunStatus(**{**defaults, **fields})


def waiting_run() -> messages.RunStatus:
    reasons = [messages.Reason(code="no-workers", message="No worker of pool default is there.")]
    return run_status(learner_waiting=True, learner_doing="waiting", reasons=reasons)


def service_status(**fields: Any) -> messages.ServiceStatus:
    worker = messages.WorkerStatus(
        worker="w1", pool="default", capabilities=[], slots=8, leased=3, seen_s=0.5, draining=False
    )
    defaults: dict[str, Any] = {
        "epoch": 2,
        "version": "0.0.1",
        "uptime_s": 90.0,
        "runs": [waiting_run()],
        "workers": [worker],
        "store": {},
    }
    return messages.ServiceStatus(**{**defaults, **fields})
