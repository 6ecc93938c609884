"""Records with an extreme value in any field: each is refused, or can be written, listed, batched and exported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from headrace.batch.batch import Batch
from headrace.errors import HeadraceError, InvalidTrajectory
from headrace.store.tables import as_json, tables
from headrace.trajectory import Task, Trajectory, Version
from headrace.validation import validate
from headrace.wire import codec, messages
from headrace.wire.alignment import padded
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.projection.entries import LocatedEntry, ProjectedTrajectory
from headrace_orchestrator.buffer.projection.rows import rows
from headrace_orchestrator.service.storage.record_events import event_of
from tests.builders import make_trajectory
from tests.compatibility.full_record import full_record
from tests.sdk.batch.batches import body_of

INTEGERS = (-1, 0, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
NUMBERS = (math.nan, math.inf, -math.inf, -1.0, 1e308, 5e-324)
TEXTS = ("", ".", "..", "a/b", "a b", "a\nb", "\0", "x" * 100_000, "日本語")
DEEP = [msgspec.Raw(b"\x91" * depth + b"\x90") for depth in (300, 900)]
OTHERS = (None, True, [], {}, [1], b"x", msgspec.msgpack.Ext(5, b"x"), {1: 2}, {None: 1}, {"a": {2.5: None}}, *DEEP)

GRANTED = {
    "run",
    "group",
    "member",
    "episode",
    "attempt",
    "task",
    ("provenance", "worker"),
    ("provenance", "evaluation"),
}
"""Fields that the scheduler compares with the grant."""

_PREFIX = 24


def the_record() -> Trajectory:
    attempt = messages.Assignment(
        run="run", group="group-0", member=0, episode="episode-1", attempt=1, nonce="n",
        task=Task(environment="test:Echo", seed=1), sampling_seed=3, term_s=30,
    )  # fmt: skip
    return full_record(attempt, "worker-1")


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values of a tree, containers included."""
    if path and path[0] not in GRANTED and path not in GRANTED:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of the tree with another value at the path."""
    key, *rest = path
    new = replaced(tree[key], tuple(rest), value) if rest else value
    return {**tree, key: new} if isinstance(tree, dict) else [*tree[:key], new, *tree[key + 1 :]]


def with_head(record: bytes, head: bytes) -> bytes:
    """The record with other bytes as its head."""
    old = int.from_bytes(record[8:16], "little")
    arrays = record[padded(_PREFIX + old) :]
    start = padded(_PREFIX + len(head))
    sizes = len(head).to_bytes(8, "little") + (start + len(arrays)).to_bytes(8, "little")
    return record[:8] + sizes + head + bytes(start - _PREFIX - len(head)) + arrays


def is_accepted(record: bytes) -> Trajectory | None:
    try:
        trajectory = codec.decode(record)
        validate(trajectory)
    except HeadraceError:
        return None
    return trajectory


def use(record: bytes, trajectory: Trajectory) -> None:
    """Do with a record what a service and its readers do with it."""
    head = codec.decode_head(record)
    event = event_of(head, len(record))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=type(event)) == event
    entry = ProjectedTrajectory(event, head.stop_reason, head.provenance, ())
    for _, values in rows([LocatedEntry(entry, Location(1, 64, len(record)))]):
        assert all(not isinstance(value, int) or -(1 << 63) <= value < 1 << 63 for value in values)
    assert quote(head.id, safe="") == head.id
    assert msgspec.json.decode(as_json(trajectory))["id"] == head.id
    (table,) = tables([trajectory])
    assert table.num_rows == 1
    if list(head.rows()) and head.status in ("finished", "truncated"):
        batch = Batch.parse(body_of([trajectory], name="rebn", version=Version(9, 9)), generation=1, lease_s=1.0)
        assert batch.manifest.trajectories == [head.id]


def extreme_records() -> Iterator[tuple[tuple[Any, ...], Any, bytes]]:
    for record in map(codec.encode, (the_record(), make_trajectory(turns=3))):
        old = int.from_bytes(record[8:16], "little")
        tree = msgspec.msgpack.decode(record[_PREFIX : _PREFIX + old])
        for path in leaves(tree):
            for value in chain(INTEGERS, NUMBERS, TEXTS, OTHERS):
                yield path, value, with_head(record, msgspec.msgpack.encode(replaced(tree, path, value)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_record_with_any_value_in_any_field_is_refused_or_can_be_stored_listed_served_and_exported() -> None:
    accepted = refused = 0
    for path, value, record in extreme_records():
        trajectory = is_accepted(record)
        if trajectory is None:
            refused += 1
            continue
        accepted += 1
        try:
            use(record, trajectory)
        except Exception as error:
            raise AssertionError(f"{'.'.join(map(str, path))} = {value!r:.80} is accepted, but: {error!r}") from error
    assert accepted > 100
    assert refused > 1000


@pytest.mark.parametrize("id", ["", "a/b", "..", "a b", "x" * 201, "x" * (1 << 20), "é"])
def test_a_trajectory_id_that_could_not_be_fetched_is_refused(id: str) -> None:
    with pytest.raises(InvalidTrajectory, match="trajectory id"):
        validate(make_trajectory(id=id))
    validate(make_trajectory(id="x" * 200))
