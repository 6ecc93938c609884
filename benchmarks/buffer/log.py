"""The log's append with group commit, against one raw append and sync of the same bytes; on the service's event loop,
with the writer in a process of its own as in the service.

Writes may slow down after a gigabyte, where a rented disk or a rented machine's fresh memory is dear: seven rounds stay
below that.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import uvloop

from headrace.store.log_format import FrameType
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.buffer.log.writer_process import LogWriterProcess

FRAMES, TOGETHER, FRAME_BYTES = 1024, 64, 37_120
"""What one measurement appends; so many frames wait for the same sync."""

FILE_BYTES = 256 << 20
"""As the service cuts its files."""


def measure(folder: Path, rounds: int) -> list[tuple[float, float]]:
    """Frames per second of the log and of the raw file, in turns."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(folder, rounds))


async def _measure(folder: Path, rounds: int) -> list[tuple[float, float]]:
    payload = os.urandom(FRAME_BYTES)
    directory = DataDirectory.claim(folder / "data")
    log = Log(directory.path / "log", file_bytes=FILE_BYTES, writer=LogWriterProcess(directory))
    list(log.scan())
    log.start(lambda: None)
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        return [(await _ours(log, payload), _raw(descriptor, payload)) for _ in range(rounds)]
    finally:
        os.close(descriptor)
        await log.close()
        directory.close()


async def _ours(log: Log, payload: bytes) -> float:
    begun = time.perf_counter()
    for _ in range(FRAMES // TOGETHER):
        for _ in range(TOGETHER):
            log.append(FrameType.TRAJECTORY, payload)
        await log.synced()
        if log.full:
            log.rotate(None)
    return FRAMES / (time.perf_counter() - begun)


def _raw(descriptor: int, payload: bytes) -> float:
    block = payload * TOGETHER
    begun = time.perf_counter()
    for _ in range(FRAMES // TOGETHER):
        assert os.write(descriptor, block) == len(block)
        os.fdatasync(descriptor)
    return FRAMES / (time.perf_counter() - begun)
