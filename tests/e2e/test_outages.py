"""The orchestrator is down for longer than a lease term."""

from __future__ import annotations

import time

from headrace import Client
from tests.e2e.conftest import Service
from tests.e2e.processes import wait_for

TERM_S = 1.0
TASKS = 120


def test_an_outage_of_three_lease_terms_reruns_nothing(service: Service) -> None:
    """Results of episodes that ran or finished meanwhile are accepted: every record belongs to the first attempt."""
    spec = {
        "name": "outage",
        "tasks": [{"environment": "game:GuessTheNumber-v0", "seed": seed} for seed in range(TASKS)],
        "batch_size": TASKS,
        "attempt_lease_s": TERM_S,
        "limits": {"max_turns": 16},
        "sampling": {"max_tokens": 32},
    }
    worker = service.processes.worker("worker", service.url, service.policy, slots=8).start()
    with Client(service.url, keepalive=False) as client:
        client.create_run(spec)
        wait_for("some episodes are stored and others run", lambda: 0 < stored(client) < TASKS - 20)
        service.orchestrator.kill()
        time.sleep(3 * TERM_S)  # the outage itself: real processes have real lease terms
        service.restart()
        wait_for("all episodes are stored", lambda: stored(client) == TASKS)
        records = list(client.trajectories("outage"))
        assert {record.attempt for record in records} == {1}
        assert {record.status for record in records} == {"finished"}
        assert len({record.episode for record in records}) == len(records) == TASKS
    assert worker.end() == 0, worker.tail()


def stored(client: Client) -> int:
    return sum(client.run("outage").episodes.values())
