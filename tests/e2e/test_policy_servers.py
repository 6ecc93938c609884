"""Policy servers as real processes. Turns of a failing server, whatever its fault, are played at another one, and no
fault becomes a reward. Logprobs of scorers come with the batch."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from headrace import Client, score
from headrace.assets import decode_array
from headrace.errors import PolicyFailure, RunFinished
from headrace.runspec import RunSpec
from tests.e2e.processes import Process, Processes, answers, free_port, wait_for

EPISODES = 6
TASKS = [{"environment": "game:GuessTheNumber-v0-easy", "seed": seed} for seed in range(EPISODES)]


class Deployment(NamedTuple):
    """A service with one worker and two policy servers: ``faulty`` fails as a test sets it, ``healthy`` never fails."""

    processes: Processes
    client: Client
    faulty: str
    healthy: str

    def add_server(self) -> tuple[Process, str]:
        """Add a policy server."""
        port = free_port()
        process = self.processes.tiny_policy(port).start()
        wait_for("the policy is ready", lambda: answers(f"http://127.0.0.1:{port}/health"))
        return process, f"http://127.0.0.1:{port}"

    def run(self, name: str, *endpoints: str, **fields: Any) -> None:
        """Start a run of six episodes on these servers."""
        spec = {
            "name": name,
            "tasks": TASKS,
            "batch_size": EPISODES,
            "policy": {"endpoints": list(endpoints)},
            "sampling": {"max_tokens": 32},
            "retries": {"max_attempts": 3, "quarantine_after": 100},
            **fields,
        }
        self.client.create_run(RunSpec.model_validate(spec))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with Processes(folder / "logs") as processes:
        processes.orchestrator(folder / "data", port).start()
        wait_for("the orchestrator is ready", lambda: answers(f"{url}/readyz"))
        processes.worker("worker", url, "", slots=EPISODES).start()
        with Client(url, keepalive=False) as client:
            base = Deployment(processes, client, "", "")
            yield base._replace(faulty=base.add_server()[1], healthy=base.add_server()[1])


def misbehave(address: str, **settings: Any) -> None:
    request = urllib.request.Request(f"{address}/misbehave", json.dumps(settings).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def running(address: str) -> int:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(next(line for line in lines if line.startswith("vllm:num_requests_running{")).split()[-1])


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "500s about floats": ({"fail_every": 1}, "logprob-unwritable"),
    "503s": ({"fail_every": 1, "fail_status": 503}, "server-error"),
    "garbage": ({"lie": "garbage"}, "unreadable-response"),
    "truncated JSON": ({"lie": "cut-short"}, "unreadable-response"),
    "too many tokens": ({"lie": "too-many-tokens"}, "too-many-tokens"),
    "too few logprobs": ({"lie": "short-logprobs"}, "logprobs-too-few"),
    "NaN": ({"lie": "nan-logprob"}, "logprob-nan"),
    "a made-up logprob": ({"lie": "made-up-logprob"}, "logprob-missing"),
    "slow": ({"slow_s": 60.0}, "timeout"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_turns_of_a_faulty_engine_are_played_elsewhere_and_without_another_one_they_are_failures(
    deployment: Deployment, fault: str
) -> None:
    settings, kind = FAULTS[fault]
    misbehave(deployment.faulty, **settings)
    name = fault.replace(" ", "-")
    limits = {"policy_timeout_s": 2.0 if fault == "slow" else 20.0}
    deployment.run(f"{name}-two", deployment.faulty, deployment.healthy, limits=limits)
    once = {"max_attempts": 1, "quarantine_after": 100}
    deployment.run(f"{name}-one", deployment.faulty, limits=limits, retries=once, short_groups="serve")

    batch = deployment.client.pull(f"{name}-two", timeout_s=60)
    assert {trajectory.status for trajectory in batch.trajectories} <= {"finished", "truncated"}
    assert len(batch.trajectories) == EPISODES
    assert {trajectory.provenance.endpoints[-1] for trajectory in batch.trajectories} == {deployment.healthy}

    with pytest.raises(RunFinished):
        deployment.client.pull(f"{name}-one", timeout_s=60)
    failed = list(deployment.client.trajectories(f"{name}-one"))
    assert len(failed) == EPISODES
    assert {(item.failure.layer, item.failure.kind, item.reward) for item in failed if item.failure} == {
        ("policy", kind, None)
    }
    assert all("Turn 0: " in item.failure.message for item in failed if item.failure)
    assert deployment.client.trajectory(failed[0].id).provenance.endpoints == [deployment.faulty]
    worker = deployment.client.status().workers[0]
    assert worker.stats.get(f"policy_failures {deployment.healthy}", 0.0) == 0.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_freezes_in_the_middle_of_turns_costs_no_episode(
    deployment: Deployment, number: signal.Signals
) -> None:
    process, address = deployment.add_server()
    misbehave(address, slow_s=60.0)
    name = number.name.lower()
    deployment.run(name, address, deployment.healthy, limits={"policy_timeout_s": 60.0})
    wait_for("turns are sampled there", lambda: running(address) > 0)
    process.send(number)
    batch = deployment.client.pull(name, timeout_s=60)
    assert len(batch.trajectories) == EPISODES
    assert {trajectory.status for trajectory in batch.trajectories} <= {"finished", "truncated"}
    assert {trajectory.attempt for trajectory in batch.trajectories} == {1}
    process.kill()


def test_G09_a_task_that_keeps_getting_bad_logprobs_is_quarantined_and_its_group_is_served_as_it_is(  # noqa: N802
    deployment: Deployment,
) -> None:
    misbehave(deployment.faulty, lie="nan-logprob", lie_after=1)  # the first member is lucky
    deployment.run(
        "g09",
        deployment.faulty,
        tasks=TASKS[:1],
        group_size=3,
        batch_size=3,
        max_concurrent=1,
        short_groups="serve",
        limits={"max_turns": 1},
        retries={"max_attempts": 2, "quarantine_after": 2},
    )

    batch = deployment.client.pull("g09", timeout_s=60)
    assert len(batch.trajectories) == 1
    assert deployment.client.run("g09").quarantined == 1
    failed = list(deployment.client.trajectories("g09", status="failed"))
    assert [(item.attempt, item.reward) for item in failed] == [(2, None)] * 2
    for item in failed:
        assert item.failure is not None
        assert (item.failure.layer, item.failure.kind) == ("policy", "logprob-nan")
        assert "Turn 0: The logprob at position 4 is NaN." in item.failure.message
    deployment.client.ack(batch)
    wait_for(
        "the server's share of errors shows",
        lambda: deployment.client.status().workers[0].stats.get(f"policy_failures {deployment.faulty}", 0.0) >= 2,
    )


def test_the_logprobs_of_a_scorer_come_with_the_batch_and_a_learner_can_ask_for_them_itself(
    deployment: Deployment,
) -> None:
    scorers = {"ref": {"endpoints": [deployment.healthy], "model": "policy"}}
    deployment.run("scored", deployment.healthy, policy={"endpoints": [deployment.healthy], "scorers": scorers})
    batch = deployment.client.pull("scored", timeout_s=60, fields=["assets"])
    rows = [segment for trajectory in batch.trajectories for segment in trajectory.rows()]
    assert len(rows) == EPISODES
    for row in rows:
        scores = decode_array(batch.asset(row.arrays["logprobs.ref"]))
        assert (scores.dtype, scores.shape) == (np.dtype(np.float32), row.token_ids.shape)
        sampled = row.sampled == 1
        np.testing.assert_allclose(scores[sampled], row.logprobs[sampled], rtol=0, atol=1e-5)
    own = score(deployment.healthy, "policy", rows[0].token_ids)
    np.testing.assert_array_equal(own.logprobs, decode_array(batch.asset(rows[0].arrays["logprobs.ref"])))
    assert str(own.version) == "0.0"
    with pytest.raises(PolicyFailure) as caught:
        score("http://127.0.0.1:1", "policy", [1, 2])
    assert caught.value.kind == "unreachable"


def test_a_scorer_that_fails_is_a_failure_of_the_policy_and_never_zeros(deployment: Deployment) -> None:
    scorers = {"ref": {"endpoints": [deployment.healthy], "model": "another"}}
    once = {"max_attempts": 1, "quarantine_after": 100}
    deployment.run(
        "unscored",
        deployment.healthy,
        policy={"endpoints": [deployment.healthy], "scorers": scorers},
        retries=once,
        short_groups="serve",
    )
    with pytest.raises(RunFinished):
        deployment.client.pull("unscored", timeout_s=60)
    failed = list(deployment.client.trajectories("unscored"))
    assert len(failed) == EPISODES
    for item in failed:
        assert item.failure is not None
        assert (item.failure.layer, item.failure.kind, item.reward) == ("policy", "unknown-model", None)
        assert item.failure.message.startswith("Scoring: Scorer 'ref', row 0: ")


def test_G10_a_worker_that_was_frozen_repeats_its_request_under_an_id_of_its_own(deployment: Deployment) -> None:  # noqa: N802
    misbehave(deployment.faulty, stall_next=1, stall_s=60.0)
    workers = [
        deployment.processes.add(
            f"frozen-{number}",
            *("-m", "headrace_workers", "--orchestrator", deployment.client.url, "--name", f"frozen-{number}"),
            *("--slots", "1", "--pool", "frozen"),
        )
        for number in (1, 2)
    ]
    limits = {"max_turns": 1, "policy_timeout_s": 6.0}
    deployment.run(
        "frozen", deployment.faulty, tasks=TASKS[:1], batch_size=1, pool="frozen", attempt_lease_s=1.0, limits=limits
    )
    workers[0].start()
    wait_for("the first worker asks", lambda: running(deployment.faulty) == 1)
    workers[0].send(signal.SIGSTOP)
    workers[1].start()
    batch = deployment.client.pull("frozen", timeout_s=60)
    assert [trajectory.attempt for trajectory in batch.trajectories] == [2]
    workers[0].send(signal.SIGCONT)  # its first try has timed out by its own clock, or continues; it may send another
    wait_for("nothing is left at the engine", lambda: running(deployment.faulty) == 0)
    assert "already running" not in workers[0].tail(1000) + workers[1].tail(1000)
    assert len(list(deployment.client.trajectories("frozen"))) == 1
    for worker in workers:
        worker.kill()
