"""The files of a log directory: ``NNNNNNNN.log``, numbered in the order in which they were written.

* The directory listing is the manifest: there is no other list of what belongs to the log.
* A file counts as far as the head of the next one says; what a failed write left behind that is passed over.
* A file that is named otherwise, or that belongs to another log, is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.errors import SetupError
from headrace.store import log_format
from headrace.store.log_format import Damage, FileHead, Frame


class LogFile(NamedTuple):
    """A file of a log. ``size_bytes`` is how much of it counts; ``head`` is None where it is damaged."""

    number: int
    path: Path
    size_bytes: int
    head: FileHead | None

    def scan(self, start: int = 0) -> Iterator[Frame | Damage]:
        """Everything in it that counts, in order, from the frame on that starts at that offset in bytes."""
        with open(self.path, "rb") as stream:
            yield from log_format.scan(stream, start=start, end=self.size_bytes)

    @property
    def holds_state(self) -> bool:
        """Whether a start can begin here."""
        return self.head is not None and self.head.state is not None

    def without_state(self) -> LogFile:
        """The same with a head that is small."""
        if self.head is None or self.head.state is None:
            return self
        return self._replace(head=msgspec.structs.replace(self.head, state=None))


def path_of(directory: Path, number: int) -> Path:
    """Where a file of a log is."""
    return directory / f"{number:08d}.log"


def numbers_in(directory: Path) -> list[int]:
    """The numbers of the files in a log's directory, ascending. Raises SetupError."""
    return sorted(_number(path) for path in directory.glob("*.log"))


def newest_first(directory: Path, numbers: Sequence[int]) -> Iterator[LogFile]:
    """The files of a log from the newest back, each read when it is asked for. Raises SetupError."""
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
                    hint="Move it away: each log has a directory of its own, and its files keep their names.",
                )
        yield LogFile(number, path, size_bytes, head)
        following = head


class LogGap(NamedTuple):
    """Where a file is not followed by what was written next: ``size_bytes`` are gone at its end, or it is followed by
    a file that is not the next one, and then nobody knows how many. ``problem`` says which."""

    offset: int
    size_bytes: int
    problem: str


def gap_after(file: LogFile, following: LogFile) -> LogGap | None:
    """What is missing between a file and the next one that is there."""
    if problem := missing_files(file.number, following.number):
        return LogGap(file.size_bytes, 0, problem)
    if following.head is not None and (size_bytes := following.head.before_bytes - file.size_bytes) > 0:
        return LogGap(file.size_bytes, size_bytes, f"the file ends {size_bytes} bytes before its end")
    return None


def missing_files(number: int, following: int) -> str:
    """Which files are missing between two that are there; empty if none."""
    first, last = f"{number + 1:08d}.log", f"{following - 1:08d}.log"
    if following <= number + 1:
        return ""
    return f"{first} behind it is missing" if first == last else f"{first} to {last} behind it are missing"


def head_of(path: Path) -> FileHead | None:
    """What a file says of itself; None where that is damaged."""
    with open(path, "rb") as stream:
        try:
            return log_format.read_head(stream)
        except msgspec.MsgspecError:
            return None  # its checksum is right and its content is not: as good as damaged


def _number(path: Path) -> int:
    if not (path.stem.isascii() and path.stem.isdigit() and len(path.stem) == 8):
        raise SetupError(
            f"The file {path} is no file of this log.", hint="Move it away: a log's files are named by eight digits."
        )
    return int(path.stem)
