"""Pulls, acks and versions: both clients against a scripted server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import (
    BatchAlreadyAcked,
    BatchSuperseded,
    InvalidRequest,
    NothingToServe,
    RunFinished,
    ServiceError,
    VersionConflict,
    WeightsDamaged,
)
from headrace.trajectory import Version
from headrace.weight_files import weight_digest
from headrace.wire import messages
from tests.sdk.client.both_clients import Connect
from tests.sdk.client.routes import ACK, COLLECTING, EMPTY, FINISHED, PULL, run_status
from tests.sdk.client.stub_server import NO_RESPONSE, Reply, StubServer, batch, ok, problem

# Pulling


def test_a_pull_continues_after_empty_polls_and_reports_the_reasons(
    stub: StubServer, connect: Connect, body: bytes
) -> None:
    reports: list[tuple[str, list[messages.Reason]]] = []
    stub.on(PULL, ok(EMPTY), ok(EMPTY), batch(body))
    with connect(poll_s=0.01, on_wait=lambda run, reasons: reports.append((run, reasons))) as client:
        client.pull("guess")
    assert reports == [("guess", [COLLECTING])] * 2


def test_the_reasons_are_logged_as_a_warning_without_a_callback(
    stub: StubServer, connect: Connect, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = messages.EmptyReply(
        epoch=1, reasons=[messages.Reason(code="no-workers", message="no workers in pool 'gpu'")]
    )
    stub.on(PULL, ok(waiting), batch(body))
    with connect(poll_s=0.01) as client:
        client.pull("guess")
    (record,) = [record for record in caplog.records if record.name == "headrace.client.sync_client"]
    assert record.levelname == "WARNING"
    assert record.getMessage() == "Run 'guess' has no batch yet. no workers in pool 'gpu'."


def test_a_timeout_raises_nothing_to_serve_with_the_reasons(stub: StubServer, connect: Connect) -> None:
    stub.on(PULL, ok(EMPTY))
    with connect() as client, pytest.raises(NothingToServe, match="3 of 8 groups are complete") as caught:
        client.pull("guess", timeout_s=0)
    assert caught.value.extra["reasons"] == [{"code": "collecting", "message": COLLECTING.message}]


def test_batches_end_when_the_run_is_finished(stub: StubServer, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body), ok(FINISHED))
    with connect() as client:
        assert [pulled.id for pulled in client.batches("guess")] == ["batch-1"]
        with pytest.raises(RunFinished, match="Closed"):
            client.pull("guess")


def test_submitted_groups_are_awaited_by_id(stub: StubServer, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body))
    with connect() as client:
        client.pull("guess", groups=["g1", "g2"])
    assert stub.requests_to(PULL)[0].json["groups"] == ["g1", "g2"]


def test_a_batch_without_a_lease_in_its_headers_is_refused(stub: StubServer, connect: Connect, body: bytes) -> None:
    stub.on(PULL, Reply(200, body, messages.BATCH_MEDIA_TYPE))
    with connect() as client, pytest.raises(ServiceError, match="lease in headers"):
        client.pull("guess")


# Acks and versions


@pytest.mark.parametrize(
    ("version", "text"), [(None, None), (4, "0.4"), ("1.4", "1.4"), (Version(2, 4), "2.4")], ids=str
)
def test_an_ack_carries_the_generation_and_the_version_that_the_step_made(
    stub: StubServer, connect: Connect, body: bytes, version: Any, text: str | None
) -> None:
    stub.on(PULL, batch(body, generation=3))
    stub.on(ACK, ok(messages.AckReply(epoch=1, batch="batch-1", version=text or "0.3")))
    with connect() as client:
        client.ack(client.pull("guess"), version)
    ack = stub.requests_to(ACK)[0].json
    assert (ack["generation"], ack.get("version")) == (3, text)


@pytest.mark.parametrize(
    ("weights", "sent"),
    [
        ("/shared/step-4", {"path": "/shared/step-4"}),
        (Path("/shared/step-4"), {"path": "/shared/step-4"}),
        ("step-4", {"path": os.path.abspath("step-4")}),
        (messages.Weights(path="/shared/lora", kind="adapter"), {"path": "/shared/lora", "kind": "adapter"}),
    ],
    ids=str,
)
def test_the_path_of_weights_is_sent_as_an_absolute_path(
    stub: StubServer, connect: Connect, body: bytes, weights: Any, sent: dict[str, str]
) -> None:
    stub.on(PULL, batch(body))
    stub.on(ACK, ok(messages.AckReply(epoch=1, batch="batch-1", version="0.4")))
    stub.on("POST /v1/runs/guess/version", ok(messages.VersionReply(epoch=1, version="0.5")))
    with connect() as client:
        client.ack(client.pull("guess"), "0.4", weights=weights)
        client.announce("guess", "0.5", weights=weights)
    assert stub.requests_to(ACK)[0].json["weights"] == sent
    assert stub.requests_to("POST /v1/runs/guess/version")[0].json == {"version": "0.5", "weights": sent}


def write_weights(folder: Path, values: bytes = b"12345") -> Path:
    header = b'{"w":{"dtype":"U8","shape":[5],"data_offsets":[0,5]}}'
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values)
    return folder


def test_an_announcement_and_an_ack_carry_the_digest_of_the_files_that_this_process_can_read(
    stub: StubServer, connect: Connect, body: bytes, tmp_path: Path
) -> None:
    stub.on(PULL, batch(body))
    stub.on(ACK, ok(messages.AckReply(epoch=1, batch="batch-1", version="0.4")))
    stub.on("POST /v1/runs/guess/version", ok(messages.VersionReply(epoch=1, version="0.5")))
    weights = write_weights(tmp_path / "step-4")
    expected = {"path": str(weights), "digest": weight_digest(weights, "full")}
    with connect() as client:
        client.ack(client.pull("guess"), "0.4", weights=weights)
        client.announce("guess", "0.5", weights=messages.Weights(path=str(weights)))
    assert stub.requests_to(ACK)[0].json["weights"] == expected
    assert stub.requests_to("POST /v1/runs/guess/version")[0].json["weights"] == expected


def test_an_incomplete_file_raises_weights_damaged_and_nothing_is_announced(
    stub: StubServer, connect: Connect, tmp_path: Path
) -> None:
    weights = write_weights(tmp_path / "step-4", b"123")
    with connect() as client, pytest.raises(WeightsDamaged, match="is not a complete safetensors file"):
        client.announce("guess", "0.5", weights=weights)
    assert not stub.requests_to("POST /v1/runs/guess/version")


def test_the_same_bytes_under_a_new_number_are_logged(
    stub: StubServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    stub.on("POST /v1/runs/guess/version", ok(messages.VersionReply(epoch=1, version="0.9", same_weights_as="0.3")))
    with connect() as client:
        client.announce("guess", "0.9", weights="/shared/step-3")
    assert "Version 0.9 has the same weight files as version 0.3" in caplog.text


def test_an_ack_without_a_response_is_repeated(stub: StubServer, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body))
    stub.on(ACK, NO_RESPONSE, ok(messages.AckReply(epoch=1, batch="batch-1", version="0.4")))
    with connect() as client:
        assert client.ack(client.pull("guess"), 4).version == "0.4"


def test_an_ack_by_another_learner_raises_batch_already_acked(stub: StubServer, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body))
    stub.on(ACK, NO_RESPONSE, problem(BatchAlreadyAcked("Another learner acked it.")))
    with connect() as client, pytest.raises(BatchAlreadyAcked):
        client.ack(client.pull("guess"), 4)


def test_an_ack_of_a_batch_that_was_acked_before_is_an_error(stub: StubServer, connect: Connect, body: bytes) -> None:
    stub.on(PULL, batch(body))
    stub.on(ACK, problem(BatchAlreadyAcked("It was acked.")))
    with connect() as client, pytest.raises(BatchAlreadyAcked):
        client.ack(client.pull("guess"), 4)


def test_a_repeated_nack_after_a_lost_response_succeeds(stub: StubServer, connect: Connect, body: bytes) -> None:
    nack = "POST /v1/runs/guess/batches/batch-1/nack"
    stub.on(PULL, batch(body))
    stub.on(nack, NO_RESPONSE, problem(BatchSuperseded("Not leased.")))
    with connect() as client:
        client.nack(client.pull("guess"), "NaN loss")
    assert stub.requests_to(nack)[1].json["reason"] == "NaN loss"


def test_an_announced_number_counts_in_the_current_lineage(stub: StubServer, connect: Connect) -> None:
    stub.on("GET /v1/runs/guess", ok(run_status(version="2.3")))
    stub.on("POST /v1/runs/guess/version", NO_RESPONSE, problem(VersionConflict("2.4 was announced.")))
    with connect() as client, pytest.raises(VersionConflict):
        client.announce("guess", 4)
    stub.on("GET /v1/runs/guess", ok(run_status(version="2.4")))
    assert stub.requests_to("POST /v1/runs/guess/version")[0].json == {"version": "2.4"}


def test_a_repeated_announcement_after_a_lost_response_succeeds(stub: StubServer, connect: Connect) -> None:
    stub.on("GET /v1/runs/guess", ok(run_status(version="0.4")))
    stub.on("POST /v1/runs/guess/version", NO_RESPONSE, problem(VersionConflict("0.4 was announced.")))
    with connect() as client:
        assert client.announce("guess", "0.4").version == "0.4"


def test_a_rewind_to_a_bare_number_is_refused(connect: Connect) -> None:
    with connect() as client, pytest.raises(InvalidRequest, match="does not name a lineage"):
        client.rewind("guess", 3)
