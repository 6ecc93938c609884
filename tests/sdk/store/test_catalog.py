"""The catalog of a log."""

from __future__ import annotations

import msgspec

from headrace.store.catalog import Catalog, CatalogBatch
from headrace.store.log_format import Frame, FrameType
from headrace.wire import codec
from tests.builders import make_id, make_trajectory


def frame(kind: FrameType, offset: int, payload: bytes) -> Frame:
    return Frame(kind, offset, 64 + len(payload), payload, checksum=0)


def test_the_first_record_of_a_trajectory_counts_and_the_last_event_of_a_batch() -> None:
    catalog = Catalog()
    record = codec.encode(make_trajectory(id=make_id(1), run="r"))
    for number in (1, 2):
        catalog.add(number, frame(FrameType.TRAJECTORY, 128, record))
    assert list(catalog.trajectories) == [make_id(1)]
    assert list(catalog.places) == [1, 128, len(record)]
    assert catalog.runs["r"].counts["trajectories"] == 1

    catalog.batches["b"] = CatalogBatch("r", (1, 512, 64))
    events = [{"type": "BatchDissolved", "run": "r", "batch": "b"}, {"type": "BatchAcked", "run": "r", "batch": "b"}]
    catalog.add(2, frame(FrameType.CONTROL, 256, msgspec.msgpack.encode(events)))
    assert catalog.batches["b"].state == "acked"
