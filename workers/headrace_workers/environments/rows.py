"""Rows of a data set: a file with one JSON object a line, read a line at a time.

* The seed chooses the row. The same seed, the same row, on every worker that has the same file.
* A file is indexed once in a process, and read from its index; it may be larger than memory.
* A row that cannot be read is a failure that names the file and the line.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from headrace.errors import EnvironmentFailure

_indexes: dict[tuple[str, int, int], array[int]] = {}
_indexing = Lock()


def row_of(path: str | Path, seed: int | None) -> dict[str, Any]:
    """The row that a seed chooses (without one: any). Raises EnvironmentFailure ``no-rows``, ``bad-row``."""
    try:
        starts = _index(Path(path))
        if not starts:
            raise bad_row(f"{path} has no rows.", kind="no-rows")
        number = random.Random(seed).randrange(len(starts))
        with Path(path).open("rb") as file:
            file.seek(starts[number])
            line = file.readline()
    except OSError as error:
        raise bad_row(f"{path}: {error.strerror}.", kind="no-rows") from error
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise bad_row(f"Row {number + 1} of {path} is no JSON object: {error}.") from error


def bad_row(detail: str, *, kind: str = "bad-row") -> EnvironmentFailure:
    """The failure of a row that makes no task."""
    hint = "Mend the data set; it must be the same file on every worker."
    return EnvironmentFailure(detail, hint=hint, kind=kind, retryable=False)


def _index(path: Path) -> array[int]:
    """Where the lines begin that are not empty."""
    status = path.stat()
    key = (str(path), status.st_mtime_ns, status.st_size)
    with _indexing:
        if key not in _indexes:
            starts, position = array("Q"), 0
            with path.open("rb") as file:
                for line in file:
                    if line.strip():
                        starts.append(position)
                    position += len(line)
            _indexes[key] = starts
        return _indexes[key]
