"""Processes for environments that compute for a long time, so that they block no other episode.

* An environment with ``own_process = True`` on its class runs alone in a process.
* A call that exceeds its deadline is killed with its process, which is replaced.
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

from headrace.errors import EnvironmentFailure, EpisodeFailure, HeadraceError, by_code
from headrace_workers.episode.environment_process import LENGTH

START = "from headrace_workers.episode.environment_process import main; main()"

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

    def __init__(self, processes: EnvironmentProcesses, environment_id: str, kwargs: dict[str, Any]) -> None:
        self._processes = processes
        self._id = environment_id
        self._kwargs = kwargs
        self._process: _Process | None = None

    async def reset(self, seed: int | None = None) -> Any:
        """Make and reset the environment."""
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
                await process.ask("close", ())
        finally:
            await self._processes.give_back(process)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        assert self._process is not None
        return _read_answer(await self._process.ask(method, arguments))


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
        return cls(process, reader, writer)

    async def ask(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Send a request and return the answer. Raises EnvironmentFailure ``environment-process-lost``. Cancelling it
        ends the process."""
        data = pickle.dumps((method, arguments))
        try:
            self._writer.write(LENGTH.pack(len(data)) + data)
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
        except asyncio.CancelledError:
            self._kill()  # its call may never end
            raise
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
