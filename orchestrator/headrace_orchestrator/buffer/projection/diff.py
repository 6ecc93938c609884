"""Comparing a projection with one that was made from the log.

* The projection is copied first: the one that is in use is never locked for long, and never written.
* Every table is compared row by row, but for what was in parts of the log that are lost.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from headrace_orchestrator.buffer.log.location import OFFSET_BITS
from headrace_orchestrator.buffer.projection.rows import SCHEMA

MOST_NAMES = 100
"""So many ids of one kind of difference are named."""

_DECIDED_LATER = frozenset(("state", "made"))
"""Columns that a later record sets: they cannot be compared where an event is lost."""
_OVERWRITTEN = frozenset(("batch_members",))
"""Tables whose rows a later record replaces: the same."""


class ProjectionCopy:
    """A copy of the projection that a service left. ``cursor`` is the position up to which it has the log; ``broken``
    says why it cannot be read, if it cannot."""

    def __init__(self, path: Path) -> None:
        self.cursor = 0
        self.broken = ""
        self.connection = sqlite3.connect(path, isolation_level=None)
        # A damaged name is still to be shown.
        self.connection.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            found = self.connection.execute("SELECT schema, log, position, inverse FROM cursor").fetchall()
        except (sqlite3.DatabaseError, OverflowError, UnicodeDecodeError) as error:
            self.broken = f"it cannot be read: {error}"
            return
        if len(found) != 1 or not isinstance(found[0][2], int) or found[0][2] != -found[0][3]:
            self.broken = "it does not say how far it is"
            return
        self.schema, self.log, self.cursor, _ = found[0]
        if self.schema != SCHEMA:
            self.broken = f"its tables are of version {self.schema}, not {SCHEMA}"

    def problems(self, log: str) -> Iterator[str]:
        """What is wrong with it as a database, or with whose it is."""
        if self.broken:
            yield self.broken
            return
        if self.log != log:
            self.broken = f"it is of log {self.log}, not {log}"
            yield self.broken
            return
        try:
            for (line,) in self.connection.execute("PRAGMA integrity_check(20)"):
                if line != "ok":
                    yield f"SQLite says: {line}"
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self.broken = f"it cannot be read: {error}"
            yield self.broken

    def names(self, start: int, end: int) -> list[str]:
        """Ids of trajectories and batches whose records begin in a part of the log; none where that cannot be read."""
        if self.broken:
            return []
        found: list[str] = []
        for table in ("trajectories", "batches"):
            query = f"SELECT id FROM {table} WHERE position >= ? AND position < ? ORDER BY position LIMIT {MOST_NAMES}"
            try:
                found += [str(id) for (id,) in self.connection.execute(query, (start, end))]
            except sqlite3.DatabaseError:
                continue  # what is wrong with the projection is a finding of its own
        return found

    def close(self) -> None:
        self.connection.close()


def copy_projection(source: Path, target: Path, *, live: bool) -> ProjectionCopy | None:
    """A copy to look into; None if there is no projection."""
    if not source.exists():
        return None
    if live:
        # One read transaction: the copy is of one moment, and the writer waits for nothing.
        with (
            closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as lived,
            closing(sqlite3.connect(target)) as copied,
        ):
            lived.backup(copied)
    else:
        for suffix in ("", "-wal"):
            file = source.with_name(source.name + suffix)
            if file.exists():
                shutil.copyfile(file, target.with_name(target.name + suffix))
    return ProjectionCopy(target)


def differences(
    lived: ProjectionCopy, built: Path, passed_over: Sequence[tuple[int, int]], *, settled: bool
) -> Iterator[tuple[list[str], str]]:
    """Where the tables are not the same: ids, and what is wrong with their rows. Rows of records in the ranges of
    positions are passed over; ``settled``: no event is among these."""
    connection = lived.connection
    try:
        connection.execute("ATTACH ? AS built", (str(built),))
        connection.execute("CREATE TEMP TABLE lost (start INTEGER, end INTEGER)")
        connection.executemany("INSERT INTO lost VALUES (?, ?)", passed_over)
        tables = connection.execute("SELECT name FROM built.sqlite_master WHERE type = 'table' AND name != 'cursor'")
        for (table,) in tables.fetchall():
            if settled or table not in _OVERWRITTEN:
                yield from _differences_of(connection, table, settled)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        yield [], f"it cannot be read: {error}"


def _differences_of(connection: sqlite3.Connection, table: str, settled: bool) -> Iterator[tuple[list[str], str]]:
    columns = [str(row[1]) for row in connection.execute(f"PRAGMA built.table_info({table})")]
    compared = ", ".join(name for name in columns if settled or name not in _DECIDED_LATER)
    known = "id" if "id" in columns else next((name for name in columns if name.endswith("_id")), columns[0])
    kept = ""
    if "position" in columns:
        kept = "WHERE NOT EXISTS (SELECT 1 FROM lost WHERE position >= start AND position < end)"
    elif "file" in columns:
        whole = f"file << {OFFSET_BITS} >= start AND (file + 1) << {OFFSET_BITS} <= end"
        kept = f"WHERE NOT EXISTS (SELECT 1 FROM lost WHERE {whole})"
    for one, other, problem in (
        ("built", "main", "is missing or is not as the log has it"),
        ("main", "built", "is not in the log like that"),
    ):
        query = f"SELECT {compared} FROM {one}.{table} {kept} EXCEPT SELECT {compared} FROM {other}.{table}"
        count = connection.execute(f"SELECT COUNT(*) FROM ({query})").fetchone()[0]
        if count:
            names = connection.execute(f"SELECT DISTINCT {known} FROM ({query}) LIMIT {MOST_NAMES}").fetchall()
            rows = "a row" if count == 1 else f"each of {count} rows"
            yield (
                [name.hex() if isinstance(name, bytes) else str(name) for (name,) in names],
                f"{rows} of {table} {problem}",
            )
