"""Processes for environments that compute for a long time, so that they block no other episode.

* An environment with ``own_process = True`` on its class runs alone in a process.
* A call that exceeds its deadline is killed with its process, which is replaced. The deadline counts the process's own
  work: its start, its imports and the wait for a CPU do not count.
* A bound on the whole of a call ends in a retryable failure of ours.
* A process that ends during a call is a retryable failure of its environment.
* Processes are reused, one environment after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from headrace.common.timeouts import timeout
from headrace.errors import EnvironmentFailure, EpisodeFailure, HeadraceError, InfrastructureFailure, by_code
from headrace_workers.episode.environment_process import LENGTH
from headrace_workers.episode.environment_threads import CallAbandonedError
from headrace_workers.process_work import SAMPLE_S, WorkMeter
from headrace_workers.step_clock import StepClock

START = "from headrace_workers.episode.environment_process import main; main()"

WHOLE_S, WHOLE_FACTOR = 300.0, 20.0
"""Added to the deadline of a call, and multiplied with it, to get the bound on the whole. ``WHOLE_S`` also bounds the
start of a process."""

MAX_IDLE = 8
"""Limit on idle processes that are kept for the next environments."""


class EnvironmentProcesses:
    """The environment processes of a worker. ``imports``: the modules that they import first, as the worker did."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self._imports = list(imports)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def take(self) -> _Process:
        """Take a process for one environment."""
        if self._idle:
            return self._idle.pop()
        process = await _Process.start(self._imports)
        self._all.add(process)
        return process

    async def give_back(self, process: _Process) -> None:
        """Return a process whose environment was closed or lost."""
        if process.is_usable and len(self._idle) < MAX_IDLE:
            self._idle.append(process)
        else:
            self._all.discard(process)
            await process.end()

    async def close(self) -> None:
        """End all processes."""
        self._idle.clear()
        while self._all:  # some processes are returned meanwhile
            await self._all.pop().end()


class OwnProcessEnvironment:
    """A proxy of an environment in a separate process."""

    def __init__(
        self,
        processes: EnvironmentProcesses,
        environment_id: str,
        kwargs: dict[str, Any],
        *,
        steps: StepClock,
        timeout_s: float,
    ) -> None:
        """``steps``: the clock of the episode's steps. ``timeout_s``: the deadline of a call."""
        self._processes = processes
        self._steps = steps
        self._timeout_s = timeout_s
        self._id = environment_id
        self._kwargs = kwargs
        self._process: _Process | None = None

    async def reset(self, seed: int | None = None) -> Any:
        """Make and reset the environment."""
        with self._steps.outside_call():
            self._process = await self._processes.take()
        await self._ask("make", self._id, self._kwargs)
        return await self._ask("reset", seed)

    async def step(self, action: str) -> Any:
        """Step the environment."""
        return await self._ask("step", str(action))

    async def grade(self) -> Any:
        """Grade the environment; None if it gives no grade."""
        return await self._ask("grade")

    async def close(self) -> None:
        """Close the environment, and return its process."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.is_usable:
                with self._steps.outside_call():
                    await process.ask("close", (), self._timeout_s)
        finally:
            await self._processes.give_back(process)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._process is not None
        with self._steps.outside_call():
            answer, work_s = await self._process.ask(method, arguments, self._timeout_s)
            self._steps.add_work(work_s)
        return _read_answer(answer)


def _read_answer(answer: tuple[Any, ...]) -> Any:
    match answer:
        case ("ok", value):
            return value
        case ("failure", code, detail, hint, kind, retryable):
            failure = by_code()[code]
            assert issubclass(failure, EpisodeFailure)
            raise failure(detail, hint=hint, kind=kind, retryable=retryable)
        case ("refused", code, detail, hint):
            raise by_code().get(code, HeadraceError)(detail, hint=hint)
    raise RemoteException(answer[1])


class RemoteException(Exception):
    """An exception that the environment raised in its process, as text."""


def _starved(subject: str, whole_s: float) -> InfrastructureFailure:
    return InfrastructureFailure(
        f"{subject} in the environment's own process did not end within {whole_s:g} s, the wait for a CPU included.",
        hint="The machine is overloaded: give the worker fewer slots, or more CPUs.",
        kind="environment-process-starved",
        retryable=True,
    )


class _Process:
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self.is_usable = True

    @classmethod
    async def start(cls, imports: Sequence[str]) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", START, *imports),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        started = cls(process, reader, writer)
        try:
            async with timeout(WHOLE_S):
                await started._receive("its start")
        except BaseException as error:
            await started.end()
            if isinstance(error, TimeoutError):
                raise _starved("Its start", WHOLE_S) from None
            raise
        return started

    async def ask(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> tuple[tuple[Any, ...], float]:
        """Send a request; return the answer, and the process's work on it in seconds. Cancelling it ends the process.

        Raises CallAbandonedError after ``timeout_s`` of work; EnvironmentFailure ``environment-process-lost``;
        InfrastructureFailure ``environment-process-starved``.
        """
        data = pickle.dumps((method, arguments))
        clock = asyncio.get_running_loop().time
        work, give_up_at = WorkMeter(self._process.pid, clock()), clock() + WHOLE_FACTOR * timeout_s + WHOLE_S
        self._writer.write(LENGTH.pack(len(data)) + data)
        answering = asyncio.ensure_future(self._receive(method))
        try:
            while True:
                await asyncio.wait({answering}, timeout=min(SAMPLE_S, timeout_s))
                if not answering.done():
                    # The event loop may be late: an answer that has arrived counts.
                    await asyncio.sleep(0)
                if answering.done():
                    answer = answering.result()
                    return answer, self._work_s(work)
                if self._work_s(work) >= timeout_s:
                    raise CallAbandonedError
                if clock() >= give_up_at:
                    raise _starved(f"The call of {method}", WHOLE_FACTOR * timeout_s + WHOLE_S)
        except BaseException:
            if not answering.done():
                self._kill()  # its call may never end
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
            raise

    def _work_s(self, work: WorkMeter) -> float:
        with contextlib.suppress(OSError):  # it has ended
            work.sample(asyncio.get_running_loop().time())
        return work.work_s

    async def _receive(self, method: str) -> tuple[Any, ...]:
        try:
            await self._writer.drain()
            size = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))[0]
            answer: tuple[Any, ...] = pickle.loads(await self._reader.readexactly(size))
        except (OSError, asyncio.IncompleteReadError) as error:
            self._kill()
            raise EnvironmentFailure(
                f"The process of the environment ended during {method}: {await self._exit_status()}.",
                hint="It may have crashed, or was killed for its memory.",
                kind="environment-process-lost",
                retryable=True,
            ) from error
        return answer

    async def end(self) -> None:
        """End the process."""
        self._kill()
        self._writer.close()
        await self._process.wait()

    def _kill(self) -> None:
        self.is_usable = False
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Popen's own kill may reap the exit code that `wait` needs.
                os.kill(self._process.pid, signal.SIGKILL)

    async def _exit_status(self) -> str:
        code = await self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"
