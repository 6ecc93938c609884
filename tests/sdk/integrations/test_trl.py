"""The rollout worker of TRL's asynchronous trainer, against a scripted orchestrator; the trainer itself is in
tests/vllm."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.client.sync_client import Client
from headrace.errors import BatchSuperseded, InvalidRequest, NothingToServe, RunFinished, UnknownRun
from headrace.integrations.trl import HeadraceRollouts
from headrace.integrations.trl_samples import RolloutSample
from headrace.runspec import EstimatorSpec
from headrace.wire import messages
from tests.sdk.client.conftest import make_body
from tests.sdk.client.routes import FINISHED, PULL, run_status
from tests.sdk.client.stub_server import ReceivedRequest, Reply, ScriptedReply, StubServer, batch, ok, problem

WAITING = messages.EmptyReply(epoch=1, reasons=[messages.Reason(code="collecting", message="2 of 4 ready")])
VERSION = "POST /v1/runs/guess/version"


def ack(number: int) -> str:
    return f"POST /v1/runs/guess/batches/b{number}/ack"


def nack(number: int) -> str:
    return f"POST /v1/runs/guess/batches/b{number}/nack"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Folder:
    """In place of ``HeadraceWeights``."""

    newest: Path | None = None


@pytest.fixture
def served(stub: StubServer) -> StubServer:
    """A run at version 0.3 that accepts acks, nacks and versions. Batches ``b1``, ... have two samples."""
    stub.on("GET /v1/runs/guess", ok(run_status(spec={"max_staleness": 1})))
    stub.on(VERSION, ok(messages.VersionReply(epoch=1, version="0.4")))
    for number in range(1, 5):
        stub.on(ack(number), ok(messages.AckReply(epoch=1, batch=f"b{number}", version="0.4")))
        stub.on(nack(number), ok({}))
    return stub


@pytest.fixture
def client(served: StubServer) -> Iterator[Client]:
    with Client(served.url, keepalive=False, poll_s=1.0) as made:
        yield made


@pytest.fixture
def rollouts(client: Client) -> Iterator[HeadraceRollouts]:
    """A worker after the first weight sync of the trainer; ``serve`` starts it."""
    made = HeadraceRollouts(client, "guess")
    made.update_model_version(1)
    yield made
    made.stop()


def serve(stub: StubServer, rollouts: HeadraceRollouts, *replies: ScriptedReply) -> None:
    """Start the worker, with these responses to its pulls."""
    stub.on(PULL, *replies)
    rollouts.start()


def take(rollouts: HeadraceRollouts, count: int) -> list[RolloutSample]:
    return [rollouts.rollout_buffer.get(timeout=5) for _ in range(count)]


def metrics(rollouts: HeadraceRollouts) -> dict[str, list[float]]:
    metrics_by_name: dict[str, list[float]] = {}
    while not rollouts.metrics_queue.empty():
        for key, value in rollouts.metrics_queue.get_nowait().items():
            metrics_by_name.setdefault(key, []).append(value)
    return metrics_by_name


def test_the_next_batch_is_pulled_while_the_trainer_works_on_the_current_one(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, *(batch(make_body(f"b{k}")) for k in (1, 2)), ok(WAITING))
    take(rollouts, 1)
    served.wait_for(PULL, 2)
    assert rollouts.rollout_buffer.qsize() == 1


def test_a_batch_is_acked_with_the_version_that_the_trainer_makes_after_it_took_the_last_row(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, batch(make_body("b1"), generation=7), ok(WAITING))
    take(rollouts, 2)
    assert not served.requests_to(ack(1)), "a batch whose rows were taken is not yet trained on"
    rollouts.update_model_version(2)
    (acked,) = served.requests_to(ack(1))
    assert (acked.json["generation"], acked.json["version"]) == (7, "0.5")


def test_a_batch_that_is_not_finished_is_not_acked_with_a_version(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, batch(make_body("b1")), ok(WAITING))
    take(rollouts, 1)
    rollouts.update_model_version(2)
    assert not served.requests_to(ack(1))
    assert [request.json["version"] for request in served.requests_to(VERSION)] == ["0.4", "0.5"]
    take(rollouts, 1)
    rollouts.update_model_version(3)
    assert served.requests_to(ack(1))[0].json["version"] == "0.6"


def test_a_step_of_several_batches_acks_the_last_of_them_with_the_version(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, *(batch(make_body(f"b{k}")) for k in (1, 2)), ok(WAITING))
    groups = [sample.group_id for sample in take(rollouts, 4)]
    assert groups == [0, 1, 2, 3]
    assert not served.requests_to(ack(1))
    rollouts.update_model_version(2)
    assert served.requests_to(ack(1))[0].json.get("version", "") == ""
    assert served.requests_to(ack(2))[0].json["version"] == "0.5"


def test_a_batch_is_acked_earlier_only_if_the_run_could_not_serve_another_otherwise(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, *(batch(make_body(f"b{k}")) for k in (1, 2, 3, 4)), ok(WAITING))
    take(rollouts, 5)  # the run holds two at most: to get the third, the first has to go
    assert [len(served.requests_to(ack(k))) for k in (1, 2, 3)] == [1, 0, 0]
    assert served.requests_to(ack(1))[0].json.get("version", "") == ""


def test_a_trainer_that_waits_holds_no_finished_batch(served: StubServer, rollouts: HeadraceRollouts) -> None:
    serve(served, rollouts, batch(make_body("b1")), ok(WAITING))
    take(rollouts, 2)
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get(timeout=0.01)
    assert len(served.requests_to(ack(1))) == 1


def test_a_warning_is_logged_for_rows_that_get_older_with_each_version(
    served: StubServer, rollouts: HeadraceRollouts, caplog: pytest.LogCaptureFixture
) -> None:
    serve(served, rollouts, batch(make_body("b1")), ok(WAITING))
    take(rollouts, 1)
    rollouts.update_model_version(2)
    assert not caplog.records
    rollouts.update_model_version(3)
    assert "Let a step take about one batch" in caplog.text


def test_every_batch_is_acked_once_and_none_is_given_back(served: StubServer, rollouts: HeadraceRollouts) -> None:
    serve(served, rollouts, *(batch(make_body(f"b{k}")) for k in (1, 2, 3, 4)), ok(WAITING))
    for version in range(2, 6):
        take(rollouts, 2)
        rollouts.update_model_version(version)
    rollouts.stop()
    assert [len(served.requests_to(ack(k))) for k in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert not [request for request in served.requests if request.path.endswith("/nack")]


def test_a_batch_without_a_version_is_given_back_when_the_trainer_stops(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, *(batch(make_body(f"b{k}")) for k in (1, 2)), ok(WAITING))
    take(rollouts, 1)
    served.wait_for(PULL, 2)
    rollouts.stop()
    rollouts.stop()
    assert served.requests_to(nack(1))[0].json["reason"] == "the trainer stopped with 1 samples left"
    assert not served.requests_to(ack(1))
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get(timeout=0.01)


def test_the_trainer_counts_versions_from_1_and_the_run_continues_its_count(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, batch(make_body("b1")), ok(WAITING))
    assert [request.json["version"] for request in served.requests_to(VERSION)] == ["0.4"]
    # The batch's tokens are of 0.0, the trainer's first version is 0.4: four versions lie between.
    assert {1 - sample.model_version for sample in take(rollouts, 2)} == {4}


def test_a_trainer_that_continues_from_a_checkpoint_counts_in_its_new_lineage(
    stub: StubServer,
) -> None:
    stub.on("GET /v1/runs/guess", ok(run_status(version="1.50", spec={"max_staleness": 1})))
    stub.on(VERSION, ok(messages.VersionReply(epoch=1, version="1.51")))
    with Client(stub.url, keepalive=False) as client:
        rollouts = HeadraceRollouts(client, "guess")
        rollouts.update_model_version(1)
        rollouts.update_model_version(2)
    assert [request.json["version"] for request in stub.requests_to(VERSION)] == ["1.51", "1.52"]


def test_each_version_is_announced_with_its_weights(served: StubServer, client: Client) -> None:
    weights: Any = Folder()
    rollouts = HeadraceRollouts(client, "guess", weights=weights)
    weights.newest = Path("/shared/step-000001")
    rollouts.update_model_version(1)
    serve(served, rollouts, batch(make_body("b1")), ok(WAITING))
    take(rollouts, 2)
    weights.newest = Path("/shared/step-000002")
    rollouts.update_model_version(2)
    rollouts.stop()
    assert served.requests_to(VERSION)[0].json == {"version": "0.4", "weights": {"path": "/shared/step-000001"}}
    assert served.requests_to(ack(1))[0].json["weights"] == {"path": "/shared/step-000002"}


def test_a_version_is_announced_even_if_the_lease_of_the_batch_was_lost(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    served.on(ack(5), problem(BatchSuperseded("The lease expired.")))
    serve(served, rollouts, batch(make_body("b5")), ok(WAITING))
    take(rollouts, 2)
    rollouts.update_model_version(2)
    assert [request.json["version"] for request in served.requests_to(VERSION)] == ["0.4", "0.5"]
    assert metrics(rollouts)["headrace/batches_lost_total"] == [1.0]


def test_an_error_of_a_pull_is_raised_in_the_trainer_after_the_batches_before_it(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, batch(make_body("b1")), problem(UnknownRun("The run was deleted.")))
    take(rollouts, 2)
    with pytest.raises(UnknownRun, match="The run was deleted"):
        rollouts.rollout_buffer.get(timeout=5)


def test_the_error_for_a_run_that_ends_before_the_trainer_says_what_to_change(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, ok(FINISHED))
    with pytest.raises(RunFinished, match="lower its max_steps"):
        rollouts.rollout_buffer.get(timeout=5)


def test_a_row_that_the_trainer_cannot_use_ends_it_and_the_batch_is_given_back(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, batch(make_body("b1", estimator=EstimatorSpec(name="none"))), ok(WAITING))
    with pytest.raises(InvalidRequest, match="choose an estimator"):
        rollouts.rollout_buffer.get(timeout=5)
    rollouts.stop()
    assert len(served.requests_to(nack(1))) == 1


def test_a_pull_that_waits_too_long_ends_the_trainer_with_the_pulls_reasons(served: StubServer, client: Client) -> None:
    clock = Clock()
    rollouts = HeadraceRollouts(client, "guess", clock=clock)
    serve(served, rollouts, ok(WAITING))
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get(timeout=1.5)
    clock.now = 299.0
    rollouts.check_health(300.0)
    clock.now = 301.0
    with pytest.raises(NothingToServe, match=r"for 301 s\. .*2 of 4 ready.*heartbeat_stale_after_s") as stalled:
        rollouts.check_health(300.0)
    assert stalled.value.extra["reasons"][0]["code"] == "collecting"
    rollouts.stop()


def test_a_waiting_pull_calls_the_clients_callback(served: StubServer) -> None:
    reports: list[str] = []
    with Client(
        served.url, keepalive=False, poll_s=1.0, on_wait=lambda run, reasons: reports.append(reasons[0].code)
    ) as client:
        rollouts = HeadraceRollouts(client, "guess")
        serve(served, rollouts, ok(WAITING))
        with pytest.raises(queue.Empty):
            rollouts.rollout_buffer.get(timeout=1.0)
        rollouts.stop()
    assert reports
    assert set(reports) == {"collecting"}


def test_a_served_batch_makes_the_worker_healthy_again(served: StubServer, client: Client) -> None:
    clock = Clock()
    rollouts = HeadraceRollouts(client, "guess", clock=clock)
    serve(served, rollouts, batch(make_body("b1")), ok(WAITING))
    clock.now = 500.0
    take(rollouts, 1)
    rollouts.check_health(1.0)
    rollouts.stop()


def test_stopping_ends_a_waiting_pull(served: StubServer, rollouts: HeadraceRollouts) -> None:
    def wait(request: ReceivedRequest) -> Reply:
        served.hung_up.wait(10)
        return ok(WAITING)

    serve(served, rollouts, wait)
    served.wait_for(PULL, 1)
    rollouts.stop()


def test_metrics_have_the_suffixes_by_which_trl_sums_and_averages(
    served: StubServer, rollouts: HeadraceRollouts
) -> None:
    serve(served, rollouts, batch(make_body("b1")), ok(WAITING))
    take(rollouts, 2)
    reported = metrics(rollouts)
    assert reported["headrace/batches_total"] == [1.0]
    assert reported["headrace/samples_total"] == reported["headrace/episodes_total"] == [2.0]
    assert reported["headrace/staleness_max"] == [3.0]
    assert reported["headrace/episode_reward"] == [1.0]
    assert reported["headrace/batch_wait_s"][0] >= 0
