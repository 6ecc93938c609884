"""Both clients against a scripted server on a real socket."""

from __future__ import annotations

import builtins
import inspect
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace import codec, wire
from headrace.aio import AsyncClient
from headrace.assets import asset_of, decode_array, encode_array, pack_assets
from headrace.batch import build_head
from headrace.client import Client
from headrace.errors import (
    BatchAlreadyAcked,
    BatchSuperseded,
    CorruptAsset,
    GroupExists,
    HeadraceError,
    InvalidRequest,
    InvalidRunSpec,
    MissingExtra,
    NothingToServe,
    RequestTooLarge,
    RunExists,
    RunFinished,
    ServiceError,
    StoreError,
    Unavailable,
    UnknownAsset,
    UnknownRun,
    VersionConflict,
)
from headrace.runspec import EstimatorSpec, RunSpec, TaskSpec
from headrace.strands import GroupInput
from headrace.trajectory import Task, Version
from tests import builders
from tests.client.both import CLIENTS, Driven
from tests.client.stub import LOST, Reply, Seen, Stub, batch, good, page, problem

PULL = "POST /v1/runs/guess/pull"
DOING = "POST /v1/runs/guess/doing"
ACK = "POST /v1/runs/guess/batches/batch-1/ack"
COLLECTING = wire.Reason(code="collecting", message="3 of 8 groups are complete.")
EMPTY = wire.EmptyReply(epoch=1, reasons=[COLLECTING])
FINISHED = wire.EmptyReply(epoch=1, reasons=[wire.Reason(code="closed", message="Closed.")], finished=True)
SPEC: dict[str, Any] = {"name": "guess", "environments": [{"id": "game:GuessTheNumber-v0-hard"}]}

Connect = Callable[..., Any]


def run_status(**fields: Any) -> wire.RunStatus:
    given: dict[str, Any] = {
        "name": "guess",
        "state": "active",
        "version": "0.3",
        "spec": SPEC,
        "groups": wire.GroupCounts(),
        "credit": 0,
        "in_flight": 0,
        "queued": 0,
        "leased": 0,
        "episodes": {},
        "batches_acked": 0,
        "batches_open": 0,
        "learner_doing": "",
        "learner_doing_s": -1.0,
        "learner_waiting": False,
        "reasons": [],
    }
    return wire.RunStatus(**{**given, **fields})


@pytest.fixture(params=CLIENTS, ids=["sync", "async"])
def connect(request: pytest.FixtureRequest, stub: Stub) -> Connect:
    """Makes a client of the stub; small waits, because the stub answers at once."""
    kind = request.param

    def make(**options: Any) -> Any:
        return kind(stub.url, **{"retry_for_s": 5.0, "keepalive": False, **options})

    return make


PICTURE, EXPERTS = asset_of(b"pixels", "image/png"), encode_array(np.arange(12, dtype=np.uint8).reshape(3, 4))
ASSETS = "POST /v1/assets"


def assets_reply(found: list[bytes | HeadraceError]) -> Reply:
    return Reply(200, pack_assets(found), wire.ASSETS_MEDIA_TYPE, {wire.HEADER_EPOCH: "1"})


def body_with_assets() -> bytes:
    """A batch of one trajectory that refers to two assets."""
    trajectory = builders.make_trajectory(assets=[PICTURE.entry, EXPERTS.entry])
    record = codec.encode(trajectory)
    group = GroupInput("g", trajectory.task, 1, [(codec.decode_head(record), len(record))])
    head = build_head(batch="batch-1", run="guess", estimator=EstimatorSpec(), version=Version(0, 3), groups=[group])
    return head + record


# Requests and answers


def test_a_pull_gives_a_batch_whose_arrays_are_views_of_one_aligned_buffer(
    stub: Stub, connect: Connect, body: bytes
) -> None:
    stub.on(PULL, batch(body, generation=2, lease_s=120.0))
    with connect(learner="trainer") as client:
        pulled = client.pull("guess")
    assert (pulled.id, pulled.generation, pulled.lease_s) == ("batch-1", 2, 120.0)
    tokens = pulled.rows[0].token_ids
    assert np.shares_memory(tokens, np.frombuffer(pulled.records, np.uint8))
    assert np.frombuffer(pulled.records, np.uint8).ctypes.data % 64 == 0
    (asked,) = stub.asked(PULL)
    assert asked.json["learner"] == "trainer"
    assert asked.json["wait_s"] == 20.0


def test_a_pull_may_ask_for_environments_and_tags(stub: Stub, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body), batch(body))
    with connect() as client:
        client.pull("guess", environments=["game:A", "game:B"], tags=["hard"])
        next(iter(client.batches("guess", tags={"easy"})))
    first, second = stub.asked(PULL)
    assert (first.json["environments"], first.json["tags"]) == (["game:A", "game:B"], ["hard"])
    assert ("environments" in second.json, second.json["tags"]) == (False, ["easy"])


def test_priorities_are_set_by_group(stub: Stub, connect: Connect) -> None:
    reply = wire.PrioritiesReply(epoch=1, set=1, over=["g2"])
    stub.on("POST /v1/runs/guess/priorities", good(reply))
    with connect() as client:
        assert client.set_priorities("guess", {"g1": 2, "g2": np.float64(0.5)}) == reply
    (asked,) = stub.asked("POST /v1/runs/guess/priorities")
    assert asked.json == {"priorities": {"g1": 2.0, "g2": 0.5}}


def test_a_token_travels_as_a_bearer_and_nothing_asks_for_compression(stub: Stub, connect: Connect) -> None:
    stub.on("GET /v1/runs", good([]))
    with connect(token="sesame") as client:
        assert client.runs() == []
    (asked,) = stub.asked("GET /v1/runs")
    assert asked.headers["Authorization"] == "Bearer sesame"
    assert asked.headers["Accept-Encoding"] == "identity"


def test_address_and_token_come_from_the_environment_unless_they_are_given(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_URL", stub.url)
    monkeypatch.setenv("HEADRACE_TOKEN", "sesame")
    stub.on("GET /v1/runs", good([]))
    with Client() as client:
        client.runs()
    assert stub.asked("GET /v1/runs")[0].headers["Authorization"] == "Bearer sesame"


def test_proxy_settings_of_the_environment_are_ignored(
    stub: Stub, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    stub.on("GET /v1/runs", good([run_status()]))
    with connect() as client:
        assert client.runs()[0].name == "guess"


def test_a_connection_is_kept_between_calls(stub: Stub, connect: Connect) -> None:
    stub.on("GET /v1/runs", good([]))
    with connect() as client:
        client.runs()
        client.runs()
    first, second = stub.asked("GET /v1/runs")
    assert first.connection == second.connection


def test_a_connection_that_the_server_has_closed_is_not_used_again(stub: Stub, connect: Connect) -> None:
    reply = wire.VersionReply(epoch=1, version="1.2")
    stub.on("GET /v1/runs", replace(good([]), hang_up=True))
    stub.on("POST /v1/runs/guess/rewind", good(reply))
    with connect() as client:
        client.runs()
        assert stub.hung_up.wait(10)
        assert client.rewind("guess", "0.2") == reply


def test_several_threads_may_share_a_client(stub: Stub) -> None:
    stub.on("GET /v1/runs", good([run_status()]))
    with Client(stub.url) as client, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: client.runs()[0].name, range(40)))
    assert found == ["guess"] * 40


def test_names_are_quoted_in_paths(stub: Stub, connect: Connect) -> None:
    stub.on("POST /v1/workers/a%2Fb%20c/drain", good({"epoch": 1}))
    with connect() as client:
        client.drain_worker("a/b c")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8470", "ftp://host", "http://", "http://host:port"])
def test_what_is_no_address_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"http://127\.0\.0\.1:8470"):
        Client(url or "nowhere")


def test_errors_of_the_service_come_back_as_their_own_class(stub: Stub, connect: Connect) -> None:
    stub.on("GET /v1/runs/gues", problem(UnknownRun("No run 'gues'.", hint="Known: guess.", known=["guess"])))
    with connect() as client, pytest.raises(UnknownRun, match=r"No run 'gues'\. Known: guess\.") as caught:
        client.run("gues")
    assert caught.value.extra == {"known": ["guess"]}


# Retries


def test_calls_that_may_be_repeated_are_until_there_is_an_answer(stub: Stub, connect: Connect) -> None:
    starting = problem(Unavailable("Reading the log."))
    stub.on("GET /v1/runs", LOST, starting, page(502), Reply(200, b"[]" * 5, cut=True), good([]))
    with connect() as client:
        assert client.runs() == []
    assert len(stub.asked("GET /v1/runs")) == 5


def test_an_outage_longer_than_retry_for_s_ends_in_unavailable(connect: Connect, stub: Stub) -> None:
    stub.on("GET /v1/runs", LOST)
    with connect(retry_for_s=0.1) as client, pytest.raises(Unavailable, match="No answer") as caught:
        client.runs()
    assert caught.value.extra["outcome"] == "unknown"


@pytest.mark.parametrize("kind", CLIENTS, ids=["sync", "async"])
def test_nothing_listening_says_so_with_the_address(kind: Connect) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with (
            kind(url, retry_for_s=0.0) as client,
            pytest.raises(Unavailable, match=f"cannot connect to {url}") as caught,
        ):
            client.runs()
    assert caught.value.extra["outcome"] == "not-done"


def test_what_may_have_been_done_and_must_not_be_repeated_is_not(stub: Stub, connect: Connect) -> None:
    stub.on("POST /v1/runs/guess/rewind", LOST)
    stub.on("POST /v1/runs/guess/evaluations", LOST)
    with connect() as client:
        with pytest.raises(Unavailable):
            client.rewind("guess", "0.2")
        with pytest.raises(Unavailable):
            client.evaluate("guess", [{"environment": "e"}])
    assert len(stub.seen) == 2


def test_what_was_surely_not_done_is_repeated_whatever_it_is(stub: Stub, connect: Connect) -> None:
    reply = wire.VersionReply(epoch=1, version="1.2")
    stub.on("POST /v1/runs/guess/rewind", problem(Unavailable("Starting.")), good(reply))
    with connect() as client:
        assert client.rewind("guess", Version(0, 2)).version == "1.2"


def test_a_disk_that_refuses_is_waited_for_like_an_outage(stub: Stub, connect: Connect) -> None:
    full = problem(StoreError("The log cannot be written: No space left on device."))
    stub.on("GET /v1/runs", full, full, good([]))
    stub.on("POST /v1/runs/guess/rewind", full)
    with connect() as client:
        assert client.runs() == []
        with pytest.raises(StoreError):  # it may be stored all the same, and must not be done twice
            client.rewind("guess", "0.2")
    assert len(stub.asked("POST /v1/runs/guess/rewind")) == 1
    stub.on("GET /v1/runs/guess", full)
    with connect(retry_for_s=0.0) as client, pytest.raises(StoreError, match="No space left"):
        client.run("guess")


def test_an_answer_of_an_older_epoch_is_refused_and_asked_for_again(stub: Stub, connect: Connect) -> None:
    old, new = run_status(version="0.1"), run_status(version="0.9")
    stub.on("GET /v1/runs/guess", good(new, epoch=7), good(old, epoch=6), good(new, epoch=7))
    with connect() as client:
        assert client.run("guess").version == "0.9"
        assert client.run("guess").version == "0.9"
    assert len(stub.seen) == 3


def test_only_older_answers_end_in_an_error_that_names_both_epochs(stub: Stub, connect: Connect) -> None:
    stub.on("GET /v1/runs", good([], epoch=7), good([], epoch=6))
    with connect(retry_for_s=0.0) as client:
        client.runs()
        with pytest.raises(Unavailable, match=r"epoch 6, but epoch 7"):
            client.runs()


# Proxies in between (G04)


def test_a_proxys_page_is_repeated_under_the_same_request_id_and_with_a_shorter_wait(
    stub: Stub, connect: Connect, body: bytes
) -> None:
    stub.on(PULL, page(504), page(504), batch(body))
    with connect() as client:
        assert client.pull("guess").id == "batch-1"
    asked = [seen.json for seen in stub.asked(PULL)]
    assert len({seen["request"] for seen in asked}) == 1
    assert [seen["wait_s"] for seen in asked] == [20.0, 10.0, 5.0]


def test_a_proxys_page_becomes_an_error_with_status_media_type_and_wait(stub: Stub, connect: Connect) -> None:
    stub.on(PULL, page(504))
    with connect(retry_for_s=0.0) as client, pytest.raises(Unavailable) as caught:
        client.pull("guess")
    assert "proxy" in str(caught.value)
    assert "504 (text/html)" in str(caught.value)
    assert "wait_s = 20" in str(caught.value)
    assert caught.value.extra["server"] == "proxy/1.0"


def test_a_pull_that_gave_up_is_taken_up_by_the_next_one(stub: Stub, connect: Connect, body: bytes) -> None:
    stub.on(PULL, page(504), batch(body))
    with connect(retry_for_s=0.0) as client:
        with pytest.raises(Unavailable):
            client.pull("guess")
        client.pull("guess")
        client.pull("guess")
    first, second, third = (seen.json["request"] for seen in stub.asked(PULL))
    assert first == second != third


def test_a_refused_body_names_its_size_and_the_limit_to_raise(stub: Stub, connect: Connect) -> None:
    stub.on("POST /v1/runs", page(413))
    with connect() as client, pytest.raises(RequestTooLarge, match="max_body_bytes"):
        client.create_run(SPEC)


def test_a_page_with_a_good_status_is_no_decoding_error(stub: Stub, connect: Connect) -> None:
    stub.on("GET /v1/runs", page(200))
    stub.on(PULL, page(200))
    with connect() as client:
        with pytest.raises(ServiceError, match="text/html"):
            client.runs()
        with pytest.raises(ServiceError, match="not a batch"):
            client.pull("guess")


# Pulling


def test_waiting_goes_on_over_empty_polls_and_tells_why(stub: Stub, connect: Connect, body: bytes) -> None:
    told: list[tuple[str, list[wire.Reason]]] = []
    stub.on(PULL, good(EMPTY), good(EMPTY), batch(body))
    with connect(poll_s=0.01, on_wait=lambda run, reasons: told.append((run, reasons))) as client:
        client.pull("guess")
    assert told == [("guess", [COLLECTING])] * 2


def test_who_waits_in_silence_sees_the_reasons_where_logging_was_never_set_up(
    stub: Stub, connect: Connect, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = wire.EmptyReply(epoch=1, reasons=[wire.Reason(code="no-workers", message="no workers in pool 'gpu'")])
    stub.on(PULL, good(waiting), batch(body))
    with connect(poll_s=0.01) as client:
        client.pull("guess")
    (record,) = [record for record in caplog.records if record.name == "headrace.client"]
    assert record.levelname == "WARNING"
    assert record.getMessage() == "Run 'guess' has no batch yet. no workers in pool 'gpu'."


def test_patience_that_ends_first_says_what_it_waited_on(stub: Stub, connect: Connect) -> None:
    stub.on(PULL, good(EMPTY))
    with connect() as client, pytest.raises(NothingToServe, match="3 of 8 groups are complete") as caught:
        client.pull("guess", timeout_s=0)
    assert caught.value.extra["reasons"] == [{"code": "collecting", "message": COLLECTING.message}]


def test_batches_end_when_the_run_is_finished(stub: Stub, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body), good(FINISHED))
    with connect() as client:
        assert [pulled.id for pulled in client.batches("guess")] == ["batch-1"]
        with pytest.raises(RunFinished, match="Closed"):
            client.pull("guess")


def test_submitted_groups_are_awaited_by_id(stub: Stub, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body))
    with connect() as client:
        client.pull("guess", groups=["g1", "g2"])
    assert stub.asked(PULL)[0].json["groups"] == ["g1", "g2"]


def test_a_batch_that_its_lease_did_not_come_with_is_refused(stub: Stub, connect: Connect, body: bytes) -> None:
    stub.on(PULL, Reply(200, body, wire.BATCH_MEDIA_TYPE))
    with connect() as client, pytest.raises(ServiceError, match="lease in headers"):
        client.pull("guess")


# Acks and versions


@pytest.mark.parametrize(
    ("version", "text"), [(None, None), (4, "0.4"), ("1.4", "1.4"), (Version(2, 4), "2.4")], ids=str
)
def test_an_ack_carries_the_generation_and_the_version_that_the_step_made(
    stub: Stub, connect: Connect, body: bytes, version: Any, text: str | None
) -> None:
    stub.on(PULL, batch(body, generation=3))
    stub.on(ACK, good(wire.AckReply(epoch=1, batch="batch-1", version=text or "0.3")))
    with connect() as client:
        client.ack(client.pull("guess"), version)
    asked = stub.asked(ACK)[0].json
    assert (asked["generation"], asked.get("version")) == (3, text)


def test_an_ack_whose_answer_got_lost_is_repeated_and_answered_as_before(
    stub: Stub, connect: Connect, body: bytes
) -> None:
    stub.on(PULL, batch(body))
    stub.on(ACK, LOST, good(wire.AckReply(epoch=1, batch="batch-1", version="0.4")))
    with connect() as client:
        assert client.ack(client.pull("guess"), 4).version == "0.4"


def test_the_ack_of_another_learner_is_never_taken_for_ones_own(stub: Stub, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body))
    stub.on(ACK, LOST, problem(BatchAlreadyAcked("Another learner acked it.")))
    with connect() as client, pytest.raises(BatchAlreadyAcked):
        client.ack(client.pull("guess"), 4)


def test_an_ack_of_a_batch_that_was_acked_before_is_an_error(stub: Stub, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body))
    stub.on(ACK, problem(BatchAlreadyAcked("It was acked.")))
    with connect() as client, pytest.raises(BatchAlreadyAcked):
        client.ack(client.pull("guess"), 4)


def test_giving_back_twice_by_a_lost_answer_is_giving_back_once(stub: Stub, connect: Connect, body: bytes) -> None:
    nack = "POST /v1/runs/guess/batches/batch-1/nack"
    stub.on(PULL, batch(body))
    stub.on(nack, LOST, problem(BatchSuperseded("Not leased.")))
    with connect() as client:
        client.nack(client.pull("guess"), "NaN loss")
    assert stub.asked(nack)[1].json["reason"] == "NaN loss"


def test_an_announced_number_counts_in_the_lineage_now(stub: Stub, connect: Connect) -> None:
    stub.on("GET /v1/runs/guess", good(run_status(version="2.3")))
    stub.on("POST /v1/runs/guess/version", LOST, problem(VersionConflict("2.4 was announced.")))
    with connect() as client, pytest.raises(VersionConflict):
        client.announce("guess", 4)
    stub.on("GET /v1/runs/guess", good(run_status(version="2.4")))
    assert stub.asked("POST /v1/runs/guess/version")[0].json == {"version": "2.4"}


def test_an_announcement_whose_answer_got_lost_counts_once(stub: Stub, connect: Connect) -> None:
    stub.on("GET /v1/runs/guess", good(run_status(version="0.4")))
    stub.on("POST /v1/runs/guess/version", LOST, problem(VersionConflict("0.4 was announced.")))
    with connect() as client:
        assert client.announce("guess", "0.4").version == "0.4"


def test_a_rewind_to_a_bare_number_is_refused(connect: Connect) -> None:
    with connect() as client, pytest.raises(InvalidRequest, match="of which lineage"):
        client.rewind("guess", 3)


# Runs, groups, evaluations, trajectories


def test_a_run_that_exists_is_fine_if_asked_and_the_same(stub: Stub, connect: Connect) -> None:
    stub.on("POST /v1/runs", problem(RunExists("There is one.")))
    stub.on("GET /v1/runs/guess", good(run_status()))
    with connect() as client:
        assert client.create_run(RunSpec.model_validate(SPEC), exist_ok=True).name == "guess"
        with pytest.raises(RunExists, match="another spec"):
            client.create_run({**SPEC, "seed": 5}, exist_ok=True)
        with pytest.raises(RunExists, match="There is one"):
            client.create_run(SPEC)


def test_a_bad_spec_is_refused_before_anything_is_sent(stub: Stub, connect: Connect) -> None:
    with connect() as client, pytest.raises(InvalidRunSpec, match="batch_size"):
        client.create_run({**SPEC, "batch_size": 0})
    assert stub.seen == []


def test_a_spec_is_sent_as_it_was_given(stub: Stub, connect: Connect) -> None:
    stub.on("POST /v1/runs", good(run_status(), status=201))
    with connect() as client:
        client.create_run(SPEC)
    assert stub.asked("POST /v1/runs")[0].json == SPEC


def test_groups_get_an_id_so_that_a_repeated_submission_is_known(stub: Stub, connect: Connect) -> None:
    route = "POST /v1/runs/guess/groups"
    stub.on(route, LOST, problem(GroupExists("It exists.")))
    tasks: list[Any] = [Task(environment="e", seed=1), {"environment": "e", "seed": 2}, TaskSpec(environment="e")]
    with connect() as client:
        ids = client.submit_groups("guess", [*tasks, wire.GroupRequest(task={"environment": "e"}, size=4, id="mine")])
    first, second = (seen.json["groups"] for seen in stub.asked(route))
    assert first == second
    assert ids == [group["id"] for group in first]
    assert ids[3] == "mine"
    assert first[1]["task"] == {"environment": "e", "seed": 2}


def test_an_evaluation_is_awaited_to_its_end(stub: Stub, connect: Connect) -> None:
    def reply(done: int) -> Reply:
        return good(
            wire.EvaluationReply(
                epoch=1, evaluation="e1", version="0.3", wanted=2, done=done, finished=done == 2, hold_s=0.0
            )
        )

    stub.on("POST /v1/runs/guess/evaluations", reply(0))
    stub.on("GET /v1/runs/guess/evaluations/e1", reply(1), reply(2))
    with connect(poll_s=0.01) as client:
        found = client.evaluate("guess", [{"environment": "e", "seed": 1}], episodes_per_task=2, temperature=0.0)
        assert not client.evaluate("guess", [{"environment": "e"}], wait=False).finished
    assert found.done == 2
    assert stub.seen[0].json["temperature"] == 0.0


def test_trajectories_are_listed_page_by_page(stub: Stub, connect: Connect) -> None:
    def listing(seen: Seen) -> Reply:
        start = int(seen.query.get("before", 4))
        shown = [summary(number) for number in range(start - 1, start - 3, -1)]
        return good(wire.TrajectoryList(epoch=1, trajectories=shown, next=str(start - 2) if start > 2 else ""))

    stub.on("GET /v1/runs/guess/trajectories", listing)
    with connect() as client:
        found = [item.id for item in client.trajectories("guess", status="failed", page=2)]
    assert found == ["t3", "t2", "t1", "t0"]
    assert stub.seen[0].query == {"status": "failed", "limit": "2"}


def summary(number: int) -> wire.TrajectorySummary:
    return wire.TrajectorySummary(
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


def test_a_trajectory_is_read_from_its_record(stub: Stub, connect: Connect) -> None:
    wanted = builders.make_trajectory(number=5)
    stub.on(f"GET /v1/trajectories/{wanted.id}", Reply(200, codec.encode(wanted), wire.RECORDS_MEDIA_TYPE))
    with connect() as client:
        assert client.trajectory(wanted.id).task == wanted.task


def test_status_and_hold_are_read(stub: Stub, connect: Connect) -> None:
    status = wire.ServiceStatus(epoch=1, version="0.0.1", uptime_s=1.0, runs=[], workers=[], store={})
    stub.on("GET /v1/status", good(status))
    stub.on("GET /v1/runs/guess/hold", good(wire.HoldReply(epoch=1, hold_s=3.0, evaluations=["e1"])))
    stub.on("POST /v1/runs/guess/close", good(run_status(state="closed")))
    with connect() as client:
        assert client.status() == status
        assert client.hold("guess", wait_s=2.0).evaluations == ["e1"]
        client.close_run("guess")
    assert stub.asked("GET /v1/runs/guess/hold")[0].query == {"wait_s": "2"}


# Keeping leases


def test_while_batches_are_held_their_leases_are_renewed(stub: Stub, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, good({"epoch": 1}))
    with Client(stub.url) as client:
        client.pull("guess")
        asked = stub.wait_for(DOING, 3)
    assert {seen.json["doing"] for seen in asked} == {"training"}


def test_the_async_client_renews_in_its_event_loop(stub: Stub, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, LOST, good({"epoch": 1}))
    with Driven(stub.url) as client:
        client.pull("guess")
        client.pass_time_until(lambda: len(stub.asked(DOING)) >= 3)


def test_a_renewal_that_fails_is_tried_again_and_repeats_what_the_learner_said(stub: Stub, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.03))
    stub.on(DOING, good({"epoch": 1}), LOST, problem(UnknownRun("Gone.")), good({"epoch": 1}))
    with Client(stub.url) as client:
        client.pull("guess")
        client.doing("guess", "checkpointing")
        asked = stub.wait_for(DOING, 5)
    assert asked[-1].json["doing"] == "checkpointing"


def test_without_keepalive_nothing_is_renewed(stub: Stub, body: bytes) -> None:
    stub.on(PULL, batch(body, lease_s=0.001))
    stub.on("GET /v1/runs", good([]))
    with Client(stub.url, keepalive=False) as client:
        client.pull("guess")
        client.runs()
    assert stub.asked(DOING) == []


# The two surfaces


def test_the_async_client_has_the_methods_of_the_sync_one_with_the_same_arguments() -> None:
    def surface(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {
            name: list(inspect.signature(method).parameters.values())
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert surface(Client) == surface(AsyncClient)


def test_without_aiohttp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "aiohttp":
            raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")
        return real(name, *args)

    monkeypatch.delitem(sys.modules, "aiohttp", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'headrace\[async\]'"):
        AsyncClient()


# Assets


def test_an_asset_comes_by_its_name_and_is_checked(stub: Stub, connect: Connect) -> None:
    epoch = {wire.HEADER_EPOCH: "1"}
    one = f"GET /v1/assets/{PICTURE.name}"
    stub.on(
        one,
        Reply(200, PICTURE.data, wire.ASSET_MEDIA_TYPE, epoch),
        Reply(200, EXPERTS.data, wire.ASSET_MEDIA_TYPE, epoch),
        problem(UnknownAsset("Not here.")),
        page(200),
    )
    with connect() as client:
        assert bytes(client.asset(PICTURE.name)) == PICTURE.data
        with pytest.raises(CorruptAsset, match=PICTURE.name):
            client.asset(PICTURE.name)  # the stub answers with other bytes
        with pytest.raises(UnknownAsset, match="Not here"):
            client.asset(PICTURE.name)
        with pytest.raises(ServiceError, match="is not an asset"):
            client.asset(PICTURE.name)


def test_assets_come_with_a_batch_in_as_many_answers_as_they_take(stub: Stub, connect: Connect) -> None:
    stub.on(PULL, batch(body_with_assets()))
    stub.on(ASSETS, assets_reply([PICTURE.data]), assets_reply([EXPERTS.data]))
    with connect() as client:
        pulled = client.pull("guess", fields=["assets"])
    assert [asked.json["names"] for asked in stub.asked(ASSETS)] == [[PICTURE.name, EXPERTS.name], [EXPERTS.name]]
    assert bytes(pulled.asset(PICTURE.name)) == PICTURE.data
    experts = decode_array(pulled.asset(EXPERTS.name))
    assert experts.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert experts.ctypes.data % 64 == 0
    assert pulled.recut(np.array([True])).asset(PICTURE.name) == pulled.asset(PICTURE.name)


def test_a_damaged_asset_costs_itself_only(stub: Stub, connect: Connect) -> None:
    stub.on(PULL, batch(body_with_assets()))
    stub.on(ASSETS, assets_reply([CorruptAsset("Damaged.", asset=PICTURE.name), EXPERTS.data]))
    with connect() as client:
        pulled = client.pull("guess", fields=["assets"])
    with pytest.raises(CorruptAsset, match="Damaged"):
        pulled.asset(PICTURE.name)
    assert bytes(pulled.asset(EXPERTS.name)) == EXPERTS.data


def test_an_asset_that_was_not_pulled_says_how_it_is(stub: Stub, connect: Connect) -> None:
    stub.on(PULL, batch(body_with_assets()))
    with connect() as client:
        pulled = client.pull("guess")
        with pytest.raises(InvalidRequest, match="A pull brings no"):
            client.pull("guess", fields=["images"])
    assert pulled.asset_names() == [PICTURE.name, EXPERTS.name]
    with pytest.raises(InvalidRequest, match="fields=") as refused:
        pulled.asset(PICTURE.name)
    assert "client.asset" in str(refused.value)


def test_bytes_that_are_no_assets_are_an_error_of_the_service(stub: Stub, connect: Connect) -> None:
    stub.on(PULL, batch(body_with_assets()))
    stub.on(ASSETS, good([]), Reply(200, b"\xff\xff", wire.ASSETS_MEDIA_TYPE), assets_reply([]))
    with connect() as client:
        for error in (ServiceError, InvalidRequest, ServiceError):
            with pytest.raises(error):
                client.pull("guess", fields=["assets"])


def test_a_string_in_place_of_a_list_of_names_is_refused(connect: Connect) -> None:
    with connect() as client:
        with pytest.raises(InvalidRequest, match=r"tags=\['image'\]"):
            client.pull("guess", tags="image")
        with pytest.raises(InvalidRequest, match="environments"):
            next(iter(client.batches("guess", environments="game:Nim-v0")))
