"""Assets fetched by both clients, alone and with a batch."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.assets import decode_array, encode_array, make_asset
from headrace.batch.build import build_head
from headrace.batch.estimator_inputs import GroupInput
from headrace.errors import (
    CorruptAsset,
    HeadraceError,
    InvalidRequest,
    ServiceError,
    UnknownAsset,
)
from headrace.runspec import EstimatorSpec
from headrace.trajectory import Version
from headrace.wire import codec, messages
from headrace.wire.asset_bodies import pack_assets
from tests import builders
from tests.sdk.client.both_clients import Connect
from tests.sdk.client.routes import PULL
from tests.sdk.client.stub_server import Reply, StubServer, batch, ok, page, problem

PICTURE, EXPERTS = make_asset(b"pixels", "image/png"), encode_array(np.arange(12, dtype=np.uint8).reshape(3, 4))
ASSETS = "POST /v1/assets"


def assets_reply(items: list[bytes | HeadraceError]) -> Reply:
    return Reply(200, pack_assets(items), messages.ASSETS_MEDIA_TYPE, {messages.HEADER_EPOCH: "1"})


def body_with_assets() -> bytes:
    """A batch of one trajectory that refers to two assets."""
    trajectory = builders.make_trajectory(assets=[PICTURE.entry, EXPERTS.entry])
    record = codec.encode(trajectory)
    group = GroupInput("g", trajectory.task, 1, [(codec.decode_head(record), len(record))])
    head = build_head(batch="batch-1", run="guess", estimator=EstimatorSpec(), version=Version(0, 3), groups=[group])
    return head + record


def test_an_asset_is_fetched_by_name_and_checked(stub: StubServer, connect: Connect) -> None:
    epoch = {messages.HEADER_EPOCH: "1"}
    one = f"GET /v1/assets/{PICTURE.name}"
    stub.on(
        one,
        Reply(200, PICTURE.data, messages.ASSET_MEDIA_TYPE, epoch),
        Reply(200, EXPERTS.data, messages.ASSET_MEDIA_TYPE, epoch),
        problem(UnknownAsset("Not here.")),
        page(200),
    )
    with connect() as client:
        assert bytes(client.asset(PICTURE.name)) == PICTURE.data
        with pytest.raises(CorruptAsset, match=PICTURE.name):
            client.asset(PICTURE.name)  # the stub sends other bytes
        with pytest.raises(UnknownAsset, match="Not here"):
            client.asset(PICTURE.name)
        with pytest.raises(ServiceError, match="is not an asset"):
            client.asset(PICTURE.name)


def test_the_assets_of_a_batch_are_fetched_in_several_responses_if_needed(stub: StubServer, connect: Connect) -> None:
    stub.on(PULL, batch(body_with_assets()))
    stub.on(ASSETS, assets_reply([PICTURE.data]), assets_reply([EXPERTS.data]))
    with connect() as client:
        pulled = client.pull("guess", fields=["assets"])
    assert [request.json["names"] for request in stub.requests_to(ASSETS)] == [
        [PICTURE.name, EXPERTS.name],
        [EXPERTS.name],
    ]
    assert bytes(pulled.asset(PICTURE.name)) == PICTURE.data
    experts = decode_array(pulled.asset(EXPERTS.name))
    assert experts.tolist() == np.arange(12).reshape(3, 4).tolist()
    assert experts.ctypes.data % 64 == 0
    assert pulled.recut(np.array([True])).asset(PICTURE.name) == pulled.asset(PICTURE.name)


def test_a_damaged_asset_does_not_affect_the_others(stub: StubServer, connect: Connect) -> None:
    stub.on(PULL, batch(body_with_assets()))
    stub.on(ASSETS, assets_reply([CorruptAsset("Damaged.", asset=PICTURE.name), EXPERTS.data]))
    with connect() as client:
        pulled = client.pull("guess", fields=["assets"])
    with pytest.raises(CorruptAsset, match="Damaged"):
        pulled.asset(PICTURE.name)
    assert bytes(pulled.asset(EXPERTS.name)) == EXPERTS.data


def test_the_error_for_an_asset_that_was_not_pulled_says_how_to_pull_it(stub: StubServer, connect: Connect) -> None:
    stub.on(PULL, batch(body_with_assets()))
    with connect() as client:
        pulled = client.pull("guess")
        with pytest.raises(InvalidRequest, match="A pull has no fields"):
            client.pull("guess", fields=["images"])
    assert pulled.asset_names() == [PICTURE.name, EXPERTS.name]
    with pytest.raises(InvalidRequest, match="fields=") as refused:
        pulled.asset(PICTURE.name)
    assert "client.asset" in str(refused.value)


def test_a_body_that_does_not_hold_assets_is_an_error(stub: StubServer, connect: Connect) -> None:
    stub.on(PULL, batch(body_with_assets()))
    stub.on(ASSETS, ok([]), Reply(200, b"\xff\xff", messages.ASSETS_MEDIA_TYPE), assets_reply([]))
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
