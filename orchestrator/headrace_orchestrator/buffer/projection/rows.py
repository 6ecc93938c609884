"""The projection's tables, and the rows of each entry.

* Rows follow from entries alone, so a rebuilt projection equals the original one.
* A flipped byte in a listed row is noticed when the row is read, because the row has a checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from headrace.trajectory import Version
from headrace_orchestrator.buffer.log.location import OFFSET_BITS, Location, start_of
from headrace_orchestrator.buffer.projection.entries import (
    FileDeleted,
    LocatedEntry,
    ProjectedBatch,
    ProjectedTrajectory,
)
from headrace_orchestrator.scheduler.events import BatchAcked, BatchDissolved

SCHEMA = 5
"""Version of the tables; tables of another version are deleted and rebuilt."""

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
"""The statements as SQLite stores them."""

COLUMNS = (
    "position, id, run, group_id, member, episode, attempt, environment, status, stop_reason, worker, reward, turns, "
    "row_tokens, size_bytes, low, high, evaluation, failure, length, checksum"
)
_encode = msgspec.msgpack.Encoder().encode

WORKER, LENGTH = 10, 19
"""Indexes of two of these columns."""
_INSERT_TRAJECTORY = f"INSERT OR REPLACE INTO trajectories ({COLUMNS}) VALUES ({', '.join('?' * 21)})"
_INSERT_BATCH = "INSERT OR REPLACE INTO batches VALUES (?, ?, ?, ?, ?, 'open', '')"
_INSERT_MEMBER = "INSERT OR REPLACE INTO batch_members VALUES (?, ?, ?, ?)"
_END_BATCH = "UPDATE batches SET state = ?, made = ? WHERE id = ?"
"""``made``: the version of an acked step."""
_INSERT_REFERENCE = "INSERT OR IGNORE INTO asset_references VALUES (?, ?)"
_DELETE_REFERENCES = "DELETE FROM asset_references WHERE file = ?"
LOCATED_TABLES = ("trajectories", "batches", "batch_members")
"""Tables whose rows have a position in the log."""


Statement = tuple[str, tuple[Any, ...]]
"""A change to the tables: SQL and its values. A plain tuple, because each record needs one."""


def rows(entries: Iterable[LocatedEntry]) -> Iterator[Statement]:
    """The changes to the projection, in order."""
    for entry, location in entries:
        match entry:
            case ProjectedTrajectory():
                yield _trajectory_row(entry, location)
                if entry.assets:
                    yield from ((_INSERT_REFERENCE, (bytes.fromhex(name), location.file)) for name in entry.assets)
            case ProjectedBatch(batch, run, version, groups):
                position, length = location.position, location.length
                yield _INSERT_BATCH, (batch, run, version, position, length)
                yield from ((_INSERT_MEMBER, (run, group, position, length)) for group in groups)
            case BatchAcked():
                made = str(entry.version) if entry.version is not None else ""
                yield _END_BATCH, ("acked", made, entry.batch)
            case BatchDissolved():
                yield _END_BATCH, ("dissolved", "", entry.batch)
            case FileDeleted(number):
                yield from _file_deleted(number)


def _trajectory_row(entry: ProjectedTrajectory, location: Location) -> Statement:
    event, stop_reason, provenance, _ = entry
    file, offset, length = location
    values = (
        file << OFFSET_BITS | offset,
        event.trajectory,
        event.run,
        event.group,
        event.member,
        event.episode,
        event.attempt,
        event.task.environment,
        event.status,
        stop_reason,
        provenance.worker,
        sum(event.rewards.values()) if event.rewards else None,
        event.turns,
        event.row_tokens,
        event.size_bytes,
        _version(event.low),
        _version(event.high),
        provenance.evaluation,
        msgspec.json.encode(event.failure).decode() if event.failure else None,
        length,
    )
    return _INSERT_TRAJECTORY, (*values, _checksum(values))


@lru_cache(maxsize=64)
def _version(version: Version | None) -> str:
    """The text form, cached: thousands of consecutive records have a few versions."""
    return "" if version is None else str(version)


def is_intact(row: tuple[Any, ...]) -> bool:
    """True if the row of a trajectory, with all its columns, is unchanged since it was written."""
    return bool(_checksum(row[:-1]) == row[-1])


def _checksum(values: tuple[Any, ...]) -> int:
    return zlib.crc32(_encode(values))


def _file_deleted(file: int) -> list[Statement]:
    """Deletion of all rows that come from a file of the log."""
    span = (start_of(file), start_of(file + 1))
    located: list[Statement] = [
        (f"DELETE FROM {table} WHERE position >= ? AND position < ?", span) for table in LOCATED_TABLES
    ]
    return [*located, (_DELETE_REFERENCES, (file,))]
