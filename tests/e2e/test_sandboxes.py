"""Runs whose policy writes programs, with real processes: orchestrator, worker with a sandbox, and a scripted policy.
Results are stored turn by turn; a failing sandbox never becomes a reward."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import headrace
from headrace import Client
from headrace.errors import NothingToServe, RunFinished
from headrace.trajectory import Trajectory
from tests.e2e.processes import Processes, answers, free_port, wait_for

pytestmark = pytest.mark.component("bubblewrap")

SPEC: dict[str, Any] = {"batch_size": 4, "sampling": {"max_tokens": 256}, "limits": {"max_turns": 8}}


class Deployment(NamedTuple):
    """A service with a worker that has a sandbox, and one in the pool ``broken`` without bubblewrap."""

    client: Client
    policy: str


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    port, policy_port = free_port(), free_port()
    url, policy = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{policy_port}"
    (folder / "no-programs").mkdir()
    with Processes(folder / "logs") as processes:
        processes.orchestrator(folder / "data", port).start()
        processes.tiny_policy(policy_port).start()
        sandbox = ("--sandbox", "bubblewrap")
        processes.worker("worker", url, policy, *sandbox).start()
        processes.worker("broken", url, policy, *sandbox, "--pool", "broken", PATH=str(folder / "no-programs")).start()
        wait_for("the orchestrator is ready", lambda: answers(f"{url}/readyz"))
        wait_for("the policy is ready", lambda: answers(f"{policy}/health"))
        with Client(url, keepalive=False) as client:
            yield Deployment(client, policy)


def row(name: str, power: int) -> dict[str, Any]:
    return {
        "id": name,
        "problem": f"Print the number to the power of {power}.",
        "tests": {"inputs": ["2", "7"], "outputs": [str(2**power), str(7**power)]},
    }


def reward(trajectory: Trajectory) -> float:
    (segment,) = trajectory.segments
    return sum(turn.reward for turn in segment.turns)


def set_script(deployment: Deployment, *script: str) -> None:
    body = json.dumps({"script": script}).encode()
    with urllib.request.urlopen(f"{deployment.policy}/misbehave", body, timeout=10) as answer:
        assert answer.status == 200


def stored(client: Client, run: str) -> list[Trajectory]:
    return [client.trajectory(summary.id) for summary in client.trajectories(run)]


def test_a_run_of_programming_problems_is_graded_in_the_workers_sandbox(deployment: Deployment) -> None:
    set_script(deployment, "Squares:\n```python\nprint(int(input()) ** 2)\n```")
    tasks = [
        {"environment": "code:Rows-v0", "example": row(name, power), "kwargs": {"partial": True}, "id": name}
        for name, power in (("one", 1), ("two", 2), ("three", 3))
    ]
    tasks.append({"environment": "code:Basics-v0", "seed": 3, "id": "basics"})
    client = deployment.client
    client.create_run({"name": "code", "tasks": tasks, **SPEC})
    batch = client.pull("code", timeout_s=60)
    batch.verify()
    rewards = {t.task.id: reward(t) for t in batch.trajectories}
    assert rewards == {"one": 0.0, "two": 1.0, "three": 0.0, "basics": 0.0}
    outcomes = {t.task.id: t.infos[-1]["outcome"] for t in batch.trajectories}
    assert (outcomes["one"], outcomes["two"]) == ("wrong", "passed")
    client.ack(batch)
    with pytest.raises(RunFinished):
        client.pull("code", timeout_s=60)


def test_a_run_with_the_python_tool_stores_calls_observations_and_rewards(deployment: Deployment) -> None:
    kwargs = {"max_operand": 9, "operations": "*"}
    seed = next(seed for seed in range(10_000) if is_42(seed, kwargs))
    set_script(
        deployment,
        "<python>print(6 *</python>",
        "<python>print(6 * 7)</python>",
        "<python>while True: pass</python>",
        r"\boxed{42}",
    )
    python = {"reward": 0.125, "success_reward": 0.25, "error_reward": -0.5, "time_s": 3.0}
    task = {"environment": "python:math:Arithmetic-v0", "seed": seed, "kwargs": {**kwargs, "python": python}}
    client = deployment.client
    client.create_run({"name": "tool", "tasks": [task], **SPEC})
    batch = client.pull("tool", timeout_s=60)
    batch.verify()
    (trajectory,) = batch.trajectories
    turns = trajectory.segments[0].turns
    assert [turn.reward for turn in turns] == [-0.375, 0.375, -0.375, 1.0]
    assert [[call.error for call in turn.tool_calls] for turn in turns] == [
        ["exit code 1"],
        [""],
        ["limit of time"],
        [],
    ]
    observations = [str(m.content) for m in trajectory.messages if m.role == "user"][1:]
    assert "SyntaxError" in observations[0]
    assert observations[1] == turns[1].tool_calls[0].result == "Code execution result: 42\n"
    assert "limit of time" in observations[2]
    assert observations[3] == "Right."
    assert turns[2].environment_s >= 3.0
    assert turns[1].environment_s < 3.0, "making the sandbox is not part of the environment time"


def is_42(seed: int, kwargs: dict[str, Any]) -> bool:
    environment: Any = headrace.make("math:Arithmetic-v0", **kwargs)
    environment.reset(seed)
    return bool(environment.step(r"\boxed{42}").reward == 1.0)


def test_episodes_of_a_worker_without_a_working_sandbox_fail_and_get_no_reward(deployment: Deployment) -> None:
    set_script(deployment, "```python\nprint(int(input()) ** 2)\n```")
    tasks = [{"environment": "code:Rows-v0", "example": row("two", 2)}]
    client = deployment.client
    client.create_run({"name": "broken", "pool": "broken", "tasks": tasks, **SPEC})
    with pytest.raises(RunFinished):
        client.pull("broken", timeout_s=60)
    failed = stored(client, "broken")
    assert failed
    for trajectory in failed:
        assert trajectory.failure is not None
        assert (trajectory.status, trajectory.failure.layer) == ("failed", "sandbox")
        assert "bwrap is not installed" in trajectory.failure.message
        assert trajectory.segments == []
    assert client.run("broken").batches_acked == 0


def test_a_run_that_needs_a_sandbox_waits_for_a_worker_with_one_and_names_it_as_the_reason(
    deployment: Deployment,
) -> None:
    client = deployment.client
    spec = {"name": "waits", "tasks": [{"environment": "code:Basics-v0"}], "capabilities": ["sandbox:moon"], **SPEC}
    client.create_run(spec)
    with pytest.raises(NothingToServe, match=r"that offer \['sandbox', 'sandbox:moon'\]"):
        client.pull("waits", timeout_s=0.5)
    assert stored(client, "waits") == []


def test_g18_a_task_whose_reference_exhausts_the_grader_is_quarantined_and_never_scored(deployment: Deployment) -> None:
    client = deployment.client
    set_script(deployment, r"\boxed{42}")
    kwargs = {"grader_s": 0.5}
    tasks = [
        {"environment": "math:Rows-v0", "kwargs": kwargs, "example": {"problem": "?", "answer": answer}, "id": answer}
        for answer in ("42", "7^{7^{7^{7}}}")
    ]
    retries = {"max_attempts": 2, "quarantine_after": 2}
    client.create_run({"name": "references", "tasks": tasks, "group_size": 2, "retries": retries, **SPEC})
    wait_for("the task is quarantined", lambda: client.run("references").quarantined == 1, 60)
    batch = client.pull("references", timeout_s=90)
    assert [(t.task.id, reward(t)) for t in batch.trajectories] == [("42", 1.0)] * 2
    client.ack(batch)
    failures = [t.failure for t in stored(client, "references") if t.status == "failed"]
    assert {(failure.layer, failure.kind) for failure in failures if failure} <= {
        ("environment", "bad-reference"),
        ("infrastructure", "quarantined"),
    }
