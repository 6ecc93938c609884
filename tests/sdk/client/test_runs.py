"""Runs, groups, evaluations and trajectories: both clients against a scripted server."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import (
    GroupExists,
    InvalidRunSpec,
    RunExists,
)
from headrace.runspec import RunSpec, TaskSpec
from headrace.trajectory import Task
from headrace.wire import codec, messages
from tests import builders
from tests.sdk.client.both_clients import Connect
from tests.sdk.client.routes import SPEC, run_status
from tests.sdk.client.stub_server import NO_RESPONSE, ReceivedRequest, Reply, StubServer, ok, problem


def test_exist_ok_accepts_an_existing_run_with_the_same_spec(stub: StubServer, connect: Connect) -> None:
    stub.on("POST /v1/runs", problem(RunExists("A run has that name.")))
    stub.on("GET /v1/runs/guess", ok(run_status()))
    with connect() as client:
        assert client.create_run(RunSpec.model_validate(SPEC), exist_ok=True).name == "guess"
        with pytest.raises(RunExists, match="another spec: seed, batch_size differ"):
            client.create_run({**SPEC, "seed": 5, "batch_size": 7}, exist_ok=True)
        with pytest.raises(RunExists, match="A run has that name"):
            client.create_run(SPEC)


def test_a_bad_spec_is_refused_before_anything_is_sent(stub: StubServer, connect: Connect) -> None:
    with connect() as client, pytest.raises(InvalidRunSpec, match="batch_size"):
        client.create_run({**SPEC, "batch_size": 0})
    assert stub.requests == []


def test_a_spec_is_sent_as_it_was_given(stub: StubServer, connect: Connect) -> None:
    stub.on("POST /v1/runs", ok(run_status(), status=201))
    with connect() as client:
        client.create_run(SPEC)
    assert stub.requests_to("POST /v1/runs")[0].json == SPEC


def test_groups_get_an_id_so_that_a_repeated_submission_is_recognized(stub: StubServer, connect: Connect) -> None:
    route = "POST /v1/runs/guess/groups"
    stub.on(route, NO_RESPONSE, problem(GroupExists("It exists.")))
    tasks: list[Any] = [Task(environment="e", seed=1), {"environment": "e", "seed": 2}, TaskSpec(environment="e")]
    with connect() as client:
        ids = client.submit_groups(
            "guess", [*tasks, messages.GroupRequest(task={"environment": "e"}, size=4, id="mine")]
        )
    first, second = (request.json["groups"] for request in stub.requests_to(route))
    assert first == second
    assert ids == [group["id"] for group in first]
    assert ids[3] == "mine"
    assert first[1]["task"] == {"environment": "e", "seed": 2}


def test_an_evaluation_is_awaited_to_its_end(stub: StubServer, connect: Connect) -> None:
    def reply(done: int) -> Reply:
        return ok(
            messages.EvaluationReply(
                epoch=1, evaluation="e1", version="0.3", wanted=2, done=done, finished=done == 2, hold_s=0.0
            )
        )

    stub.on("POST /v1/runs/guess/evaluations", reply(0))
    stub.on("GET /v1/runs/guess/evaluations/e1", reply(1), reply(2))
    with connect(poll_s=0.01) as client:
        evaluation = client.evaluate("guess", [{"environment": "e", "seed": 1}], episodes_per_task=2, temperature=0.0)
        assert not client.evaluate("guess", [{"environment": "e"}], wait=False).finished
    assert evaluation.done == 2
    assert stub.requests[0].json["temperature"] == 0.0


def test_trajectories_are_listed_page_by_page(stub: StubServer, connect: Connect) -> None:
    def listing(request: ReceivedRequest) -> Reply:
        start = int(request.query.get("before", 4))
        shown = [summary(number) for number in range(start - 1, start - 3, -1)]
        return ok(messages.TrajectoryList(epoch=1, trajectories=shown, next=str(start - 2) if start > 2 else ""))

    stub.on("GET /v1/runs/guess/trajectories", listing)
    with connect() as client:
        ids = [item.id for item in client.trajectories("guess", status="failed", page=2)]
    assert ids == ["t3", "t2", "t1", "t0"]
    assert stub.requests[0].query == {"status": "failed", "limit": "2"}


def summary(number: int) -> messages.TrajectorySummary:
    return messages.TrajectorySummary(
        id=f"t{number}",
        run="guess",
        group="g",
        member=0,
        episode="e",
        attempt=1,
        environment="env",
        status="finished",
        stop_reason="terminated",
        reward=1.0,
        turns=2,
        row_tokens=10,
        size_bytes=100,
    )


def test_a_trajectory_is_read_from_its_record(stub: StubServer, connect: Connect) -> None:
    expected = builders.make_trajectory(number=5)
    stub.on(f"GET /v1/trajectories/{expected.id}", Reply(200, codec.encode(expected), messages.RECORDS_MEDIA_TYPE))
    with connect() as client:
        assert client.trajectory(expected.id).task == expected.task


def test_policy_servers_are_read_added_drained_and_removed(stub: StubServer, connect: Connect) -> None:
    servers = [messages.PolicyServerStatus(address="http://a:1", state="serving", version="0.3")]
    path = "/v1/runs/guess/servers"
    stub.on(f"GET {path}", ok(messages.PolicyServersReply(epoch=1, revision=8, servers=servers)))
    for route in (f"POST {path}", f"POST {path}/drain", f"DELETE {path}"):
        stub.on(route, ok({}))
    with connect() as client:
        assert client.servers("guess", revision=7, wait_s=2.0).servers == servers
        client.add_server("guess", "http://b:1")
        client.drain_server("guess", "http://b:1")
        client.remove_server("guess", "http://b:1")
    assert stub.requests_to(f"GET {path}")[0].query == {"revision": "7", "wait_s": "2"}
    assert stub.requests_to(f"DELETE {path}")[0].json == {"address": "http://b:1"}


def test_status_and_hold_are_read(stub: StubServer, connect: Connect) -> None:
    status = messages.ServiceStatus(epoch=1, version="0.0.1", uptime_s=1.0, runs=[], workers=[], store={})
    stub.on("GET /v1/status", ok(status))
    stub.on("GET /v1/runs/guess/hold", ok(messages.HoldReply(epoch=1, hold_s=3.0, evaluations=["e1"])))
    stub.on("POST /v1/runs/guess/close", ok(run_status(state="closed")))
    with connect() as client:
        assert client.status() == status
        assert client.hold("guess", wait_s=2.0).evaluations == ["e1"]
        client.close_run("guess")
    assert stub.requests_to("GET /v1/runs/guess/hold")[0].query == {"wait_s": "2"}
