"""Invalid input: each kind has its own error and status, which names the fault, and changes nothing."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.batch.batch import Batch
from headrace.errors import StoreError
from headrace.trajectory import PolicyRef, Provenance, Trajectory, Version, VersionRun
from headrace.wire import codec, messages
from headrace_orchestrator.service import submission_records as submitting
from headrace_orchestrator.service.storage.store import Store
from tests.builders import make_segment, make_trajectory, replace_segment, replace_turn
from tests.orchestrator.serving import Api, orchestrator, record_for, submission


async def test_an_unknown_environment_is_refused_where_the_known_ones_are_set(data_dir: Path):
    async with orchestrator(data_dir, environments=frozenset({"game:Known"})) as api:
        mixture = {"name": "run", "environments": [{"id": "game:Unknown"}]}
        problem = await api.ask("POST", "/v1/runs", mixture, status=404)
        assert problem["code"] == "unknown-environment"
        assert "game:Known" in problem["hint"]
        tasks = {"name": "run", "tasks": [{"environment": "game:Unknown"}]}
        assert (await api.ask("POST", "/v1/runs", tasks, status=404))["code"] == "unknown-environment"
        await api.ask("POST", "/v1/runs", {"name": "run"}, status=201)
        groups = {"groups": [{"task": {"environment": "game:Unknown"}}]}
        assert (await api.ask("POST", "/v1/runs/run/groups", groups, status=404))["environment"] == "game:Unknown"
        evaluation = {"tasks": [{"environment": "game:Unknown"}]}
        problem = await api.ask("POST", "/v1/runs/run/evaluations", evaluation, status=404)
        assert problem["code"] == "unknown-environment"


async def test_a_bad_run_spec_names_every_bad_field(api: Api):
    spec = {"name": "run", "group_size": 0, "learning_rate": 0.1}
    problem = await api.ask("POST", "/v1/runs", spec, status=422)
    assert problem["code"] == "invalid-run-spec"
    assert {item["field"] for item in problem["problems"]} == {"group_size", "learning_rate"}


async def test_an_environment_id_that_is_too_long_or_empty_is_refused_wherever_it_comes_from(api: Api):
    await api.create_run(name="there")
    for id in ("", "e" * 201):
        for source in ({"environments": [{"id": id}]}, {"tasks": [{"environment": id}]}):
            problem = await api.ask("POST", "/v1/runs", {"name": "run", **source}, status=422)
            assert "environment" in problem["problems"][0]["field"]
        task = {"environment": id}
        problem = await api.ask("POST", "/v1/runs/there/groups", {"groups": [{"task": task}]}, status=400)
        assert "environment: String should have at" in problem["detail"]
        await api.ask("POST", "/v1/runs/there/evaluations", {"tasks": [task]}, status=400)
    await api.create_run(name="longest", environments=[{"id": "e" * 200}])


async def test_a_run_is_created_once(api: Api):
    await api.create_run()
    problem = await api.ask("POST", "/v1/runs", {"name": "run"}, status=409)
    assert problem["code"] == "run-exists"


@pytest.mark.parametrize(
    ("body", "named"),
    [(b"{", "LeaseRequest"), (b"[]", "LeaseRequest"), (b'{"worker":"w","slots":"four","free":1}', "$.slots")],
)
async def test_malformed_json_names_the_field_that_is_wrong(api: Api, body: bytes, named: str):
    problem = await api.ask("POST", "/v1/worker/lease", body, status=400)
    assert problem["code"] == "invalid-request"
    assert named in problem["detail"]


@pytest.mark.parametrize("slots", [-1, 1 << 30])
@pytest.mark.parametrize("route", ["lease", "heartbeat"])
async def test_slots_that_no_worker_can_have_are_refused_and_counted_nowhere(api: Api, route: str, slots: int):
    body = {"worker": "w", "slots": slots, "free": 1}
    assert "$.slots" in (await api.ask("POST", f"/v1/worker/{route}", body, status=400))["detail"]
    assert await api.ask("GET", "/v1/workers") == []


async def test_numbers_in_the_query_are_checked(api: Api):
    await api.create_run()
    for query in ("limit=many", "limit=0", "limit=1001", "before=x"):
        await api.ask("GET", f"/v1/runs/run/trajectories?{query}", status=400)
    for wait_s in ("nan", "-1", "x"):
        await api.ask("GET", f"/v1/runs/run/hold?wait_s={wait_s}", status=400)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0",
        struct.pack("<I", 1000) + b"[]",
        struct.pack("<I", 2) + b"{}" + bytes(58),
        struct.pack("<I", 2) + b"[]"[:1],
        struct.pack("<I", 4) + b"[12]" + bytes(56),
    ],
)
async def test_a_submission_that_cannot_be_read_is_refused_whole(api: Api, body: bytes):
    problem = await api.ask("POST", "/v1/worker/submit?worker=w", body, status=400)
    assert problem["code"] == "invalid-request"


@pytest.mark.parametrize("change", [64, -64])
async def test_sizes_that_do_not_fit_the_body_refuse_it_whole(api: Api, change: int):
    await api.create_run()
    attempt = (await api.lease(free=1))[0]
    record = codec.encode(record_for(attempt))
    good = submission([(attempt, record)])
    bad = good + bytes(change) if change > 0 else good[:change]
    await api.ask("POST", "/v1/worker/submit?worker=worker-1", bad, status=400)
    assert [result.verdict for result in await api.submit(good)] == ["accepted"]


async def test_a_submission_without_a_worker_is_refused(api: Api):
    await api.ask("POST", "/v1/worker/submit", submission([]), status=400)


def _overlapping(record: Trajectory) -> Trajectory:
    return replace_turn(record, 1, start=record.segments[0].turns[0].end - 1)


def _out_of_range(record: Trajectory) -> Trajectory:
    tokens = record.segments[0].token_ids.copy()
    tokens[0] = 1024
    return replace_segment(record, token_ids=tokens)


def _nan_logprob(record: Trajectory) -> Trajectory:
    logprobs = record.segments[0].logprobs.copy()
    logprobs[record.segments[0].turns[0].start] = np.nan
    return replace_segment(record, logprobs=logprobs)


def _no_tokens(record: Trajectory) -> Trajectory:
    empty = {
        "token_ids": np.zeros(0, np.int32),
        "sampled": np.zeros(0, np.uint8),
        "logprobs": np.zeros(0, np.float32),
    }
    return replace_segment(record, **empty, turns=[], versions=[])


BAD_RECORDS: dict[str, Callable[[Trajectory], Trajectory]] = {
    "wrong-shape": _no_tokens,
    "token-out-of-range": _out_of_range,
    "spans-do-not-cover": _overlapping,
    "non-finite-value": lambda record: replace_turn(record, 0, reward=math.nan),
    "version-runs-do-not-cover": lambda record: replace_segment(record, versions=[VersionRun(2, 0, 0)]),
    "failure-has-reward": lambda record: msgspec.structs.replace(record, status="failed"),
    "version-unknown": lambda record: msgspec.structs.replace(
        record, segments=[make_segment(spans=[(6, 10)], version=Version(7, 7))]
    ),
    "invalid-trajectory": lambda record: msgspec.structs.replace(record, group="another"),
}


@pytest.mark.parametrize("code", BAD_RECORDS)
async def test_a_bad_record_costs_only_itself(api: Api, code: str):
    await api.create_run()
    attempts = await api.lease(free=2)
    records = [record_for(attempt, turns=2) for attempt in attempts]
    bad = BAD_RECORDS[code](records[0])
    results = await api.submit(submission(zip(attempts, [bad, records[1]], strict=True)))
    assert [result.verdict for result in results] == ["refused", "accepted"]
    problem: Any = results[0].problem
    assert problem["code"] == code
    assert problem["detail"]
    # The attempt is still the worker's: a good record is taken.
    results = await api.submit(submission([(attempts[0], records[0])]))
    assert [result.verdict for result in results] == ["accepted"]


@pytest.mark.parametrize("reward", [math.inf, -math.inf, math.nan])
async def test_a_reward_that_is_not_a_number_is_refused(api: Api, reward: float):
    await api.create_run()
    attempt = (await api.lease(free=1))[0]
    bad = replace_turn(record_for(attempt), 0, reward=reward)
    results = await api.submit(submission([(attempt, bad)]))
    assert [(result.verdict, (result.problem or {})["code"]) for result in results] == [("refused", "non-finite-value")]


async def test_a_logprob_that_is_not_a_number_is_refused(api: Api):
    await api.create_run()
    attempt = (await api.lease(free=1))[0]
    results = await api.submit(submission([(attempt, _nan_logprob(record_for(attempt)))]))
    assert (results[0].problem or {})["code"] == "non-finite-value"


async def test_bytes_that_are_not_a_record_or_whose_arrays_do_not_fit_are_refused(api: Api):
    await api.create_run()
    attempt = (await api.lease(free=1))[0]
    record = codec.encode(record_for(attempt))
    # A float64 array in place of the float32 one makes the record longer than its lengths say.
    longer = record + bytes(64)
    for bad in (bytes(64), b"x" * 128, longer):
        results = await api.submit(submission([(attempt, bad)]))
        assert [(r.verdict, (r.problem or {})["code"]) for r in results] == [("refused", "unreadable-record")]


async def test_a_record_of_another_episode_than_its_head_names_is_refused(api: Api):
    await api.create_run()
    one, two = await api.lease(free=2)
    results = await api.submit(submission([(one, record_for(two))]))
    assert (results[0].problem or {})["code"] == "invalid-trajectory"


async def test_the_result_of_a_superseded_attempt_says_so(api: Api):
    await api.create_run()
    old = (await api.lease(free=1))[0]
    key = messages.AttemptKey(old.episode, old.attempt, old.nonce)
    await api.ask("POST", "/v1/worker/return", messages.ReturnRequest(worker="worker-1", attempts=[key]))
    new = next(a for a in await api.lease("worker-2", free=4) if a.episode == old.episode)
    assert new.attempt == old.attempt + 1
    results = await api.submit(submission([(old, record_for(old))]))
    assert [(result.verdict, result.problem["code"]) for result in results] == [("superseded", "attempt-superseded")]


async def test_another_workers_attempt_and_a_wrong_nonce_are_not_yours(api: Api):
    await api.create_run()
    mine = (await api.lease(free=1))[0]
    body = submission([(mine, record_for(mine, provenance=Provenance(worker="worker-2")))])
    assert [result.verdict for result in await api.submit(body, worker="worker-2")] == ["not-yours"]
    forged = msgspec.structs.replace(mine, nonce="guess")
    (result,) = await api.submit(submission([(forged, record_for(mine))]))
    assert (result.verdict, result.problem["code"]) == ("not-yours", "attempt-not-yours")


async def test_an_unknown_episode_is_superseded(api: Api):
    await api.create_run()
    attempt = msgspec.structs.replace((await api.lease(free=1))[0], episode="nobody")
    results = await api.submit(submission([(attempt, record_for(attempt))]))
    assert [(result.verdict, result.problem["code"]) for result in results] == [("superseded", "attempt-superseded")]


async def pulled(api: Api) -> Batch:
    await api.create_run(batch_lease_s=300)
    await api.play(free=4)
    batch = await api.pull()
    assert isinstance(batch, Batch)
    return batch


async def test_a_batch_is_acked_at_most_once(api: Api):
    batch = await pulled(api)
    await api.ack(batch, "0.1")
    problem = await api.ack(batch, "0.2", status=409)
    assert problem["code"] == "batch-already-acked"
    assert (await api.ask("GET", "/v1/runs/run"))["version"] == "0.1"


async def test_an_ack_of_an_old_generation_is_superseded(api: Api):
    batch = await pulled(api)
    again = await api.pull(session="two")
    assert isinstance(again, Batch)
    assert (again.id, again.generation) == (batch.id, 2)
    problem = await api.ack(batch, "0.1", status=409)
    assert problem["code"] == "batch-superseded"
    await api.ack(again, "0.1", session="two")


async def test_an_ack_that_is_late_is_superseded(api: Api):
    batch = await pulled(api)
    back = {"learner": "learner", "session": "one", "generation": 1, "reason": "gone"}
    await api.ask("POST", f"/v1/runs/run/batches/{batch.id}/nack", back)
    other = await api.pull(learner="another", session="x")
    assert isinstance(other, Batch)
    assert (await api.ack(batch, "0.1", status=409))["code"] == "batch-superseded"


async def test_a_version_that_was_never_announced_is_refused(api: Api):
    batch = await pulled(api)
    assert (await api.ack(batch, "5.1", status=409))["code"] in ("version-unknown", "version-conflict")
    problem = await api.ask("POST", "/v1/runs/run/rewind", {"version": "0.9"}, status=409)
    assert problem["code"] == "version-unknown"
    await api.ask("POST", "/v1/runs/run/version", {"version": "0.2"})
    problem = await api.ask("POST", "/v1/runs/run/version", {"version": "0.1"}, status=409)
    assert problem["code"] == "version-conflict"


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/v1/runs/nobody", "unknown-run"),
        ("POST", "/v1/runs/nobody/close", "unknown-run"),
        ("GET", "/v1/runs/nobody/trajectories", "unknown-run"),
        ("GET", "/v1/trajectories/nobody", "unknown-trajectory"),
        ("GET", "/v1/runs/run/evaluations/nobody", "unknown-evaluation"),
    ],
)
async def test_a_missing_thing_has_an_error_of_its_own(api: Api, method: str, path: str, code: str):
    await api.create_run()
    assert (await api.ask(method, path, status=404))["code"] == code


async def test_an_unknown_batch_and_an_unknown_group_are_not_found(api: Api):
    await api.create_run()
    ack = {"learner": "learner", "session": "one", "generation": 1}
    assert (await api.ask("POST", "/v1/runs/run/batches/x/ack", ack, status=404))["code"] == "unknown-batch"
    pull = {"learner": "learner", "session": "one", "request": "r", "groups": ["nobody"]}
    assert (await api.ask("POST", "/v1/runs/run/pull", pull, status=404))["code"] == "unknown-group"


async def test_a_trajectory_id_is_used_once(api: Api):
    await api.create_run()
    one, two = await api.lease(free=2)
    name = make_trajectory().id
    results = await api.submit(submission([(one, record_for(one, id=name)), (two, record_for(two, id=name))]))
    assert [result.verdict for result in results] == ["accepted", "refused"]


async def test_a_trajectory_id_of_a_stored_record_is_refused_whatever_run_it_is_of(api: Api):
    await api.create_run()
    one = (await api.lease(free=1))[0]
    record = record_for(one)
    assert [r.verdict for r in await api.submit(submission([(one, record)]))] == ["accepted"]
    await api.create_run(name="other")
    for projected in (False, True):
        if projected:
            await api.ask("GET", "/v1/runs/run/trajectories")
        two = next(a for a in await api.lease(free=64, holding=[]) if a.run == "other")
        results = await api.submit(submission([(two, record_for(two, id=record.id))]))
        assert [r.verdict for r in results] == ["refused"]
        assert results[0].problem is not None
        assert record.id in results[0].problem["detail"]
    # The same episode may send it again.
    assert [r.verdict for r in await api.submit(submission([(one, record)]))] == ["duplicate"]


async def test_an_unexpected_error_over_one_record_costs_only_that_record(api: Api, monkeypatch: pytest.MonkeyPatch):
    await api.create_run()
    one, two = await api.lease(free=2)
    real = submitting.validate

    def trip(trajectory: Trajectory) -> None:
        if trajectory.episode == one.episode:
            raise OverflowError("intermediate overflow")
        real(trajectory)

    monkeypatch.setattr(submitting, "validate", trip)
    results = await api.submit(submission([(one, record_for(one)), (two, record_for(two))]))
    assert [result.verdict for result in results] == ["refused", "accepted"]
    assert results[0].problem is not None
    assert results[0].problem["code"] == "internal-error"


async def test_rewards_whose_sum_would_overflow_cost_only_their_record(api: Api):
    await api.create_run()
    one, two = await api.lease(free=2)
    body = submission([(one, record_for(one, rewards=[1e308, 1e308])), (two, record_for(two))])
    results = await api.submit(body)
    assert [result.verdict for result in results] == ["refused", "accepted"]
    assert results[0].problem is not None
    assert results[0].problem["code"] == "non-finite-value"


async def test_a_record_that_contradicts_its_worker_or_what_its_run_trains_is_refused(api: Api):
    await api.create_run(policy={"base": "policy", "agents": {"rival": {"train": False}, "pupil": {"base": "other"}}})
    attempt = (await api.lease(free=1))[0]
    other = msgspec.structs.replace(make_segment(), policy=PolicyRef(base="other"))
    refused = {
        "worker": record_for(attempt, provenance=Provenance(worker="somebody")),
        "somebody": record_for(attempt, provenance=Provenance(worker="")),
        "'other'": record_for(attempt, segments=[other]),
        "rival": record_for(attempt, segments=[make_segment(agent="rival")]),
        "pupil": record_for(attempt, segments=[make_segment(agent="pupil")]),
    }
    for record in refused.values():
        results = await api.submit(submission([(attempt, record)]))
        assert [result.verdict for result in results] == ["refused"]
        assert results[0].problem is not None
        assert results[0].problem["code"] == "invalid-trajectory"
    allowed = record_for(attempt, segments=[msgspec.structs.replace(other, agent="pupil")])
    assert [r.verdict for r in await api.submit(submission([(attempt, allowed)]))] == ["accepted"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"seed": 2**63}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"max_bytes": 2**70}, "max_bytes"),
        ({"batch_size": 2**40}, "batch_size"),
        ({"environments": [{"id": "test:Echo", "kwargs": {"n": 2**70}}]}, "environments.0.kwargs"),
        ({"environments": [], "tasks": [{"environment": "test:Echo", "example": {"n": [2**70]}}]}, "tasks.0.example"),
    ],
)
async def test_a_run_spec_that_could_not_be_stored_is_refused(api: Api, fields: dict[str, Any], named: str):
    spec = {"name": "run", "environments": [{"id": "test:Echo"}], **fields}
    problem = await api.ask("POST", "/v1/runs", json.dumps(spec).encode(), status=422)
    assert problem["code"] == "invalid-run-spec"
    assert named in {item["field"] for item in problem["problems"]}
    assert await api.ask("GET", "/v1/runs") == []


@pytest.mark.parametrize("group", [{"task": {"kwargs": {"n": 2**70}}}, {"size": 2**70}, {"task": {"seed": 2**70}}])
async def test_a_number_beyond_64_bits_is_refused_and_named(api: Api, group: dict[str, Any]):
    await api.create_run(environments=[])
    body = json.dumps({"groups": [{**group, "task": {"environment": "test:Echo", **group.get("task", {})}}]}).encode()
    problem = await api.ask("POST", "/v1/runs/run/groups", body, status=400)
    assert problem["code"] == "invalid-request"
    assert "groups.0." in problem["detail"]
    assert await api.ask("GET", "/v1/runs/run/groups") == []


async def test_a_version_beyond_what_can_be_stored_is_refused(api: Api):
    await api.create_run()
    for version in (f"0.{2**31}", f"0.{2**64}", f"{2**64}.0", "0." + "9" * 5000):
        for path in ("version", "rewind"):
            answer = await api.ask("POST", f"/v1/runs/run/{path}", {"version": version}, status=400)
            assert answer["code"] == "invalid-request"
    assert (await api.ask("GET", "/v1/runs/run"))["version"] == "0.0"


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\u0000"])
async def test_names_are_printable_not_empty_and_bounded(api: Api, name: str):
    await api.create_run()
    lease = {"worker": name, "slots": 1, "free": 1}
    assert "worker" in (await api.ask("POST", "/v1/worker/lease", lease, status=400))["detail"]
    pull = {"learner": "l", "session": "s", "request": "r"}
    for field in pull:
        problem = await api.ask("POST", "/v1/runs/run/pull", {**pull, field: name}, status=400)
        assert field in problem["detail"]
    if name:
        group = {"id": name, "task": {"environment": "test:Echo"}}
        problem = await api.ask("POST", "/v1/runs/run/groups", {"groups": [group]}, status=400)
        assert "groups.0.id" in problem["detail"]


async def test_json_that_is_nested_too_deep_is_refused(api: Api):
    await api.create_run()
    for depth in (200, 100_000):
        deep = b"[" * depth + b"]" * depth
        task = b'{"environment":"test:Echo","kwargs":{"x":' + deep + b"}}"
        await api.ask("POST", "/v1/runs/run/groups", b'{"groups":[{"task":' + task + b"}]}", status=400)
        assert (await api.ask("POST", "/v1/worker/lease", deep, status=400))["code"] == "invalid-request"
    spec = b'{"name":"deep","tasks":[{"environment":"test:Echo","kwargs":{"x":' + b"[" * 200 + b"]" * 200 + b"}}]}"
    assert "kwargs" in (await api.ask("POST", "/v1/runs", spec, status=422))["detail"]


async def test_a_position_beyond_every_listing_is_refused(api: Api):
    await api.create_run()
    for before in ("9" * 20, "-1", "9" * 5000):
        await api.ask("GET", f"/v1/runs/run/trajectories?before={before}", status=400)


async def test_a_record_is_not_refused_because_the_projection_fails(api: Api, monkeypatch: pytest.MonkeyPatch):
    def fail(store: Store, trajectories: list[str]) -> dict[str, str]:
        raise StoreError("The projection failed.")

    await api.create_run()
    attempt = (await api.lease(free=1))[0]
    body = submission([(attempt, record_for(attempt))])
    with monkeypatch.context() as patch:
        patch.setattr(Store, "episodes_of", fail)
        await api.ask("POST", "/v1/worker/submit?worker=worker-1", body, status=507)
    assert [result.verdict for result in await api.submit(body)] == ["accepted"]
