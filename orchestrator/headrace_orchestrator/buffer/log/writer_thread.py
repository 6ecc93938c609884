"""Where the log's writer runs, and what becomes of what it is given.

* One batch is with the writer at a time; what became of it is told on the event loop.
* Whatever goes wrong is told; nothing is raised.

``LogWriterThread`` runs it in a thread, which needs nothing, but waits for the interpreter between its steps: the event
loop has it. ``writerprocess.WriterProcess`` runs it beside that.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from headrace.errors import DataDirectoryInUse
from headrace_orchestrator.buffer.log.file_writer import LogFileMissing, LogFileWriter, PartialWrite, PendingFrame


class DiskFailure(NamedTuple):
    """The disk refused."""

    errno: int
    reason: str
    taken_away: bool
    """Whether the file was, with what was reported as written to it."""

    @classmethod
    def of(cls, error: OSError) -> Self:
        return cls(error.errno or 0, error.strerror or str(error), isinstance(error, LogFileMissing))


class WriteResult(NamedTuple):
    """What became of a batch, and where the writer is now."""

    written: int
    """Frames of the batch, from its first on, that are durable."""
    size_bytes: int
    took_s: float
    number: int
    """Of the file that is written."""
    durable_bytes: int
    """In that file."""
    total_bytes: int
    """Of all files up to it."""
    refusal: DiskFailure | None = None
    end: str = ""
    """Why nothing is written any more; empty while something is."""


ResultCallback = Callable[[WriteResult], None]


class LogWriter(Protocol):
    """A writer that runs somewhere."""

    on_end: Callable[[str], None]
    """Called with the reason when it ended while nothing was with it."""

    def go_on(self, number: int, total_bytes: int, headers: bytes) -> WriteResult:
        """As ``LogFileWriter.go_on``. Blocking."""

    def write_now(self, batch: Sequence[PendingFrame]) -> WriteResult:
        """As ``LogFileWriter.write``. Blocking; not once the event loop watches it."""

    def watch(self) -> None:
        """Call ``on_end`` from now on; the first ``write`` sees to it too."""

    def write(self, batch: Sequence[PendingFrame], told: ResultCallback, *, over: bool = False) -> None:
        """As ``LogFileWriter.write``, or ``LogFileWriter.start_over``. Not before the last batch was told."""

    async def close(self) -> None:
        """Returns when nothing is written any more."""


class LogWriterThread:
    """A writer in a thread of this process."""

    def __init__(self, directory: Path, require_owned: Callable[[], None] = lambda: None) -> None:
        self.on_end: Callable[[str], None] = lambda reason: None  # a thread does not end by itself
        self._writer = LogFileWriter(directory, require_owned)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log")

    def go_on(self, number: int, total_bytes: int, headers: bytes) -> WriteResult:
        return carry_out(self._writer, 0, lambda: self._writer.go_on(number, total_bytes, headers))

    def write_now(self, batch: Sequence[PendingFrame]) -> WriteResult:
        return write(self._writer, batch, len(batch), over=False)

    def watch(self) -> None:
        pass

    def write(self, batch: Sequence[PendingFrame], told: ResultCallback, *, over: bool = False) -> None:
        loop = asyncio.get_running_loop()
        work = functools.partial(write, self._writer, batch, len(batch), over=over)
        self._thread.submit(lambda: loop.call_soon_threadsafe(told, work()))

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        self._writer.close()


def write(writer: LogFileWriter, batch: Iterable[PendingFrame], frames: int, *, over: bool) -> WriteResult:
    """Have a batch written, of so many frames."""
    return carry_out(writer, frames, lambda: writer.start_over(batch) if over else writer.write(batch))


def carry_out(writer: LogFileWriter, frames: int, work: Callable[[], None]) -> WriteResult:
    """Do something with a writer; ``frames`` are durable if nothing goes wrong."""
    begun, before = time.perf_counter(), writer.total_bytes
    refusal, end = None, ""
    try:
        work()
    except PartialWrite as error:
        frames, refusal = error.written, DiskFailure.of(error.error)
    except OSError as error:
        frames, refusal = 0, DiskFailure.of(error)
    except DataDirectoryInUse as error:
        frames, end = 0, error.detail.rstrip(".")
    except Exception as error:  # noqa: BLE001 - it is told, and ends all writing
        frames, end = 0, f"its writer failed ({type(error).__name__}: {error})"
    took_s = time.perf_counter() - begun
    position = writer.number, writer.durable_bytes, writer.total_bytes
    return WriteResult(frames, writer.total_bytes - before, took_s, *position, refusal, end)
