"""Watches one program from outside: its output, its clock, its end.

* The clock is the supervisor's, starts with the program, and counts its work alone. When the time or the output is used
  up, the program is killed together with everything it started.
* Output is read while it is written, so a program never waits for its reader, and is held in bounded memory.
* The call ends with the main program; its background processes are killed, and only the closing of the pipes is
  awaited.
* Input that a program does not read is discarded when the program ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from headrace.common.timeouts import timeout
from headrace_sandbox.host.capture import Capture
from headrace_sandbox.host.processes import KILL_S, unkillable
from headrace_sandbox.host.work_time import Look, WorkClock
from headrace_sandbox.result import LimitName, Limits, Output

READ_BYTES = 256 << 10

CPU_POLL_S = 0.05
"""Interval of the checks of the processor time, where it is limited."""

DRAIN_S = 0.5
"""Deadline for the pipes to close once every process that could hold them was killed."""


class RunningProgram(NamedTuple):
    """A program that runs. ``end`` is a descriptor that becomes readable at its end; ``returncode`` then gives its exit
    status in the convention of ``subprocess``, or None if it is unknown. ``kill`` ends it and everything that it
    started. ``cpu_s`` gives the processor time of all of it so far, ``look`` its activity."""

    stdin: int
    stdout: int
    stderr: int
    end: int
    returncode: Callable[[], int | None]
    kill: Callable[[], None]
    cpu_s: Callable[[], float | None]
    look: Look


class ProgramOutcome(NamedTuple):
    """The end of a program. ``limit``: the one that the supervisor killed it for. ``returncode``: None if no process
    was left that knows it. ``work_s``: the part of ``wall_s`` that counts for its limit."""

    returncode: int | None
    limit: LimitName | None
    stdout: Output
    stderr: Output
    wall_s: float
    work_s: float


async def watch_program(program: RunningProgram, stdin: bytes, limits: Limits) -> ProgramOutcome:
    """Watch a program to its end; closes the descriptors. Raises SandboxFailure ``unkillable`` or
    ``program-starved``."""
    watcher = _Watcher(program, stdin, limits)
    try:
        return await watcher.run()
    finally:
        watcher.close()


class _Watcher:
    def __init__(self, program: RunningProgram, stdin: bytes, limits: Limits) -> None:
        self._program = program
        self._limits = limits
        self._input = memoryview(stdin)
        self._loop = asyncio.get_running_loop()
        self._captures = {program.stdout: Capture(limits.kept_bytes), program.stderr: Capture(limits.kept_bytes)}
        self._open = {program.stdout, program.stderr}
        self._closed = asyncio.Event()
        self._ended = asyncio.Event()
        self._limit: LimitName | None = None
        self._started_at = time.monotonic()
        self._clock = WorkClock(program.look, limits)

    async def run(self) -> ProgramOutcome:
        for descriptor in (self._program.stdin, self._program.stdout, self._program.stderr):
            os.set_blocking(descriptor, False)
        for descriptor in self._open:
            self._loop.add_reader(descriptor, self._read, descriptor)
        self._loop.add_writer(self._program.stdin, self._write)
        self._loop.add_reader(self._program.end, self._end)
        try:
            await self._until_end()
        except BaseException:
            self._program.kill()  # the caller no longer waits for it
            raise
        wall_s, work_s = time.monotonic() - self._started_at, self._clock.end()
        self._program.kill()  # its background processes
        with contextlib.suppress(TimeoutError):
            async with timeout(DRAIN_S):
                await self._closed.wait()
        stdout, stderr = (self._captures[fd].output() for fd in (self._program.stdout, self._program.stderr))
        return ProgramOutcome(self._program.returncode(), self._limit, stdout, stderr, wall_s, work_s)

    async def _until_end(self) -> None:
        cpu_watch = None if self._limits.cpu_s is None else asyncio.create_task(self._watch_cpu(self._limits.cpu_s))
        try:
            while (look_in_s := self._clock.next_look_s()) is not None:
                try:
                    async with timeout(look_in_s):
                        await self._ended.wait()
                    return
                except TimeoutError:
                    self._clock.add_look(look_in_s)
            self._stop("time")
        finally:
            if cpu_watch is not None:
                cpu_watch.cancel()
        try:
            async with timeout(KILL_S):
                await self._ended.wait()
        except TimeoutError:
            raise unkillable() from None

    async def _watch_cpu(self, most_s: float) -> None:
        while True:
            await asyncio.sleep(CPU_POLL_S)
            if (self._program.cpu_s() or 0.0) >= most_s:
                self._stop("cpu")

    def _stop(self, limit: LimitName) -> None:
        if self._limit is None and not self._ended.is_set():
            self._limit = limit
            self._program.kill()

    def _end(self) -> None:
        self._loop.remove_reader(self._program.end)
        self._ended.set()

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(descriptor)
            self._open.discard(descriptor)
            if not self._open:
                self._closed.set()
            return
        self._captures[descriptor].feed(data)
        if sum(capture.total_bytes for capture in self._captures.values()) > self._limits.output_bytes:
            self._stop("output")

    def _write(self) -> None:
        try:
            while self._input:
                self._input = self._input[os.write(self._program.stdin, self._input[:READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # the program reads no more
        self._close_input()

    def _close_input(self) -> None:
        self._loop.remove_writer(self._program.stdin)
        os.close(self._program.stdin)
        self._input = memoryview(b"")
        self._program = self._program._replace(stdin=-1)

    def close(self) -> None:
        """Close every descriptor."""
        if self._program.stdin >= 0:
            self._close_input()
        self._loop.remove_reader(self._program.end)
        for descriptor in (self._program.stdout, self._program.stderr):
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        os.close(self._program.end)
