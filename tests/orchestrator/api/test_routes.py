"""The routes for workers and learners, over real HTTP."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from headrace.batch.batch import Batch
from headrace.trajectory import Failure
from headrace.wire import codec, messages
from headrace_orchestrator.api.routes import ROUTES
from tests.builders import make_failed
from tests.orchestrator.serving import Api, orchestrator, record_for, submission, until


async def test_episodes_become_a_batch_that_is_acked_once(api: Api):
    await api.create_run()
    await api.play(free=4)

    batch = await api.pull()
    assert isinstance(batch, Batch)
    batch.verify()
    assert batch.manifest.counts.trajectories == 4
    assert batch.generation == 1

    reply = await api.ack(batch, "0.1")
    assert reply["version"] == "0.1"
    status = await api.ask("GET", "/v1/runs/run")
    assert status["batches_acked"] == 1
    assert status["groups"]["retired"] == {"acked": 2}


async def test_records_are_served_as_they_are_stored(api: Api):
    await api.create_run()
    attempts = await api.lease(free=4)
    records = [codec.encode(record_for(attempt)) for attempt in attempts]
    await api.submit(submission(zip(attempts, records, strict=True)))

    body, _ = await api.pull_raw()
    batch = Batch.parse(body)
    assert bytes(batch.records) == b"".join(records)

    async with api.session.get(f"/v1/trajectories/{batch.manifest.trajectories[0]}") as answer:
        assert answer.headers["Content-Type"] == messages.RECORDS_MEDIA_TYPE
        assert await answer.read() == records[0]


async def test_a_repeated_pull_gets_the_same_bytes(api: Api):
    await api.create_run()
    await api.play(free=8)
    first, headers = await api.pull_raw(request="same")
    again, headers_again = await api.pull_raw(request="same")
    assert first == again
    assert headers[messages.HEADER_GENERATION] == headers_again[messages.HEADER_GENERATION]
    other, _ = await api.pull_raw(request="other")
    assert Batch.parse(other).id != Batch.parse(first).id


async def test_a_nacked_batch_comes_back_as_the_same_bytes_in_a_new_generation(api: Api):
    await api.create_run()
    await api.play(free=4)
    first, _ = await api.pull_raw()
    batch = Batch.parse(first, generation=1)
    back = {"learner": "learner", "session": "one", "generation": 1, "reason": "out of memory"}
    await api.ask("POST", f"/v1/runs/run/batches/{batch.id}/nack", back)
    again, headers = await api.pull_raw()
    assert again == first
    assert headers[messages.HEADER_GENERATION] == "2"


async def test_an_empty_pull_gives_its_reasons(api: Api):
    await api.create_run()
    empty = await api.pull()
    assert isinstance(empty, messages.EmptyReply)
    assert empty.reasons
    assert not empty.finished


async def test_a_pull_waits_until_a_batch_is_ready(api: Api):
    await api.create_run()
    waiting = asyncio.create_task(api.pull(wait_s=30))
    await until(lambda: learner_waits(api))
    await api.play(free=4)
    batch = await waiting
    assert isinstance(batch, Batch)


async def test_a_lease_waits_until_there_is_work(api: Api):
    waiting = asyncio.create_task(api.lease(free=2, wait_s=30))
    another = asyncio.create_task(api.lease("worker-2", free=2, wait_s=30))
    await asyncio.sleep(0)
    await api.create_run()
    assert len(await waiting) == 2
    assert len(await another) == 2


async def test_a_finished_run_answers_a_waiting_pull_at_once(api: Api):
    await api.create_run(environments=[], tasks=[])
    empty = await api.pull(wait_s=60)
    assert isinstance(empty, messages.EmptyReply)
    assert empty.finished


async def test_a_learner_that_disconnected_before_its_response_leaves_no_lease_behind(api: Api):
    await api.create_run()
    waiting = asyncio.create_task(api.pull(wait_s=60))
    await until(lambda: learner_waits(api))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until(lambda: learner_waits(api, False))
    await api.play(free=4)
    batch = await api.pull(learner="another")
    assert isinstance(batch, Batch)
    assert batch.generation == 1


async def test_a_worker_that_disconnected_before_its_response_leaves_no_lease_behind(api: Api):
    waiting = asyncio.create_task(api.lease(free=4, wait_s=60))
    await until(lambda: workers(api))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await api.create_run()
    assert len(await api.lease("worker-2", free=4)) == 4


async def test_a_repeated_submission_gets_the_first_result_however_long_ago_it_was(api: Api):
    await api.create_run()
    attempts = await api.lease(free=4)
    body = submission((attempt, record_for(attempt)) for attempt in attempts)
    assert {result.verdict for result in await api.submit(body)} == {"accepted"}
    assert {result.verdict for result in await api.submit(body)} == {"duplicate"}
    batch = await api.pull()
    assert isinstance(batch, Batch)
    await api.ack(batch, "0.1")
    assert {result.verdict for result in await api.submit(body)} == {"duplicate"}


async def test_a_failed_episode_is_stored_and_shown_and_never_served(api: Api):
    await api.create_run(retries={"max_attempts": 1}, short_groups="serve")
    attempts = await api.lease(free=4)
    failure = Failure(layer="environment", kind="unknown-environment", message="No environment test:Echo.")
    broken = make_failed(
        failure=failure,
        **{name: getattr(attempts[0], name) for name in ("run", "group", "member", "episode", "attempt", "task")},
    )
    records = [broken, *(record_for(attempt) for attempt in attempts[1:])]
    await api.submit(submission(zip(attempts, records, strict=True)))

    listed = await api.ask("GET", "/v1/runs/run/trajectories?status=failed")
    assert [line["failure"]["kind"] for line in listed["trajectories"]] == ["unknown-environment"]
    assert listed["trajectories"][0]["reward"] is None
    batch = await api.pull()
    assert isinstance(batch, Batch)
    assert broken.id not in batch.manifest.trajectories
    assert batch.manifest.counts.trajectories == 3


async def test_a_record_that_the_scheduler_writes_has_no_segments(api: Api):
    await api.create_run()
    attempts = await api.lease(free=1)
    await api.ask("POST", "/v1/runs/run/close")
    keys = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a in attempts]
    await api.ask("POST", "/v1/worker/return", messages.ReturnRequest(worker="worker-1", attempts=keys))
    listed = await api.ask("GET", "/v1/runs/run/trajectories?status=cancelled")
    names = [line["id"] for line in listed["trajectories"] if line["episode"] == attempts[0].episode]
    async with api.session.get(f"/v1/trajectories/{names[0]}") as answer:
        trajectory = codec.decode(await answer.read())
    assert trajectory.segments == []
    assert trajectory.status == "cancelled"
    assert trajectory.provenance.worker == ""


async def test_listings_are_read_by_pages_newest_first(api: Api):
    await api.create_run(group_size=1, batch_size=16)
    for _ in range(3):
        await api.play(free=4)
    seen, before = [], ""
    while True:
        suffix = f"&before={before}" if before else ""
        page = await api.ask("GET", f"/v1/runs/run/trajectories?limit=5{suffix}")
        assert len(page["trajectories"]) <= 5
        seen += [line["id"] for line in page["trajectories"]]
        before = page.get("next", "")
        if not before:
            break
    assert len(seen) == len(set(seen)) == 12
    assert seen == sorted(seen, reverse=True)


async def test_an_evaluation_runs_beside_training_and_is_never_batched(api: Api):
    await api.create_run()
    request = {"tasks": [{"environment": "test:Echo", "seed": 5}], "episodes_per_task": 2}
    started = await api.ask("POST", "/v1/runs/run/evaluations", request, status=201)
    waiting = asyncio.create_task(api.ask("GET", f"/v1/runs/run/evaluations/{started['evaluation']}?wait_s=30"))
    hold = asyncio.create_task(api.ask("GET", "/v1/runs/run/hold?wait_s=30"))
    attempts = [a for a in await api.lease(free=8) if a.evaluation]
    assert len(attempts) == 2
    provenance = record_for(attempts[0]).provenance
    marked = msgspec.structs.replace(provenance, evaluation=started["evaluation"])
    await api.submit(submission((a, record_for(a, provenance=marked)) for a in attempts))
    done = await waiting
    assert done["finished"]
    assert [line["reward"] for line in done["episodes"]] == [1.0, 1.0]
    assert (await hold)["hold_s"] == 0
    listed = await api.ask("GET", f"/v1/runs/run/trajectories?evaluation={started['evaluation']}")
    assert len(listed["trajectories"]) == 2


async def test_groups_of_the_learner_are_awaited_by_id(api: Api):
    await api.create_run(environments=[])
    groups = [{"task": {"environment": "test:Echo", "seed": 3}, "id": "mine"}]
    reply = await api.ask("POST", "/v1/runs/run/groups", {"groups": groups}, status=201)
    assert reply["groups"] == ["mine"]
    assert [group["id"] for group in await api.ask("GET", "/v1/runs/run/groups")] == ["mine"]
    await api.play(free=2)
    batch = await api.pull(groups=["mine"])
    assert isinstance(batch, Batch)
    assert [group.id for group in batch.manifest.groups] == ["mine"]


async def test_versions_are_announced_and_rewound(api: Api):
    await api.create_run()
    assert (await api.ask("POST", "/v1/runs/run/version", {"version": "0.1"}))["version"] == "0.1"
    assert (await api.ask("POST", "/v1/runs/run/version", {"version": "0.2"}))["version"] == "0.2"
    assert (await api.ask("POST", "/v1/runs/run/rewind", {"version": "0.1"}))["version"] == "1.1"
    doing = {"learner": "learner", "session": "one", "doing": "checkpointing"}
    await api.ask("POST", "/v1/runs/run/doing", doing)
    assert (await api.ask("GET", "/v1/runs/run"))["learner_doing"] == "checkpointing"


async def test_a_draining_worker_gets_nothing_new(api: Api):
    await api.create_run()
    await api.lease(free=1)
    await api.ask("POST", "/v1/workers/worker-1/drain")
    request = messages.HeartbeatRequest(worker="worker-1", slots=4)
    assert (await api.ask("POST", "/v1/worker/heartbeat", request))["drain"]
    assert await api.lease(free=4) == []
    assert [worker["draining"] for worker in await api.ask("GET", "/v1/workers")] == [True]


async def test_the_status_of_the_whole_service_is_one_response(api: Api):
    await api.create_run()
    await api.play(free=4)
    status = msgspec.convert(await api.ask("GET", "/v1/status"), messages.ServiceStatus)
    assert [run.name for run in status.runs] == ["run"]
    assert status.store["trajectories"] == 4
    assert status.store["log_bytes"] > 0
    assert status.epoch == 1


async def test_unknown_routes_and_methods_are_problems_that_name_the_alternatives(api: Api):
    assert "/docs" in (await api.ask("GET", "/v1/nothing", status=404))["hint"]
    problem = await api.ask("GET", "/v1/runs/run/pull", status=405)
    assert (problem["code"], problem["allowed"]) == ("method-not-allowed", ["POST"])
    async with api.session.get("/v1/runs/run/pull") as answer:
        assert answer.headers["Allow"] == "POST"


async def test_openapi_describes_every_route_with_types_that_exist(api: Api):
    document = await api.ask("GET", "/openapi.json")
    for route in ROUTES:
        assert route.method.lower() in document["paths"][route.path]
    text = msgspec.json.encode(document).decode()
    for name in re.findall(r'"#/components/schemas/([^"]+)"', text):
        assert name in document["components"]["schemas"], name
    async with api.session.get("/docs") as answer:
        page = await answer.text()
    assert "/v1/worker/lease" in page
    assert "<script src" not in page


async def test_an_unexpected_error_is_answered_with_an_id_that_is_in_the_log(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data_dir: Path
):
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("headrace_orchestrator.service.service.Service.status", broken)
    problem = await api.ask("GET", "/v1/status", status=500)
    assert problem["code"] == "internal-error"
    assert problem["incident"] in problem["hint"]
    assert "secret detail" not in str(problem)


async def test_a_body_over_the_limit_names_the_limit_and_the_setting(data_dir: Path):
    async with orchestrator(data_dir, max_body_bytes=1000) as api:
        problem = await api.ask("POST", "/v1/worker/submit?worker=w", bytes(1001), status=413)
        assert problem["limit_bytes"] == 1000
        assert "max_body_bytes" in problem["hint"]

        async def chunks():
            for _ in range(20):
                yield bytes(100)

        async with api.session.post("/v1/worker/submit?worker=w", data=chunks()) as answer:
            assert answer.status == 413


async def learner_waits(api: Api, wanted: bool = True) -> bool:
    return bool((await api.ask("GET", "/v1/runs/run"))["learner_waiting"]) == wanted


async def workers(api: Api) -> bool:
    return bool(await api.ask("GET", "/v1/workers"))


async def test_advantages_of_a_trajectory_are_those_of_the_batch_that_it_was_last_frozen_into(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=2, batch_size=4, max_staleness=3)
        await api.play(free=8, rewards=[0.25, 1.0])
        listed = (await api.ask("GET", "/v1/runs/run/trajectories"))["trajectories"]
        problem = await api.ask("GET", f"/v1/trajectories/{listed[0]['id']}/advantages", status=404)
        assert problem["code"] == "unknown-batch"
        assert "not in a batch yet" in problem["detail"]
        assert "pull" in problem["hint"]
        batch = await api.pull()
        assert isinstance(batch, Batch)
        await api.ack(batch, "0.1")
        await same_as(api, batch)
        problem = await api.ask("GET", "/v1/trajectories/nobody/advantages", status=404)
        assert problem["code"] == "unknown-trajectory"
    (data_dir / "projection.sqlite").unlink()
    async with orchestrator(data_dir) as api:
        await same_as(api, batch)


async def test_a_run_without_an_estimator_has_returns_and_no_advantages(api: Api):
    await api.create_run(group_size=1, batch_size=1, estimator={"name": "none"})
    await api.play(free=1)
    batch = await api.pull()
    assert isinstance(batch, Batch)
    found = await api.ask("GET", f"/v1/trajectories/{batch.trajectories[0].id}/advantages")
    assert found["estimator"] == "none"
    assert found["rows"] == [{"segment": 0, "returns": [1.0]}]


async def same_as(api: Api, batch: Batch) -> None:
    """Require the same advantages from the service and from the batch, for each of its trajectories."""
    for trajectory in batch.trajectories:
        answer = await api.ask("GET", f"/v1/trajectories/{trajectory.id}/advantages")
        found = msgspec.convert(answer, messages.TrajectoryAdvantages)
        rows = [row for row in batch.rows if row.trajectory is trajectory]
        assert (found.trajectory, found.batch, found.estimator) == (trajectory.id, batch.id, "rebn")
        assert [row.returns for row in found.rows] == [row.returns.tolist() for row in rows]
        assert [row.advantages for row in found.rows] == [row.advantages.tolist() for row in rows]
