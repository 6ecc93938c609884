"""Comparison of a service's projection with one that was rebuilt from the log.

* The projection is copied first: the one in use is never locked for long, and never written.
* Every table is compared row by row, except for records in parts of the log that are lost.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from headrace_orchestrator.buffer.log.location import OFFSET_BITS
from headrace_orchestrator.buffer.projection.rows import SCHEMA

MAX_NAMES = 100
"""Maximum number of ids named for one kind of difference."""

_SET_LATER = frozenset(("state", "made"))
"""Columns that a later event sets: they cannot be compared if events are lost."""
_OVERWRITTEN = frozenset(("batch_members",))
"""Tables whose rows a later event replaces: they cannot be compared then either."""


class ProjectionCopy:
    """A copy of a service's projection. ``cursor`` is the position up to which it has the log; ``unreadable`` is the
    reason why it cannot be read, if it cannot."""

    def __init__(self, path: Path) -> None:
        self.cursor = 0
        self.unreadable = ""
        self.connection = sqlite3.connect(path, isolation_level=None)
        # A damaged name should still be shown.
        self.connection.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            rows = self.connection.execute("SELECT schema, log, position, inverse FROM cursor").fetchall()
        except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:
            self.unreadable = f"it cannot be read: {error}"
            return
        if len(rows) != 1 or not isinstance(rows[0][2], int) or rows[0][2] != -rows[0][3]:
            self.unreadable = "its cursor is damaged"
            return
        self.schema, self.log, self.cursor, _ = rows[0]
        if self.schema != SCHEMA:
            self.unreadable = f"its tables are of version {self.schema}, not {SCHEMA}"

    def problems(self, log: str) -> Iterator[str]:
        """Problems of the database itself, or of the log that it belongs to."""
        if self.unreadable:
            yield self.unreadable
            return
        if self.log != log:
            self.unreadable = f"it belongs to log {self.log}, not {log}"
            yield self.unreadable
            return
        try:
            for (line,) in self.connection.execute("PRAGMA integrity_check(20)"):
                if line != "ok":
                    yield f"SQLite reports: {line}"
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self.unreadable = f"it cannot be read: {error}"
            yield self.unreadable

    def names(self, start: int, end: int) -> list[str]:
        """Ids of trajectories and batches whose records begin in a part of the log; none if they cannot be read."""
        if self.unreadable:
            return []
        ids: list[str] = []
        for table in ("trajectories", "batches"):
            query = f"SELECT id FROM {table} WHERE position >= ? AND position < ? ORDER BY position LIMIT {MAX_NAMES}"
            try:
                ids += [str(id) for (id,) in self.connection.execute(query, (start, end))]
            except sqlite3.DatabaseError:
                continue  # damage of the projection is a finding of its own
        return ids

    def close(self) -> None:
        self.connection.close()


def copy_projection(source: Path, target: Path, *, live: bool) -> ProjectionCopy | None:
    """A copy of the projection, taken without locking a live one for long; None if ``source`` does not exist."""
    if not source.exists():
        return None
    if live:
        # One read transaction: the copy shows one moment, and the writer does not wait.
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as original,
            closing(sqlite3.connect(target)) as copied,
        ):
            original.backup(copied)
    else:
        for suffix in ("", "-wal"):
            file = source.with_name(source.name + suffix)
            if file.exists():
                shutil.copyfile(file, target.with_name(target.name + suffix))
    return ProjectionCopy(target)


def differences(
    projection: ProjectionCopy, rebuilt: Path, lost: Sequence[tuple[int, int]], *, events_lost: bool
) -> Iterator[tuple[list[str], str]]:
    """Differences between the tables: ids, and the problem of their rows. Rows of records in the ``lost`` ranges of
    positions are not compared; ``events_lost``: events may be among these."""
    connection = projection.connection
    try:
        connection.execute("ATTACH ? AS rebuilt", (str(rebuilt),))
        connection.execute("CREATE TEMP TABLE lost (start INTEGER, end INTEGER)")
        connection.executemany("INSERT INTO lost VALUES (?, ?)", lost)
        tables = connection.execute("SELECT name FROM rebuilt.sqlite_master WHERE type = 'table' AND name != 'cursor'")
        for (table,) in tables.fetchall():
            if not (events_lost and table in _OVERWRITTEN):
                yield from _table_differences(connection, table, events_lost)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        yield [], f"it cannot be read: {error}"


def _table_differences(
    connection: sqlite3.Connection, table: str, events_lost: bool
) -> Iterator[tuple[list[str], str]]:
    columns = [str(row[1]) for row in connection.execute(f"PRAGMA rebuilt.table_info({table})")]
    compared = ", ".join(name for name in columns if not (events_lost and name in _SET_LATER))
    id_column = "id" if "id" in columns else next((name for name in columns if name.endswith("_id")), columns[0])
    condition = ""
    if "position" in columns:
        condition = "WHERE NOT EXISTS (SELECT 1 FROM lost WHERE position >= start AND position < end)"
    elif "file" in columns:
        whole = f"file << {OFFSET_BITS} >= start AND (file + 1) << {OFFSET_BITS} <= end"
        condition = f"WHERE NOT EXISTS (SELECT 1 FROM lost WHERE {whole})"
    for one, other, problem in (
        ("rebuilt", "main", "is missing or differs from the log"),
        ("main", "rebuilt", "is not in the log, or differs from it"),
    ):
        query = f"SELECT {compared} FROM {one}.{table} {condition} EXCEPT SELECT {compared} FROM {other}.{table}"
        count = connection.execute(f"SELECT COUNT(*) FROM ({query})").fetchone()[0]
        if count:
            names = connection.execute(f"SELECT DISTINCT {id_column} FROM ({query}) LIMIT {MAX_NAMES}").fetchall()
            rows = "a row" if count == 1 else f"each of {count} rows"
            yield (
                [name.hex() if isinstance(name, bytes) else str(name) for (name,) in names],
                f"{rows} of {table} {problem}",
            )
