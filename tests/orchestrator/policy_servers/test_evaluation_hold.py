"""G03: an evaluation that is pinned to a version must not stop training when new versions are announced."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from headrace.batch.batch import Batch
from headrace.wire import messages
from tests.orchestrator.policy_servers.deployment import Deployment, deployment
from tests.orchestrator.policy_servers.test_failed_loads import learner

SLOW = "policies:Slow"
EPISODES = 16


async def run_at_version_4(deployed: Deployment) -> None:
    await deployed.create_run(
        environments=[{"id": SLOW}], group_size=4, batch_size=16, max_staleness=1, attempt_lease_s=2.0
    )
    await deployed.announce(4)
    await deployed.until_served(4)


async def train(deployed: Deployment, upto: int, within_s: float = 60.0) -> list[str]:
    """Pull and ack as fast as possible until a batch of version ``upto``; returns the reasons of empty pulls."""
    n, reasons, end = 4, [], time.monotonic() + within_s
    while time.monotonic() < end:
        reply = await deployed.api.pull(wait_s=0.5)
        if isinstance(reply, Batch):
            if reply.version.n >= upto:
                return reasons
            n += 1
            body = messages.AckRequest(
                learner="learner",
                session="one",
                generation=reply.generation,
                version=f"0.{n}",
                weights=deployed.write(n),
            )
            await deployed.api.ask("POST", f"/v1/runs/run/batches/{reply.id}/ack", body)
        else:
            reasons += [reason.message for reason in reply.reasons]
    raise AssertionError(reasons)


async def report(deployed: Deployment, evaluation: str) -> messages.EvaluationReply:
    """Wait for the result of an evaluation."""
    while True:
        answer = await deployed.api.ask("GET", f"/v1/runs/run/evaluations/{evaluation}?wait_s=5")
        reply = msgspec.convert(answer, messages.EvaluationReply)
        if reply.finished:
            return reply


async def check_pinned(deployed: Deployment, evaluation: str) -> None:
    """Check that the pinned version sampled every turn of the evaluation."""
    records = [record for record in await deployed.records() if record.provenance.evaluation == evaluation]
    assert len(records) >= EPISODES - 1
    for record in records:
        assert {str(run.version) for segment in record.segments for run in segment.versions} <= {"0.4"}


def tasks(*, stalling: int = 0) -> list[dict[str, Any]]:
    whole = {"environment": SLOW, "kwargs": {"turns": 4, "step_s": 0.25}}
    return [whole] * (EPISODES - stalling) + [{**whole, "kwargs": {"stalls": True}}] * stalling


async def test_g03_weights_wait_for_an_evaluation_with_a_reason_for_the_learner_and_training_continues(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, servers=1, slots=8, imports=["tests.orchestrator.policy_servers.environment"]) as (
        deployed,
        _,
        _,
    ):
        await run_at_version_4(deployed)
        started = await deployed.api.ask(
            "POST", "/v1/runs/run/evaluations", messages.EvaluationRequest(tasks=tasks(), deadline_s=50.0), status=201
        )
        result = asyncio.create_task(report(deployed, started["evaluation"]))
        reasons = await train(deployed, upto=6)
        assert any(f"evaluation {started['evaluation']} holds version 0.4 for" in text for text in reasons), set(
            reasons
        )
        reply = await result
        assert (reply.done, reply.wanted, reply.version) == (EPISODES, EPISODES, "0.4")
        await check_pinned(deployed, reply.evaluation)
        assert (await deployed.servers()).skipped[:1] == ["0.5"]


async def test_g03_the_hold_of_an_evaluation_ends_at_its_deadline_after_a_dead_client_and_a_stalled_episode(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, servers=1, slots=8, imports=["tests.orchestrator.policy_servers.environment"]) as (
        deployed,
        _,
        _,
    ):
        await run_at_version_4(deployed)
        encoded = msgspec.json.encode(tasks(stalling=1)).decode()
        with learner(deployed, "client.evaluate('run', __import__('json').loads(sys.argv[2]), deadline_s=10)", encoded):
            evaluation = (await deployed.until_said("runs: ")).facts["evaluation"]
        await train(deployed, upto=6)
        reply = await report(deployed, evaluation)
        assert (reply.done, reply.wanted) == (EPISODES - 1, EPISODES)
        (stopped,) = [line for line in reply.episodes if line.status == "cancelled"]
        assert stopped.failure is not None
        assert stopped.failure.message == "deadline"
        await check_pinned(deployed, evaluation)
