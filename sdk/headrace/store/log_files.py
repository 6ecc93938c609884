"""The files of a log directory: ``NNNNNNNN.log``, numbered in the order in which they were written.

* The directory listing is the only list of the log's files.
* The head of the next file states how much of a file is valid; the remains of a failed write after that are ignored.
* A folder of other files is not taken for a log.
* A file with another name, or of another log, is refused, and the error names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.errors import SetupError
from headrace.store import log_format
from headrace.store.log_format import Damage, FileHead, Frame
from headrace.store.regular_files import open_to_read

_BESIDE = ("epoch", "owner", "backup.json")
"""Files beside the folder ``log`` of a data directory or a backup."""


class LogFile(NamedTuple):
    """A file of a log. ``size_bytes`` is its valid size; ``head`` is None if it is damaged."""

    number: int
    path: Path
    size_bytes: int
    head: FileHead | None

    def scan(self, start: int = 0) -> Iterator[Frame | Damage]:
        """All valid frames and damage, in order, from the frame at offset ``start`` in bytes."""
        with open_to_read(self.path) as stream:
            yield from log_format.scan(stream, start=start, end=self.size_bytes)

    @property
    def holds_state(self) -> bool:
        """True if its head holds the control state, so that replay can begin with this file."""
        return self.head is not None and self.head.state is not None

    def without_state(self) -> LogFile:
        """The same file with a head that does not hold the control state in memory."""
        if self.head is None or self.head.state is None:
            return self
        return self._replace(head=msgspec.structs.replace(self.head, state=None))


def path_of(directory: Path, number: int) -> Path:
    """The path of a file of a log."""
    return directory / f"{number:08d}.log"


def numbers_in(directory: Path) -> list[int]:
    """The numbers of the files in a log directory, ascending. Raises SetupError."""
    return sorted(_number(path) for path in directory.glob("*.log"))


def newest_first(directory: Path, numbers: Sequence[int]) -> Iterator[LogFile]:
    """The files of a log from the newest to the oldest, read lazily. Raises SetupError."""
    following: FileHead | None = None
    log = ""
    for number in reversed(numbers):
        path = path_of(directory, number)
        size_bytes = path.stat().st_size
        if following is not None and following.number == number + 1:
            size_bytes = min(size_bytes, following.before_bytes)
        head = head_of(path)
        if head is not None:
            log = log or head.log
            if (head.log, head.number) != (log, number):
                raise SetupError(
                    f"The file {path} is number {head.number} of log {head.log}, not number {number} of log {log}.",
                    hint="Move it away: each log has its own directory, and its files keep their names.",
                )
        yield LogFile(number, path, size_bytes, head)
        following = head


class LogGap(NamedTuple):
    """A gap after a file.

    ``size_bytes``: the bytes missing at its end; 0 if whole files are missing, whose size is unknown. ``problem``
    describes the gap.
    """

    offset: int
    size_bytes: int
    problem: str


def gap_after(file: LogFile, following: LogFile) -> LogGap | None:
    """The gap between a file and the following existing file, or None."""
    if problem := missing_files(file.number, following.number):
        return LogGap(file.size_bytes, 0, problem)
    if following.head is not None and (size_bytes := following.head.before_bytes - file.size_bytes) > 0:
        return LogGap(file.size_bytes, size_bytes, f"the file ends {size_bytes} bytes before its end")
    return None


def missing_files(number: int, following: int) -> str:
    """A description of the files missing between two existing ones; empty if none."""
    first, last = f"{number + 1:08d}.log", f"{following - 1:08d}.log"
    if following <= number + 1:
        return ""
    return f"{first} after it is missing" if first == last else f"{first} to {last} after it are missing"


def head_of(path: Path) -> FileHead | None:
    """Read the head of a file; None if it is damaged."""
    with open_to_read(path) as stream:
        try:
            return log_format.read_head(stream)
        except msgspec.MsgspecError:
            return None  # the checksum matches but the content is invalid: treated as damage


def _number(path: Path) -> int:
    if not (path.stem.isascii() and path.stem.isdigit() and len(path.stem) == 8):
        raise SetupError(
            f"The file {path} is not a file of this log.", hint="Move it away: log files are named by eight digits."
        )
    return int(path.stem)


def require_own_log(path: Path) -> None:
    """Raise SetupError if this is neither a data directory nor a backup: it has no folder ``log``, or files there of
    which none begins like a log, and none of the files that an orchestrator or a backup leaves beside it."""
    if not (path / "log").is_dir():
        raise SetupError(
            f"{path} is not a data directory: it has no folder named log.",
            hint="Give the directory that the orchestrator was started with (--data).",
        )
    if any((path / name).exists() for name in _BESIDE):
        return
    begins = [_beginning(file) for file in (path / "log").iterdir()]
    if any(begins) and not any(begin and log_format.MAGIC.startswith(begin) for begin in begins):
        raise SetupError(
            f"{path} is not a data directory: no file in its folder log begins like a log.",
            hint="Give the directory that the orchestrator was started with (--data).",
        )


def _beginning(file: Path) -> bytes:
    if not file.is_file() or file.is_symlink():
        return b""
    with file.open("rb") as stream:
        return stream.read(len(log_format.MAGIC))
