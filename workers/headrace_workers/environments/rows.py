"""Rows of a data set: a file with one JSON object per line.

* The seed selects the row: the same seed selects the same row on every worker with the same file.
* A file is indexed once per process and read by the index, one line at a time; it may be larger than memory.
* A row that cannot be read is a failure with the file and the row in its message.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from headrace.errors import EnvironmentFailure

QUESTION_KEYS = ("problem", "question", "prompt")
"""Keys under which a row may have its question."""

_indexes: dict[tuple[str, int, int], array[int]] = {}
_index_lock = Lock()


def read_row(path: str | Path, seed: int | None) -> dict[str, Any]:
    """Read the row that a seed selects (without a seed: a random one). Raises EnvironmentFailure:
    ``no-rows`` or ``bad-row``."""
    try:
        starts = _index(Path(path))
        if not starts:
            raise bad_row_error(f"{path} has no rows.", kind="no-rows")
        number = random.Random(seed).randrange(len(starts))
        with Path(path).open("rb") as file:
            file.seek(starts[number])
            line = file.readline()
    except OSError as error:
        raise bad_row_error(f"{path}: {error.strerror}.", kind="no-rows") from error
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise bad_row_error(f"Row {number + 1} of {path} is not a JSON object: {error}.") from error


def question_of(row: dict[str, Any]) -> str:
    """Return the question of a row. Raises EnvironmentFailure ``bad-row``."""
    for key in QUESTION_KEYS:
        if isinstance(row.get(key), str):
            return str(row[key])
    raise bad_row_error(f"The row has no text under {', '.join(QUESTION_KEYS)}.")


def bad_row_error(detail: str, *, kind: str = "bad-row") -> EnvironmentFailure:
    """Failure of a row that cannot make a task."""
    hint = "Fix the data set; it must be the same file on every worker."
    return EnvironmentFailure(detail, hint=hint, kind=kind, retryable=False)


def _index(path: Path) -> array[int]:
    """Offsets of the non-empty lines of a file, in bytes."""
    status = path.stat()
    key = (str(path), status.st_mtime_ns, status.st_size)
    with _index_lock:
        if key not in _indexes:
            starts, position = array("Q"), 0
            with path.open("rb") as file:
                for line in file:
                    if line.strip():
                        starts.append(position)
                    position += len(line)
            _indexes[key] = starts
        return _indexes[key]
