"""The projection in SQLite: the data that listings and lookups need, derived from the log.

* The log is the source of truth: a deleted projection is rebuilt from it with the same content.
* A projection of another log is rebuilt, however long that log is.
* The projection never runs ahead of the disk: only frames that are synced are projected.
* Writing is off the hot path: rows are collected and written in small transactions, by a thread of their own.
* A flipped byte in a listed row is noticed when the row is read; a damaged projection is rebuilt at the next start.
* An id that sorts behind all stored ids is known to be new without a lookup.
* A listing is read by pages; no reader keeps the database open between them.
* The write-ahead file shrinks again once an external reader is gone, even if nothing is written any more.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import StoreError
from headrace.trajectory import Failure
from headrace.wire import messages
from headrace_orchestrator.buffer.log.location import OFFSET_BITS, Location, file_at, start_of
from headrace_orchestrator.buffer.projection.entries import (
    FILTER_COLUMNS,
    LocatedEntry,
    ProjectedTrajectory,
    StoredTrajectory,
)
from headrace_orchestrator.buffer.projection.rows import (
    COLUMNS,
    LENGTH,
    LOCATED_TABLES,
    SCHEMA,
    STATEMENTS,
    TABLES,
    WORKER,
    is_intact,
    rows,
)

_PHASES = {sqlite3.SQLITE_FULL: "disk full", sqlite3.SQLITE_READONLY: "disk is read-only"}
"""The reason in the words of the log's phases, by SQLite's primary error code."""

WAL_LIMIT_BYTES = 16 << 20
"""SQLite cuts its write-ahead file back to this at each checkpoint, so that a slow reader leaves no lasting peak."""

ROWS_PER_INSERT = 128
"""Rows of one INSERT statement; with 21 columns each, far fewer values than SQLite's limit."""

BUSY_MS = 5000
"""Milliseconds that a statement waits for a lock that an external program holds."""


class SqliteProjection:
    """The database of the log with this id. One thread at a time calls ``write``; any thread may read.

    ``episodes_of`` and ``referenced`` use a connection of their own, so that the event loop never waits for a writer.
    """

    def __init__(self, path: Path, log: str) -> None:
        """Open the database, or make it. Raises StoreError."""
        self._path = path
        self._log = log
        self._lock = threading.Lock()
        #: The stored id that sorts last. Ids sort by creation time, so most ids that are looked up sort behind it.
        self._last_id = ""
        try:
            self._connection = self._open()
            self._lookups = _connect(path)
        except sqlite3.Error as error:
            raise StoreError(
                f"The projection {path.name} cannot be opened: {error}.",
                hint="Free disk space, or delete the file while the service is stopped: it is rebuilt from the log.",
            ) from error

    def _open(self) -> sqlite3.Connection:
        """Open the database, or create a new one if the tables belong to another log or are damaged."""
        try:
            connection = _connect(self._path)
            with suppress(*_UNREADABLE, _DamagedError):
                cursor = connection.execute("SELECT schema, log, position + inverse FROM cursor").fetchall()
                tables = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
                if cursor == [(SCHEMA, self._log, 0)] and {sql for (sql,) in tables} == STATEMENTS:
                    self._last_id = _last_id(connection)
                    return connection
            connection.close()
            return self._create()
        except _UNREADABLE:
            return self._create()

    def _create(self) -> sqlite3.Connection:
        delete_database(self._path)
        connection = _connect(self._path)
        connection.executescript(f"BEGIN;{TABLES}COMMIT;")
        connection.execute("INSERT INTO cursor VALUES (?, ?, 0, 0)", (SCHEMA, self._log))
        return connection

    @contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        with self._store_errors(), self._lock:
            yield self._connection

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except _DamagedError as error:
            raise self._mark_damaged(str(error)) from None
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            if _is_damage(error):
                raise self._mark_damaged(str(error)) from error
            raise StoreError(
                f"The projection {self._path.name} failed: {error}.",
                hint="Free disk space, or stop the service and delete the file: it is rebuilt from the log.",
                phase=_PHASES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "failed"),
            ) from error

    def _mark_damaged(self, problem: str) -> StoreError:
        """Have the next start rebuild the database."""
        with suppress(sqlite3.Error), self._lock:
            self._connection.execute("DELETE FROM cursor")
        return StoreError(
            f"The projection {self._path.name} is damaged: {problem}.",
            hint="Restart the service: it rebuilds the projection from the log, which has lost nothing.",
            phase="failed",
        )

    @property
    def cursor(self) -> int:
        """Position up to which the log is projected; 0 if the database is damaged."""
        with self._locked() as connection:
            row = connection.execute("SELECT position FROM cursor").fetchone()
        return 0 if row is None else int(row[0])

    def check(self) -> None:
        """Read everything and verify that tables and indexes agree, before data is deleted because of them. Blocking,
        over a connection of its own. Raises StoreError if they do not."""
        with self._store_errors(), closing(_connect(self._path)) as connection:
            (problem,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if problem != "ok":
                raise _DamagedError(str(problem))

    def reset(self) -> None:
        """Delete everything: the log can restore it."""
        with self._lock:
            self._lookups.close()
            self._connection.close()
            self._connection = self._create()
            self._last_id = ""
            self._lookups = _connect(self._path)

    def write(self, entries: Iterable[LocatedEntry], cursor: int) -> None:
        """Add entries in order and move the cursor, in one transaction. Raises StoreError."""
        entries = tuple(entries)
        ids = (entry.event.trajectory for entry, _ in entries if isinstance(entry, ProjectedTrajectory))
        with self._locked() as connection:
            self._last_id = max(self._last_id, max(ids, default=""))  # before any of them is stored
            connection.execute("BEGIN IMMEDIATE")
            try:
                for sql, changes in groupby(rows(entries), key=itemgetter(0)):
                    _execute(connection, sql, [values for _, values in changes])
                connection.execute("UPDATE cursor SET position = ?, inverse = ?", (cursor, -cursor))
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def find(self, trajectory: str) -> StoredTrajectory | None:
        """A trajectory by its id."""
        return self._find("id = ?", trajectory)

    def find_episode(self, episode: str) -> StoredTrajectory | None:
        """The terminal record of an episode."""
        return self._find("episode = ?", episode)

    def _find(self, where: str, value: str) -> StoredTrajectory | None:
        with self._locked() as connection:
            row = connection.execute(
                f"SELECT {COLUMNS} FROM trajectories WHERE {where} ORDER BY position LIMIT 1", (value,)
            ).fetchone()
            if row is None:
                return None
            _verify(row)
        position, name, run, group, _, episode, attempt, *_ = row
        return StoredTrajectory(
            name, run, group, episode, attempt, row[WORKER], Location.from_position(position, row[LENGTH])
        )

    def episodes_of(self, trajectories: Sequence[str]) -> dict[str, str]:
        """Episodes of the given trajectories by id, without unknown ones. Only for the thread of the event loop."""
        # SQLite releases the interpreter lock for a lookup, and getting it back takes longer than the lookup.
        maybe_stored = [id for id in trajectories if id <= self._last_id]
        if not maybe_stored:
            return {}
        marks = ",".join("?" * len(maybe_stored))
        with self._store_errors():
            rows = self._lookups.execute(
                f"SELECT id, episode FROM trajectories WHERE id IN ({marks})", maybe_stored
            ).fetchall()
        return {str(id): str(episode) for id, episode in rows}

    def referenced(self, assets: Sequence[str]) -> set[str]:
        """The given assets that a trajectory refers to. Only for the thread of the event loop."""
        marks = ",".join("?" * len(assets))
        with self._store_errors():
            rows = self._lookups.execute(
                f"SELECT DISTINCT asset FROM asset_references WHERE asset IN ({marks})", [*map(bytes.fromhex, assets)]
            ).fetchall()
        return {bytes(asset).hex() for (asset,) in rows}

    def assets_of(self, file: int) -> list[str]:
        """The assets that trajectories in a file of the log refer to."""
        with self._locked() as connection:
            rows = connection.execute("SELECT asset FROM asset_references WHERE file = ?", (file,)).fetchall()
        return [bytes(asset).hex() for (asset,) in rows]

    def files(self) -> list[int]:
        """The files of the log that entries come from, ascending; one lookup each, however many rows there are."""
        selects = [f"SELECT min(position) FROM {table} WHERE position >= :start" for table in LOCATED_TABLES]
        selects.append("SELECT min(file) << :bits FROM asset_references WHERE file >= :start >> :bits")
        least = " UNION ALL ".join(selects)
        files: list[int] = []
        with self._locked() as connection:
            while True:
                start = start_of(files[-1] + 1) if files else 0
                positions = connection.execute(least, {"start": start, "bits": OFFSET_BITS}).fetchall()
                if not (first := [int(position) for (position,) in positions if position is not None]):
                    return files
                files.append(file_at(min(first)))

    def count(self, file: int) -> int:
        """Number of trajectories in a file of the log."""
        span = (start_of(file), start_of(file + 1))
        with self._locked() as connection:
            row = connection.execute(
                "SELECT count(*) FROM trajectories WHERE position >= ? AND position < ?", span
            ).fetchone()
        return int(row[0])

    def batch_of(self, run: str, group: str) -> Location | None:
        """Location of the head of the batch that a group was last frozen into."""
        with self._locked() as connection:
            row = connection.execute(
                "SELECT position, length FROM batch_members WHERE run = ? AND group_id = ?", (run, group)
            ).fetchone()
        return Location.from_position(*row) if row else None

    def page(
        self, run: str, filters: Mapping[str, str], limit: int, before: int | None, *, now_ms: int
    ) -> tuple[list[messages.TrajectorySummary], int | None]:
        """A page of trajectories, newest first, and ``before`` of the next page (None at the end)."""
        where, values = ["run = ?"], [run]
        for name in FILTER_COLUMNS:
            if name in filters:
                where.append(f"{name} = ?")
                values.append(filters[name])
        bound: list[Any] = [*values]
        if before is not None:
            where.append("position < ?")
            bound.append(before)
        with self._locked() as connection:
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM trajectories WHERE {' AND '.join(where)} ORDER BY position DESC LIMIT ?",
                (*bound, limit + 1),
            ).fetchall()
            for row in rows:
                _verify(row)
        next_before = rows[limit - 1][0] if len(rows) > limit else None
        return [_summary(row, now_ms) for row in rows[:limit]], next_before

    def trim(self) -> None:
        """Shrink the write-ahead file, which grows while an external program reads. Does not wait for readers: while
        one is active, a later call shrinks the file. Raises StoreError."""
        if self.wal_bytes() <= WAL_LIMIT_BYTES:
            return
        with self._locked() as connection:
            connection.execute("PRAGMA busy_timeout = 0")
            try:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")

    def wal_bytes(self) -> int:
        """Size of SQLite's write-ahead file."""
        try:
            return self._path.with_name(self._path.name + "-wal").stat().st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Close the database; afterwards it is complete on disk."""
        with self._lock:
            self._lookups.close()
            self._connection.close()


def delete_database(path: Path) -> None:
    """Delete the file of a database, and the files that SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


class _DamagedError(Exception):
    """A row or an index was changed by damage."""


_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Errors of reading a damaged file. UnicodeDecodeError: SQLite's messages may quote bytes that are not valid text."""
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _is_damage(error: Exception) -> bool:
    """True if an error shows that the file is damaged; an error about invalid text has no code."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _CORRUPT
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT


def _verify(row: tuple[Any, ...]) -> None:
    if not is_intact(row):
        raise _DamagedError(f"the row of trajectory {row[1]!r} at position {row[0]} was changed after it was written")


def _last_id(connection: sqlite3.Connection) -> str:
    """The id that sorts last, or the empty string. Raises _DamagedError: a wrong id would make stored ids seem new."""
    row = connection.execute(f"SELECT {COLUMNS} FROM trajectories ORDER BY id DESC LIMIT 1").fetchone()
    if row is None:
        return ""
    _verify(row)
    return str(row[1])


def _execute(connection: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Execute a statement for each row. Many insertions share a statement: SQLite releases the interpreter lock for
    each one, and getting it back from a busy event loop takes longer than the statement itself."""
    insertion, values, row = sql.partition(" VALUES ")
    grouped = len(rows) - len(rows) % ROWS_PER_INSERT if values else 0
    for start in range(0, grouped, ROWS_PER_INSERT):
        many = f"{insertion} VALUES {', '.join([row] * ROWS_PER_INSERT)}"
        connection.execute(many, list(chain.from_iterable(rows[start : start + ROWS_PER_INSERT])))
    connection.executemany(sql, rows[grouped:])


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _summary(row: tuple[Any, ...], now_ms: int) -> messages.TrajectorySummary:
    trajectory = row[1]
    return messages.TrajectorySummary(
        id=trajectory,
        run=row[2],
        group=row[3],
        member=row[4],
        episode=row[5],
        attempt=row[6],
        environment=row[7],
        status=row[8],
        stop_reason=row[9],
        reward=row[11],
        turns=row[12],
        row_tokens=row[13],
        size_bytes=row[14],
        low=row[15],
        high=row[16],
        evaluation=row[17],
        failure=msgspec.json.decode(row[18], type=Failure) if row[18] else None,
        age_s=max(0.0, (now_ms - _created_ms(trajectory)) / 1000),
    )


def _created_ms(trajectory: str) -> int:
    """Unix time in milliseconds at which a UUIDv7 was created: the log itself stores no times."""
    try:
        return int(trajectory.replace("-", "")[:12], 16)
    except ValueError:
        return 0
