"""The log writer in a thread of the orchestrator.

It needs nothing beyond a thread, but has to wait for the interpreter lock, which the event loop holds, between its
steps. ``LogWriterProcess`` avoids that.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace_orchestrator.buffer.log.file_writer import LogFileWriter, PendingFrame
from headrace_orchestrator.buffer.log.writer import ResultCallback, WriteResult, result_of, write_batch


class LogWriterThread:
    """A log writer in a thread of this process."""

    def __init__(self, directory: Path, require_owned: Callable[[], None] = lambda: None) -> None:
        self.on_end: Callable[[str], None] = lambda reason: None  # a thread does not end unexpectedly
        self._writer = LogFileWriter(directory, require_owned)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log")

    def reopen(self, number: int, total_bytes: int, headers: bytes) -> WriteResult:
        return result_of(self._writer, 0, lambda: self._writer.reopen(number, total_bytes, headers))

    def write_blocking(self, batch: Sequence[PendingFrame]) -> WriteResult:
        return write_batch(self._writer, batch, len(batch), new_file=False)

    def watch(self) -> None:
        pass

    def write(self, batch: Sequence[PendingFrame], on_result: ResultCallback, *, new_file: bool = False) -> None:
        loop = asyncio.get_running_loop()
        work = functools.partial(write_batch, self._writer, batch, len(batch), new_file=new_file)
        self._thread.submit(lambda: loop.call_soon_threadsafe(on_result, work()))

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        self._writer.close()
