"""Every process is killed during a run, and nothing that was acknowledged is lost or duplicated.

Orchestrator, worker, policy and learner are real processes that talk HTTP over loopback; each kill is SIGKILL.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace import Client
from headrace.errors import HeadraceError
from tests.e2e.checker import Findings, check
from tests.e2e.processes import ROOT, Process, Processes, answers, free_port, wait_for
from tests.e2e.recorder import Recorder

RUN = "crashes"
VERSIONS = 12
SPEC = {
    **json.loads((ROOT / "examples" / "guess_the_number.json").read_text()),
    "name": RUN,
    "batch_size": 32,
    "attempt_lease_s": 4.0,
    "batch_lease_s": 30.0,
}


@pytest.mark.timeout(600)
def test_kills_of_every_process_lose_nothing_and_ack_nothing_twice(tmp_path: Path) -> None:
    port, policy_port = free_port(), free_port()
    upstream, policy = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{policy_port}"
    data, checkpoint = tmp_path / "data", tmp_path / "learner.npz"
    with Processes(tmp_path / "logs") as processes, Recorder(upstream) as recorder:
        processes.tiny_policy(policy_port).start()
        orchestrator = processes.orchestrator(data, port).start()
        wait_for("the orchestrator is ready", lambda: answers(f"{upstream}/readyz"))
        wait_for("the policy is ready", lambda: answers(f"{policy}/health"))
        with Client(upstream, keepalive=False) as client:
            client.create_run(SPEC)
        workers = [processes.worker(f"worker-{i}", recorder.url, policy).start() for i in (0, 1)]
        learner = processes.add(
            "learner",
            *("examples/learner.py", "--url", recorder.url, "--policy", policy, "--run", RUN),
            *("--versions", str(VERSIONS), "--checkpoint", str(checkpoint)),
        ).start()
        crash_everything(recorder, upstream, orchestrator, workers, learner)
        wait_for("the learner makes its last version", lambda: not learner.running, 120)
        assert learner.exit_code == 0, learner.tail()
        for process in (*workers, orchestrator):
            assert process.end() == 0, process.tail()
        orchestrator.start()
        wait_for("a last start", lambda: answers(f"{upstream}/readyz"))
        findings = check(upstream, RUN, data, recorder.acknowledged)
        assert findings.violations == []
        assert_that_enough_happened(findings, recorder)


def crash_everything(
    recorder: Recorder, upstream: str, orchestrator: Process, workers: list[Process], learner: Process
) -> None:
    """Kill each process twice while it works; the orchestrator for less and for more than a lease term."""
    acknowledged = recorder.acknowledged
    for round_number in (1, 2):
        records, batches, acks = len(acknowledged.records), len(acknowledged.batches), len(acknowledged.acks)
        wait_for("records since the last kill", lambda before=records: len(acknowledged.records) > before + 20)
        workers[0].kill()
        wait_for("a batch since the last kill", lambda before=batches: len(acknowledged.batches) > before)
        learner.kill()
        workers[0].start()
        learner.start()
        wait_for("an ack since the last kill", lambda before=acks: len(acknowledged.acks) > before + 1)
        orchestrator.kill()
        if round_number == 2:
            learner.kill()
        orchestrator.start()
        wait_for("the orchestrator is ready again", lambda: answers(f"{upstream}/readyz"))
        if round_number == 2:
            learner.start()


def assert_that_enough_happened(findings: Findings, recorder: Recorder) -> None:
    """Check that there was enough work in flight; otherwise the test would prove nothing."""
    assert findings.records > 200
    assert findings.acks >= VERSIONS - 2
    assert len(recorder.acknowledged.epochs) >= 3


def test_a_killed_learner_gets_the_same_batch_again(tmp_path: Path) -> None:
    port, policy_port = free_port(), free_port()
    upstream, policy = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{policy_port}"
    with Processes(tmp_path / "logs") as processes, Recorder(upstream) as recorder:
        processes.tiny_policy(policy_port).start()
        orchestrator = processes.orchestrator(tmp_path / "data", port).start()
        wait_for("the orchestrator is ready", lambda: answers(f"{upstream}/readyz"))
        processes.worker("worker", upstream, policy).start()
        with Client(recorder.url, keepalive=False) as first:
            first.create_run(SPEC)
            leased = first.pull(RUN, timeout_s=60)
        orchestrator.kill()
        orchestrator.start()
        wait_for("the orchestrator is ready again", lambda: answers(f"{upstream}/readyz"))
        with Client(recorder.url, keepalive=False) as second:
            again = second.pull(RUN, timeout_s=60)
            assert again.id == leased.id
            assert again.generation == leased.generation + 1
            assert len(recorder.acknowledged.batches[leased.id]) == 2
            assert len(set(recorder.acknowledged.batches[leased.id])) == 1
            with pytest.raises(HeadraceError, match="generation"):
                first.ack(leased, version=1)
            second.ack(again, version=1)
