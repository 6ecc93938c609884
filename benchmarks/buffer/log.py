"""Appends to the log with group commit, against a raw append and sync of the same bytes. As in the service, the log
uses uvloop and a separate writer process.

On a virtual machine writes may slow down after a gigabyte; seven rounds write less.
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
"""Frames of one measurement, frames per sync, and bytes per frame."""

FILE_BYTES = 256 << 20
"""Size of a log file, as in the service."""


def measure(folder: Path, rounds: int) -> list[tuple[float, float]]:
    """Measure alternately; return the frames per second of the log and of the raw file, by round."""
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
        return [(await _log_rate(log, payload), _raw_rate(descriptor, payload)) for _ in range(rounds)]
    finally:
        os.close(descriptor)
        await log.close()
        directory.close()


async def _log_rate(log: Log, payload: bytes) -> float:
    started_at = time.perf_counter()
    for _ in range(FRAMES // TOGETHER):
        for _ in range(TOGETHER):
            log.append(FrameType.TRAJECTORY, payload)
        await log.synced()
        if log.full:
            log.rotate(None)
    return FRAMES / (time.perf_counter() - started_at)


def _raw_rate(descriptor: int, payload: bytes) -> float:
    block = payload * TOGETHER
    started_at = time.perf_counter()
    for _ in range(FRAMES // TOGETHER):
        assert os.write(descriptor, block) == len(block)
        os.fdatasync(descriptor)
    return FRAMES / (time.perf_counter() - started_at)
