"""Workers that keep their names, killed and restarted at once as by a StatefulSet: every task is trained on once.

``CHAOS_KEPT_NAMES`` is the number of kills; ``make chaos`` sets it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace import Client
from headrace.errors import RunFinished
from tests.e2e.processes import Process, Processes, answers, free_port, wait_for

KILLS = int(os.environ.get("CHAOS_KEPT_NAMES", "3"))
BATCHES_PER_KILL = 2
GROUPS_PER_BATCH, GROUP_SIZE = 4, 4
TASKS = GROUPS_PER_BATCH * BATCHES_PER_KILL * (KILLS + 1)
LEASE_S = 20.0
SLOW_S = 0.2
"""Duration of a turn: an episode takes a second, so each kill finds some."""


def spec(name: str) -> dict[str, object]:
    return {
        "name": name,
        "tasks": [{"environment": "game:GuessTheNumber-v0-easy", "seed": seed} for seed in range(TASKS)],
        "policy": {"base": "policy"},
        "sampling": {"max_tokens": 12},
        "group_size": GROUP_SIZE,
        "batch_size": GROUPS_PER_BATCH * GROUP_SIZE,
        "attempt_lease_s": LEASE_S,
    }


@pytest.mark.timeout(600)
def test_killed_workers_that_keep_their_names_cost_no_task_and_no_episode(tmp_path: Path) -> None:
    port, policy_port = free_port(), free_port()
    url, policy = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{policy_port}"
    with Processes(tmp_path / "logs") as processes:
        slow = ("--port", str(policy_port), "--slow-s", str(SLOW_S))
        processes.add("policy", "-m", "headrace_workers.tiny_policy", *slow).start()
        processes.orchestrator(tmp_path / "data", port).start()
        wait_for("the orchestrator is ready", lambda: answers(f"{url}/readyz"))
        wait_for("the policy is ready", lambda: answers(f"{policy}/health"))
        workers = [processes.worker(f"w{number}", url, policy, slots=16).start() for number in (0, 1)]
        with Client(url) as client:
            client.create_run(spec("names"))
            kills, groups = train_and_kill(client, workers)
            status = client.run("names")
    assert kills == KILLS
    assert len(groups) == len(set(groups)) == TASKS
    assert status.quarantined == 0
    assert status.selected.get("topped_up", 0) == 0
    assert status.groups.retired == {"acked": TASKS}
    assert status.episodes.keys() <= {"finished", "truncated"}
    assert sum(status.episodes.values()) == TASKS * GROUP_SIZE


def train_and_kill(client: Client, workers: list[Process]) -> tuple[int, list[str]]:
    """Train until the list is over; every few batches a worker with attempts is killed and restarted at once."""
    kills, batches = 0, 0
    groups: list[str] = []
    while True:
        try:
            batch = client.pull("names", timeout_s=120)
        except RunFinished:
            return kills, groups
        client.ack(batch)
        batches += 1
        groups += [group.id for group in batch.manifest.groups]
        if batches % BATCHES_PER_KILL == 0 and kills < KILLS:
            victim = workers[kills % len(workers)]
            wait_for("the worker has attempts", lambda name=victim.name: has_attempts(client, name))
            victim.kill()
            victim.start()
            kills += 1


def has_attempts(client: Client, name: str) -> bool:
    return any(worker.leased for worker in client.status().workers if worker.worker == name)
