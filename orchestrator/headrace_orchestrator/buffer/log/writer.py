"""The interface between the log and its writer: one batch of frames, one result.

* The writer has one batch at a time; its result is delivered on the event loop.
* Every failure is part of a result; nothing is raised.

``LogWriterThread`` runs a ``LogFileWriter`` in a thread of the orchestrator, ``LogWriterProcess`` in a process of its
own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, Self

from headrace.errors import DataDirectoryInUse
from headrace_orchestrator.buffer.log.file_writer import LogFileMissing, LogFileWriter, PartialWrite, PendingFrame


class DiskFailure(NamedTuple):
    """An error of the disk, after which a later write to a new file may succeed."""

    errno: int
    reason: str
    file_missing: bool
    """True if the current file was deleted or renamed, with frames that were reported as written."""

    @classmethod
    def of(cls, error: OSError) -> Self:
        return cls(error.errno or 0, error.strerror or str(error), isinstance(error, LogFileMissing))


class WriteResult(NamedTuple):
    """The result of a batch, and the state of the writer after it."""

    written: int
    """Durable frames of the batch, counted from its first."""
    size_bytes: int
    took_s: float
    number: int
    """Number of the current file."""
    durable_bytes: int
    """Durable bytes of that file."""
    total_bytes: int
    """Bytes of all files up to it."""
    failure: DiskFailure | None = None
    fatal: str = ""
    """The reason why the writer has stopped for good; empty while it works."""


ResultCallback = Callable[[WriteResult], None]


class LogWriter(Protocol):
    """A ``LogFileWriter`` in a thread or in a process."""

    on_end: Callable[[str], None]
    """Called with the reason if the writer ends while it has no batch."""

    def reopen(self, number: int, total_bytes: int, headers: bytes) -> WriteResult:
        """Like ``LogFileWriter.reopen``. Blocking."""

    def write_blocking(self, batch: Sequence[PendingFrame]) -> WriteResult:
        """Like ``LogFileWriter.write``. Blocking; not allowed after ``watch``."""

    def watch(self) -> None:
        """Call ``on_end`` from now on; the first ``write`` does this too."""

    def write(self, batch: Sequence[PendingFrame], on_result: ResultCallback, *, new_file: bool = False) -> None:
        """Like ``LogFileWriter.write``, or ``write_new_file``. Not allowed before the result of the last batch."""

    async def close(self) -> None:
        """Stop; returns when nothing is written any more."""


def write_batch(writer: LogFileWriter, batch: Iterable[PendingFrame], frames: int, *, new_file: bool) -> WriteResult:
    """Write a batch of ``frames`` frames."""
    return result_of(writer, frames, lambda: writer.write_new_file(batch) if new_file else writer.write(batch))


def result_of(writer: LogFileWriter, frames: int, work: Callable[[], None]) -> WriteResult:
    """The result of a call of the writer that makes ``frames`` frames durable unless it fails."""
    started, before = time.perf_counter(), writer.total_bytes
    failure, fatal = None, ""
    try:
        work()
    except PartialWrite as error:
        frames, failure = error.written, DiskFailure.of(error.error)
    except OSError as error:
        frames, failure = 0, DiskFailure.of(error)
    except DataDirectoryInUse as error:
        frames, fatal = 0, error.detail.rstrip(".")
    except Exception as error:  # noqa: BLE001 - it is part of the result, and ends all writing
        frames, fatal = 0, f"its writer failed ({type(error).__name__}: {error})"
    took_s = time.perf_counter() - started
    state = writer.number, writer.durable_bytes, writer.total_bytes
    return WriteResult(frames, writer.total_bytes - before, took_s, *state, failure, fatal)
