"""The projection: what listings and lookups need, in SQLite, derived from the log.

* The log is the truth: delete the projection, and the log gives it back the same.
* A projection of another log is built anew, however long that log is.
* It never runs ahead of the disk: only frames that are synced are projected.
* Writing is off the hot path: rows are collected and written in small transactions, by a thread of their own.
* A byte that was flipped in a listed row is noticed when it is read; what is damaged is built anew at the next start.
* An id behind all that are here is known to be new without a lookup.
* A listing is read by pages; no reader holds the database open between them.
* The write-ahead file shrinks again once a reader from outside is gone, also when nothing is written any more.
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
from headrace_orchestrator.buffer.log.location import OFFSET_BITS, Location
from headrace_orchestrator.buffer.projection.entries import (
    FILTER_COLUMNS,
    LocatedEntry,
    StoredTrajectory,
    TrajectoryEntry,
)
from headrace_orchestrator.buffer.projection.rows import (
    COLUMNS,
    LENGTH,
    PLACED,
    SCHEMA,
    STATEMENTS,
    TABLES,
    WORKER,
    is_intact,
    rows,
)

_PHASES = {sqlite3.SQLITE_FULL: "disk full", sqlite3.SQLITE_READONLY: "disk is read-only"}
"""By SQLite's primary code: the word for what keeps the projection from being written, as the log has it."""

WAL_LIMIT_BYTES = 16 << 20
"""SQLite cuts its write-ahead file back to this at each checkpoint, so that a slow reader leaves no lasting peak."""

ROWS_TOGETHER = 128
"""Rows of one insertion; with their 21 columns far fewer values than SQLite takes."""

BUSY_MS = 5000
"""How long a statement waits for a lock that somebody outside holds, in milliseconds."""


class SqliteProjection:
    """The database of the log with this id. ``write`` is called by one thread at a time; readers may be in any.

    ``owners`` reads over a connection of its own, so that whoever asks on the event loop never waits for a writer.
    """

    def __init__(self, path: Path, log: str) -> None:
        self._path = path
        self._log = log
        self._lock = threading.Lock()
        #: No id here is behind it. Ids sort by the time they were made, so that most that are asked for are.
        self._last_id = ""
        self._connection = self._open()
        self._lookups = _connect(path)

    def _open(self) -> sqlite3.Connection:
        """Open, or start anew where the tables are not ours or are damaged: everything in them is in the log."""
        try:
            connection = _connect(self._path)
            with suppress(*_UNREADABLE, _DamagedError):
                found = connection.execute("SELECT schema, log, position + inverse FROM cursor").fetchall()
                tables = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
                if found == [(SCHEMA, self._log, 0)] and {sql for (sql,) in tables} == STATEMENTS:
                    self._last_id = _last_id(connection)
                    return connection
            connection.close()
            return self._create()
        except _UNREADABLE:
            return self._create()

    def _create(self) -> sqlite3.Connection:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        connection = _connect(self._path)
        connection.executescript(f"BEGIN;{TABLES}COMMIT;")
        connection.execute("INSERT INTO cursor VALUES (?, ?, 0, 0)", (SCHEMA, self._log))
        return connection

    @contextmanager
    def _locked(self) -> Iterator[sqlite3.Connection]:
        with self._told(), self._lock:
            yield self._connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except _DamagedError as error:
            raise self._distrusted(str(error)) from None
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            if _tells_of_damage(error):
                raise self._distrusted(str(error)) from error
            raise StoreError(
                f"The projection {self._path.name} failed: {error}.",
                hint="Free disk space, or stop the service and delete the file: the log gives it back.",
                phase=_PHASES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "failed"),
            ) from error

    def _distrusted(self, problem: str) -> StoreError:
        """Have it built anew at the next start."""
        with suppress(sqlite3.Error), self._lock:
            self._connection.execute("DELETE FROM cursor")
        return StoreError(
            f"The projection {self._path.name} is damaged: {problem}.",
            hint="Restart the service: it is built anew from the log, which has lost nothing by this.",
            phase="failed",
        )

    @property
    def cursor(self) -> int:
        """Position up to which the log is projected; 0 where that is not to be trusted any more."""
        with self._locked() as connection:
            row = connection.execute("SELECT position FROM cursor").fetchone()
        return 0 if row is None else int(row[0])

    def check(self) -> None:
        """Read everything and see that tables and indexes say the same, before something is deleted on their word.
        Blocking, over a connection of its own. Raises StoreError if they do not."""
        with self._told(), closing(_connect(self._path)) as connection:
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise _DamagedError(str(found))

    def reset(self) -> None:
        """Forget everything: the log will give it back."""
        with self._lock:
            self._lookups.close()
            self._connection.close()
            self._connection = self._create()
            self._last_id = ""
            self._lookups = _connect(self._path)

    def write(self, waiting: Iterable[LocatedEntry], cursor: int) -> None:
        """Take in what is listed, in order, and move the cursor, in one transaction. Raises StoreError."""
        waiting = tuple(waiting)
        ids = (listed.outcome.trajectory for listed, _ in waiting if isinstance(listed, TrajectoryEntry))
        with self._locked() as connection:
            self._last_id = max(self._last_id, max(ids, default=""))  # before any of them is here
            connection.execute("BEGIN IMMEDIATE")
            try:
                for sql, alike in groupby(rows(waiting), key=itemgetter(0)):
                    _carry_out(connection, sql, [values for _, values in alike])
                connection.execute("UPDATE cursor SET position = ?, inverse = ?", (cursor, -cursor))
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def find(self, trajectory: str) -> StoredTrajectory | None:
        """A trajectory by its id."""
        return self._stored("id = ?", trajectory)

    def find_episode(self, episode: str) -> StoredTrajectory | None:
        """The terminal record of an episode."""
        return self._stored("episode = ?", episode)

    def _stored(self, where: str, value: str) -> StoredTrajectory | None:
        with self._locked() as connection:
            row = connection.execute(
                f"SELECT {COLUMNS} FROM trajectories WHERE {where} ORDER BY position LIMIT 1", (value,)
            ).fetchone()
            if row is None:
                return None
            _verify(row)
        position, name, run, group, _, episode, attempt, *_ = row
        return StoredTrajectory(name, run, group, episode, attempt, row[WORKER], Location.at(position, row[LENGTH]))

    def owners(self, trajectories: Sequence[str]) -> dict[str, str]:
        """Of these trajectories those that are here, with their episodes. For one thread: the event loop's."""
        # For a lookup SQLite lets go of the interpreter's lock, and getting it back takes longer than the lookup.
        maybe_here = [id for id in trajectories if id <= self._last_id]
        if not maybe_here:
            return {}
        marks = ",".join("?" * len(maybe_here))
        with self._told():
            rows = self._lookups.execute(
                f"SELECT id, episode FROM trajectories WHERE id IN ({marks})", maybe_here
            ).fetchall()
        return {str(id): str(episode) for id, episode in rows}

    def referred(self, assets: Sequence[str]) -> set[str]:
        """Of these assets those that a trajectory refers to. For one thread: the event loop's."""
        marks = ",".join("?" * len(assets))
        with self._told():
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
        """The files of the log that anything here is of, ascending; one lookup each, however much is in them."""
        selects = [f"SELECT min(position) FROM {table} WHERE position >= :start" for table in PLACED]
        selects.append("SELECT min(file) << :bits FROM asset_references WHERE file >= :start >> :bits")
        least = " UNION ALL ".join(selects)
        found: list[int] = []
        with self._locked() as connection:
            while True:
                start = Location(found[-1] + 1, 0, 0).position if found else 0
                places = connection.execute(least, {"start": start, "bits": OFFSET_BITS}).fetchall()
                if not (here := [int(place) for (place,) in places if place is not None]):
                    return found
                found.append(Location.at(min(here), 0).file)

    def count(self, file: int) -> int:
        """How many trajectories lie in a file of the log."""
        span = (Location(file, 0, 0).position, Location(file + 1, 0, 0).position)
        with self._locked() as connection:
            row = connection.execute(
                "SELECT count(*) FROM trajectories WHERE position >= ? AND position < ?", span
            ).fetchone()
        return int(row[0])

    def batch_of(self, run: str, group: str) -> Location | None:
        """Where the head of the batch is that a group was last frozen into."""
        with self._locked() as connection:
            row = connection.execute(
                "SELECT position, length FROM batch_members WHERE run = ? AND group_id = ?", (run, group)
            ).fetchone()
        return Location.at(*row) if row else None

    def page(
        self, run: str, filters: Mapping[str, str], limit: int, before: int | None, *, now_ms: int
    ) -> tuple[list[messages.TrajectorySummary], int | None]:
        """A page, newest first, and the ``before`` of the next one (None at the end)."""
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
        more = rows[limit - 1][0] if len(rows) > limit else None
        return [_summary(row, now_ms) for row in rows[:limit]], more

    def trim(self) -> None:
        """Give back what the write-ahead file grew to while somebody read from outside. Waits for no reader: while one
        is there, a later call does it. Raises StoreError."""
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
        """Close the database; it is whole on disk after that."""
        with self._lock:
            self._lookups.close()
            self._connection.close()


class _DamagedError(Exception):
    """A row, or an index, is not as it was written."""


_UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What reading a damaged file raises: SQLite's own messages may quote bytes that are no text."""
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _tells_of_damage(error: Exception) -> bool:
    """Whether an error is the file's fault; text that is none has an error without a code."""
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _CORRUPT
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT


def _verify(row: tuple[Any, ...]) -> None:
    if not is_intact(row):
        raise _DamagedError(f"the row of trajectory {row[1]!r} at position {row[0]} is not as it was written")


def _last_id(connection: sqlite3.Connection) -> str:
    """The id that sorts last, or the empty string. Raises _DamagedError: all behind a wrong one would seem new."""
    row = connection.execute(f"SELECT {COLUMNS} FROM trajectories ORDER BY id DESC LIMIT 1").fetchone()
    if row is None:
        return ""
    _verify(row)
    return str(row[1])


def _carry_out(connection: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Carry out a statement for each row. Many insertions go in one: for each statement SQLite lets go of the
    interpreter's lock, and getting it back from a busy event loop takes longer than the statement itself."""
    insertion, values, row = sql.partition(" VALUES ")
    whole = len(rows) - len(rows) % ROWS_TOGETHER if values else 0
    for start in range(0, whole, ROWS_TOGETHER):
        together = f"{insertion} VALUES {', '.join([row] * ROWS_TOGETHER)}"
        connection.execute(together, list(chain.from_iterable(rows[start : start + ROWS_TOGETHER])))
    connection.executemany(sql, rows[whole:])


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
        age_s=max(0.0, (now_ms - _made_ms(trajectory)) / 1000),
    )


def _made_ms(trajectory: str) -> int:
    """Unix time in milliseconds at which a UUIDv7 was made: the log has no clock of its own."""
    try:
        return int(trajectory.replace("-", "")[:12], 16)
    except ValueError:
        return 0
