"""Learners of all kinds against a real service: the base install, the async client, learner-submitted groups."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncClient, Client
from headrace.errors import GroupEnded, RunFinished, UnknownEnvironment
from headrace.integrations.prompts import PromptGroup, roll_out
from tests.e2e.conftest import Service
from tests.e2e.processes import answers, free_port, wait_for
from tests.sdk.test_base_install import base_python, run_learner

__all__ = ["base_python"]

ARITHMETIC = [{"environment": "math:Arithmetic-v0", "seed": seed} for seed in range(8)]
LIMITS = {"sampling": {"max_tokens": 32}, "limits": {"max_turns": 16}}


@pytest.fixture
def working(service: Service) -> Service:
    service.processes.worker("worker", service.url, service.policy, slots=8).start()
    return service


def test_a_base_install_pulls_a_batch_and_computes_advantages(working: Service, base_python: Path) -> None:
    spec: dict[str, Any] = {
        "name": "base",
        "environments": [{"id": "game:GuessTheNumber-v0-easy"}],
        "group_size": 4,
        "batch_size": 16,
        "estimator": {"name": "rloo"},
        **LIMITS,
    }
    with Client(working.url, keepalive=False) as client:
        client.create_run(spec)
    answer = run_learner(base_python, working.url, "base")
    assert answer["served"] == pytest.approx(answer["own"], rel=1e-9, abs=1e-12)
    assert any(answer["served"])
    assert "aiohttp" not in answer["installed"]


async def test_an_async_learner_trains_on_a_list_to_its_end(working: Service) -> None:
    tasks: list[str] = []
    async with AsyncClient(working.url) as client:
        await client.create_run({"name": "list", "tasks": ARITHMETIC, "batch_size": 3, **LIMITS})
        async with asyncio.timeout(60):
            async for batch in client.batches("list"):
                batch.verify()
                tasks += [trajectory.task.id for trajectory in batch.trajectories]
                await client.ack(batch)
        assert sorted(tasks) == [str(number) for number in range(8)]
        assert (await client.run("list")).state == "finished"


def test_submitted_groups_are_awaited_by_id_and_are_served_or_end_in_a_typed_failure(working: Service) -> None:
    with Client(working.url, keepalive=False) as client:
        client.create_run({"name": "own", "group_size": 2, "short_groups": "serve", **LIMITS})
        good, bad = client.submit_groups("own", [ARITHMETIC[0], {"environment": "example:NowhereInstalled", "seed": 0}])
        batch = client.pull("own", groups=[good], timeout_s=60)
        assert [group.id for group in batch.manifest.groups] == [good]
        assert len(batch.trajectories) == 2
        client.ack(batch)
        with pytest.raises(GroupEnded, match=bad):
            client.pull("own", groups=[bad], timeout_s=60)
        (failed, *_) = client.trajectories("own", status="failed")
        assert failed.failure is not None
        assert (failed.failure.layer, failed.failure.kind) == ("environment", "unknown-environment")
        assert failed.reward is None


def test_good_groups_of_a_roll_out_come_back_beside_the_reason_of_a_bad_one(working: Service) -> None:
    bad = {"environment": "example:NowhereInstalled", "seed": 0}
    with Client(working.url, keepalive=False) as client:
        client.create_run({"name": "prompts", "group_size": 2, **LIMITS})
        for _ in range(2):  # the second time the bad task is quarantined
            tasks = [ARITHMETIC[0], bad, ARITHMETIC[1]]
            rolled = roll_out(client, "prompts", [PromptGroup(task, 2) for task in tasks], timeout_s=60)
            assert [len(group) for group in rolled.episodes] == [2, 0, 2]
            assert list(rolled.failures) == [1]
            assert "unknown-environment" in rolled.failures[1]


def test_two_player_games_train_against_a_frozen_opponent(working: Service) -> None:
    port = free_port()
    frozen_policy = f"http://127.0.0.1:{port}"
    working.processes.tiny_policy(port, model="frozen").start()
    wait_for("the frozen opponent is ready", lambda: answers(f"{frozen_policy}/health"))
    spec: dict[str, Any] = {
        "name": "nim",
        "environments": [{"id": "game:Nim-v0"}],
        "batch_size": 8,
        "policy": {"agents": {"player_1": {"base": "frozen", "endpoints": [frozen_policy], "train": False}}},
        **LIMITS,
    }
    with Client(working.url, keepalive=False) as client:
        client.create_run(spec)
        batch = client.pull("nim", timeout_s=60)
        batch.verify()
        for row in batch.rows:
            assert (row.segment.agent, row.segment.policy.base) == ("player_0", "policy")
        frozen = [s for t in batch.trajectories for s in t.segments if s.agent == "player_1"]
        assert frozen
        assert all(not segment.train and segment.policy.base == "frozen" for segment in frozen)


def test_a_pull_of_a_finished_run_raises_at_once_whatever_its_timeout(working: Service) -> None:
    with Client(working.url, keepalive=False) as client:
        client.create_run({"name": "short", "tasks": [], **LIMITS})
        with pytest.raises(RunFinished, match="tasks exhausted"):
            client.pull("short", timeout_s=60)


def test_making_an_unknown_environment_raises_an_error_of_its_own() -> None:
    import headrace

    with pytest.raises(UnknownEnvironment, match="game:GuessTheNumber"):
        headrace.make("game:NoSuchGame")
