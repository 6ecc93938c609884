"""G03: an evaluation that is pinned to a version must not stop everybody when new versions come."""

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


async def on_four(made: Deployment) -> None:
    await made.create_run(
        environments=[{"id": SLOW}], group_size=4, batch_size=16, max_staleness=1, attempt_lease_s=2.0
    )
    await made.announce(4)
    await made.until_served(4)


async def train(made: Deployment, upto: int, within_s: float = 60.0) -> list[str]:
    """Pull, ack, announce, as fast as it goes, until a batch of that version came; gives what pulls were told."""
    n, told, end = 4, [], time.monotonic() + within_s
    while time.monotonic() < end:
        reply = await made.api.pull(wait_s=0.5)
        if isinstance(reply, Batch):
            if reply.version.n >= upto:
                return told
            n += 1
            body = messages.AckRequest(
                learner="learner",
                session="one",
                generation=reply.generation,
                version=f"0.{n}",
                weights=made.write(n),
            )
            await made.api.ask("POST", f"/v1/runs/run/batches/{reply.id}/ack", body)
        else:
            told += [reason.message for reason in reply.reasons]
    raise AssertionError(told)


async def report(made: Deployment, evaluation: str) -> messages.EvaluationReply:
    """An evaluation when it is over."""
    while True:
        answer = await made.api.ask("GET", f"/v1/runs/run/evaluations/{evaluation}?wait_s=5")
        reply = msgspec.convert(answer, messages.EvaluationReply)
        if reply.finished:
            return reply


async def check_pinned(made: Deployment, evaluation: str) -> None:
    """No turn of the evaluation is of another version, and no episode of it is in a batch."""
    records = [record for record in await made.records() if record.provenance.evaluation == evaluation]
    assert len(records) >= EPISODES - 1
    for record in records:
        assert {str(run.version) for segment in record.segments for run in segment.versions} <= {"0.4"}


def tasks(*, stalling: int = 0) -> list[dict[str, Any]]:
    whole = {"environment": SLOW, "kwargs": {"turns": 4, "step_s": 0.25}}
    return [whole] * (EPISODES - stalling) + [{**whole, "kwargs": {"stalls": True}}] * stalling


async def test_g03_weights_wait_for_an_evaluation_and_the_learner_is_told_so_and_goes_on(tmp_path: Path) -> None:
    async with deployment(tmp_path, servers=1, slots=8, imports=["tests.orchestrator.policy_servers.environment"]) as (
        made,
        _,
        _,
    ):
        await on_four(made)
        started = await made.api.ask(
            "POST", "/v1/runs/run/evaluations", messages.EvaluationRequest(tasks=tasks(), deadline_s=50.0), status=201
        )
        over = asyncio.create_task(report(made, started["evaluation"]))
        told = await train(made, upto=6)
        assert any(f"evaluation {started['evaluation']} holds version 0.4 for" in text for text in told), set(told)
        done = await over
        assert (done.done, done.wanted, done.version) == (EPISODES, EPISODES, "0.4")
        await check_pinned(made, done.evaluation)
        assert (await made.servers()).skipped[:1] == ["0.5"]


async def test_g03_the_hold_of_an_evaluation_ends_at_its_deadline_whoever_died_and_whatever_stalls(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, servers=1, slots=8, imports=["tests.orchestrator.policy_servers.environment"]) as (
        made,
        _,
        _,
    ):
        await on_four(made)
        wanted = msgspec.json.encode(tasks(stalling=1)).decode()
        with learner(made, "client.evaluate('run', __import__('json').loads(sys.argv[2]), deadline_s=10)", wanted):
            evaluation = (await made.until_said("runs: ")).facts["evaluation"]
        await train(made, upto=6)
        done = await report(made, evaluation)
        assert (done.done, done.wanted) == (EPISODES - 1, EPISODES)
        (stopped,) = [line for line in done.episodes if line.status == "cancelled"]
        assert stopped.failure is not None
        assert stopped.failure.message == "deadline"
        await check_pinned(made, evaluation)
