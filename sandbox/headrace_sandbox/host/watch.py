"""Watches one program from outside: its output, its clock, its end.

* The clock is the supervisor's, and starts when the program does. At its end, and at the bound of output, the program
  is killed with all that it started.
* Output is read while it is written, so a program never waits for its reader, and bounded memory holds it.
* The call ends when the main program does; what it left running in the background is killed and waited for no longer
  than the pipes take to close.
* Input that a program does not read is dropped when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.capture import Capture
from headrace_sandbox.host.descriptors import is_readable, readable
from headrace_sandbox.result import LimitName, Limits, Output

T = TypeVar("T")

READ_BYTES = 256 << 10

CPU_LOOK_S = 0.05
"""Between looks at the processor time, where it is limited."""

DRAIN_S = 0.5
"""For the pipes to close once everything that could hold them was killed."""

KILL_S = 5.0
"""For a killed program to be gone; one that is not waits in the kernel."""


class Started(NamedTuple):
    """A program that runs. ``end`` is a descriptor that becomes readable at its end. ``returncode`` then says how it
    ended, as ``subprocess`` has it; None if nobody is left to tell. ``kill`` ends it and everything that it started.
    ``cpu_s`` is the processor time of all of it so far."""

    stdin: int
    stdout: int
    stderr: int
    end: int
    returncode: Callable[[], int | None]
    kill: Callable[[], None]
    cpu_s: Callable[[], float | None]


class Verdict(NamedTuple):
    """How it ended. ``limit``: which limit the supervisor killed it for. ``returncode``: None where nobody was left to
    tell."""

    returncode: int | None
    limit: LimitName | None
    stdout: Output
    stderr: Output
    wall_s: float


def unkillable() -> SandboxFailure:
    """The failure of a program that SIGKILL does not end."""
    return SandboxFailure(
        f"The program was killed and did not end within {KILL_S:g} s.",
        hint="It waits in the kernel, most likely for a disk or a network file system.",
        kind="unkillable",
        retryable=True,
    )


async def ended(pidfd: int, within_s: float) -> None:
    """Wait for the end of a process; that of a process 1 is the end of all in its namespace. Raises SandboxFailure
    ``unkillable``."""
    if is_readable(pidfd):
        return
    try:
        async with timeout(within_s):
            await readable(pidfd)
    except TimeoutError:
        raise unkillable() from None


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Do it to its end, even if whoever waits for it is cancelled: what ends a sandbox must not stop half way."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def supervise(started: Started, stdin: bytes, limits: Limits) -> Verdict:
    """Watch a program to its end; closes the descriptors. Raises SandboxFailure ``unkillable``."""
    watching = _Watching(started, stdin, limits)
    try:
        return await watching.run()
    finally:
        watching.close()


class _Watching:
    def __init__(self, started: Started, stdin: bytes, limits: Limits) -> None:
        self._started = started
        self._limits = limits
        self._input = memoryview(stdin)
        self._loop = asyncio.get_running_loop()
        self._captures = {started.stdout: Capture(limits.kept_bytes), started.stderr: Capture(limits.kept_bytes)}
        self._open = {started.stdout, started.stderr}
        self._closed = asyncio.Event()
        self._ended = asyncio.Event()
        self._limit: LimitName | None = None
        self._begun_at = time.monotonic()

    async def run(self) -> Verdict:
        for descriptor in (self._started.stdin, self._started.stdout, self._started.stderr):
            os.set_blocking(descriptor, False)
        for descriptor in self._open:
            self._loop.add_reader(descriptor, self._read, descriptor)
        self._loop.add_writer(self._started.stdin, self._write)
        self._loop.add_reader(self._started.end, self._end)
        try:
            await self._until_end()
        except BaseException:
            self._started.kill()  # nobody waits for it any more
            raise
        wall_s = time.monotonic() - self._begun_at
        self._started.kill()  # what it left in the background
        with contextlib.suppress(TimeoutError):
            async with timeout(DRAIN_S):
                await self._closed.wait()
        stdout, stderr = (self._captures[fd].output() for fd in (self._started.stdout, self._started.stderr))
        return Verdict(self._started.returncode(), self._limit, stdout, stderr, wall_s)

    async def _until_end(self) -> None:
        looks = None if self._limits.cpu_s is None else asyncio.create_task(self._watch_cpu(self._limits.cpu_s))
        try:
            async with timeout(self._limits.wall_s):
                await self._ended.wait()
            return
        except TimeoutError:
            self._stop("time")
        finally:
            if looks is not None:
                looks.cancel()
        try:
            async with timeout(KILL_S):
                await self._ended.wait()
        except TimeoutError:
            raise unkillable() from None

    async def _watch_cpu(self, most_s: float) -> None:
        while True:
            await asyncio.sleep(CPU_LOOK_S)
            if (self._started.cpu_s() or 0.0) >= most_s:
                self._stop("cpu")

    def _stop(self, limit: LimitName) -> None:
        if self._limit is None and not self._ended.is_set():
            self._limit = limit
            self._started.kill()

    def _end(self) -> None:
        self._loop.remove_reader(self._started.end)
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
                self._input = self._input[os.write(self._started.stdin, self._input[:READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # it reads no more
        self._close_input()

    def _close_input(self) -> None:
        self._loop.remove_writer(self._started.stdin)
        os.close(self._started.stdin)
        self._input = memoryview(b"")
        self._started = self._started._replace(stdin=-1)

    def close(self) -> None:
        """Close every descriptor."""
        if self._started.stdin >= 0:
            self._close_input()
        self._loop.remove_reader(self._started.end)
        for descriptor in (self._started.stdout, self._started.stderr):
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        os.close(self._started.end)
