"""Calls functions in processes of their own, from the event loop of a worker.

* A call that exhausts its time or its memory raises Exhausted; the worker and other calls go on meanwhile.
* The process that carries calls out is started at the first one. One that is lost is replaced, and what it carried out
  is asked again once; a call that loses its process twice is a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from typing import Any, Literal

from headrace.common.timeouts import timeout
from headrace.errors import EnvironmentFailure

Limit = Literal["time", "memory", "stack"]

GRACE_S, GRACE_TIMES = 30.0, 20.0
"""For an answer beyond the time of a call, and times that: to import the function's module, to wait for a child and for
a processor, on a busy machine."""

TRIES = 2

MOST_BYTES = 16 << 20
"""Of an answer."""


class Exhausted(Exception):
    """The call took more than it may. ``limit``: of what; a stack overflows by what is nested too deep."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(f"limit of {limit}")
        self.limit = limit


class _Lost(Exception):
    """The process of a call, or of all, was killed by somebody else."""


class BoundedCalls:
    """All bounded calls of a worker."""

    def __init__(self) -> None:
        self._server: _ServerProcess | None = None
        self._starting = asyncio.Lock()

    async def call(self, function: str, *arguments: Any, time_s: float, memory_bytes: int) -> Any:
        """Call ``module:name`` with arguments that JSON can hold; gives what it returns, which JSON can hold too.

        Raises Exhausted; EnvironmentFailure ``bounded-call-raised`` with what the function raised, and
        ``bounded-call-lost``.
        """
        request = {"function": function, "arguments": arguments, "time_s": time_s, "memory_bytes": memory_bytes}
        most_s = GRACE_TIMES * time_s + GRACE_S
        for _ in range(TRIES):
            server = await self._running()
            try:
                async with timeout(most_s):
                    answer = await server.ask(request)
            except _Lost as lost:
                why = str(lost)
                continue
            except TimeoutError:
                why = f"no answer within {most_s:g} s"
                await server.close()
                continue
            if "lost" not in answer:
                return _value(function, answer)
            why = answer["lost"]
        raise EnvironmentFailure(
            f"The process that {function} ran in was lost {TRIES} times: {why}.",
            hint="Does something kill processes here, such as for memory of the whole machine?",
            kind="bounded-call-lost",
            retryable=True,
        )

    async def close(self) -> None:
        """End all calls."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _running(self) -> _ServerProcess:
        async with self._starting:
            if self._server is None or not self._server.lives:
                if self._server is not None:
                    await self._server.close()
                self._server = await _ServerProcess.started()
            return self._server


def _value(function: str, answer: dict[str, Any]) -> Any:
    if "exhausted" in answer:
        raise Exhausted(answer["exhausted"])
    if "raised" in answer:
        raise EnvironmentFailure(f"{function} raised {answer['raised']}", kind="bounded-call-raised", retryable=False)
    return answer["value"]


class _ServerProcess:
    """The process, and those who wait for its answers."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def started(cls) -> _ServerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace_workers.bounded_calls.server"),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_BYTES)
        return cls(process, reader, writer)

    @property
    def lives(self) -> bool:
        return not self._reading.done()

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises _Lost."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if not self.lives:
                raise _Lost("it has ended")
            self._writer.write(json.dumps({"id": number, **request}).encode() + b"\n")
            found: dict[str, Any] = await answer
            return found
        finally:
            del self._waiting[number]

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                answer = json.loads(line)
                waiting = self._waiting.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (OSError, ValueError):
            pass  # it has ended, or writes what is no answer: either way those who wait are told
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_Lost("the process of all calls has ended"))

    async def close(self) -> None:
        """End it, and what it carries out."""
        self._writer.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
