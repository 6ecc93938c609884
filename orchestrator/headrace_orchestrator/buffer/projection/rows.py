"""The projection's tables, and the rows in them that follow from what is listed.

* Rows follow from what is listed alone: a rebuilt projection equals the lived one.
* The row of a trajectory carries its checksum, so that a flipped byte is noticed when it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from headrace.trajectory import Version
from headrace_orchestrator.buffer.log.location import OFFSET_BITS, Location
from headrace_orchestrator.buffer.projection.entries import BatchEntry, FileDeleted, LocatedEntry, TrajectoryEntry
from headrace_orchestrator.scheduler.events import BatchAcked, BatchDissolved

SCHEMA = 5
"""Version of the tables; another one on disk is thrown away and built again."""

TABLES = """
CREATE TABLE trajectories (
    position INTEGER PRIMARY KEY, id TEXT NOT NULL, run TEXT NOT NULL, group_id TEXT NOT NULL, member INTEGER NOT NULL,
    episode TEXT NOT NULL, attempt INTEGER NOT NULL, environment TEXT NOT NULL, status TEXT NOT NULL,
    stop_reason TEXT NOT NULL, worker TEXT NOT NULL, reward REAL, turns INTEGER NOT NULL, row_tokens INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL, low TEXT NOT NULL, high TEXT NOT NULL, evaluation TEXT NOT NULL, failure TEXT,
    length INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE INDEX trajectories_by_id ON trajectories (id);
CREATE INDEX trajectories_by_episode ON trajectories (episode);
CREATE INDEX trajectories_by_run ON trajectories (run, position);
CREATE INDEX trajectories_by_status ON trajectories (run, status, position);
CREATE INDEX trajectories_by_evaluation ON trajectories (run, evaluation, position) WHERE evaluation != '';
CREATE TABLE batches (
    id TEXT PRIMARY KEY, run TEXT NOT NULL, version TEXT NOT NULL, position INTEGER NOT NULL, length INTEGER NOT NULL,
    state TEXT NOT NULL, made TEXT NOT NULL
);
CREATE INDEX batches_by_position ON batches (position);
CREATE TABLE batch_members (
    run TEXT NOT NULL, group_id TEXT NOT NULL, position INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (run, group_id)
) WITHOUT ROWID;
CREATE INDEX batch_members_by_position ON batch_members (position);
CREATE TABLE asset_references (
    asset BLOB NOT NULL, file INTEGER NOT NULL, PRIMARY KEY (asset, file)
) WITHOUT ROWID;
CREATE INDEX asset_references_by_file ON asset_references (file);
CREATE TABLE cursor (
    schema INTEGER NOT NULL, log TEXT NOT NULL, position INTEGER NOT NULL, inverse INTEGER NOT NULL
);
"""
STATEMENTS = {statement.strip() for statement in TABLES.split(";")} - {""}
"""What SQLite remembers of them."""

COLUMNS = (
    "position, id, run, group_id, member, episode, attempt, environment, status, stop_reason, worker, reward, turns, "
    "row_tokens, size_bytes, low, high, evaluation, failure, length, checksum"
)
_encode = msgspec.msgpack.Encoder().encode

WORKER, LENGTH = 10, 19
"""Where two of these columns are."""
_INSERT_TRAJECTORY = f"INSERT OR REPLACE INTO trajectories ({COLUMNS}) VALUES ({', '.join('?' * 21)})"
_INSERT_BATCH = "INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, 'open', '')"
_INSERT_MEMBER = "INSERT OR REPLACE INTO batch_members VALUES (?, ?, ?, ?)"
_SETTLE_BATCH = "UPDATE batches SET state = ?, made = ? WHERE id = ?"
_INSERT_REFERENCE = "INSERT OR IGNORE INTO asset_references VALUES (?, ?)"
_DELETE_REFERENCES = "DELETE FROM asset_references WHERE file = ?"
PLACED = ("trajectories", "batches", "batch_members")
"""Tables whose rows have a position in the log."""


Statement = tuple[str, tuple[Any, ...]]
"""One change to the tables: SQL and its values. A plain tuple: there is one for each record."""


def rows(waiting: Iterable[LocatedEntry]) -> Iterator[Statement]:
    """The changes to the projection, in order."""
    for listed, location in waiting:
        match listed:
            case TrajectoryEntry():
                yield _trajectory_row(listed, location)
                if listed.assets:
                    yield from (_asset_reference(name, location.file) for name in listed.assets)
            case BatchEntry(batch, run, version, groups):
                yield _batch_row(batch, run, version, location)
                yield from (_member_row(run, group, location) for group in groups)
            case BatchAcked():
                made = str(listed.version) if listed.version is not None else ""
                yield _batch_settled(listed.batch, "acked", made)
            case BatchDissolved():
                yield _batch_settled(listed.batch, "dissolved")
            case FileDeleted(number):
                yield from _file_gone(number)


def _trajectory_row(listed: TrajectoryEntry, location: Location) -> Statement:
    outcome, stop_reason, provenance, _ = listed
    file, offset, length = location
    values = (
        file << OFFSET_BITS | offset,
        outcome.trajectory,
        outcome.run,
        outcome.group,
        outcome.member,
        outcome.episode,
        outcome.attempt,
        outcome.task.environment,
        outcome.status,
        stop_reason,
        provenance.worker,
        sum(outcome.rewards.values()) if outcome.rewards else None,
        outcome.turns,
        outcome.row_tokens,
        outcome.size_bytes,
        _version(outcome.low),
        _version(outcome.high),
        provenance.evaluation,
        msgspec.json.encode(outcome.failure).decode() if outcome.failure else None,
        length,
    )
    return _INSERT_TRAJECTORY, (*values, _checksum(values))


@lru_cache(maxsize=64)
def _version(version: Version | None) -> str:
    """The text form; thousands of records in a row are of a few versions."""
    return "" if version is None else str(version)


def is_intact(row: tuple[Any, ...]) -> bool:
    """Whether the row of a trajectory, all its columns, is as it was written."""
    return bool(_checksum(row[:-1]) == row[-1])


def _checksum(values: tuple[Any, ...]) -> int:
    return zlib.crc32(_encode(values))


def _batch_row(batch: str, run: str, version: str, location: Location) -> Statement:
    """The row of a frozen batch."""
    return _INSERT_BATCH, (batch, run, version, location.position, location.length)


def _member_row(run: str, group: str, head: Location) -> Statement:
    """A group was frozen into a batch; the last one counts."""
    return _INSERT_MEMBER, (run, group, head.position, head.length)


def _asset_reference(asset: str, file: int) -> Statement:
    """A trajectory in this file of the log refers to an asset."""
    return _INSERT_REFERENCE, (bytes.fromhex(asset), file)


def _file_gone(file: int) -> list[Statement]:
    """A file of the log was deleted, and so was all that was in it or referred to assets from there."""
    span = (Location(file, 0, 0).position, Location(file + 1, 0, 0).position)
    placed: list[Statement] = [(f"DELETE FROM {table} WHERE position >= ? AND position < ?", span) for table in PLACED]
    return [*placed, (_DELETE_REFERENCES, (file,))]


def _batch_settled(batch: str, state: str, made: str = "") -> Statement:
    """A batch was acked (``made``: the version of that step) or dissolved."""
    return _SETTLE_BATCH, (state, made, batch)
