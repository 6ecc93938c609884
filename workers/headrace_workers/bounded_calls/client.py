"""Client that calls functions in separate processes, from a worker's event loop.

* A call that exceeds its time or memory limit raises LimitExceeded; the worker and other calls continue.
* The time limit counts the call's own work, so the verdict does not depend on how many other calls run.
* A bound on the whole, queue and starvation included, ends in a retryable failure of ours.
* The server process starts at the first call. A lost server is replaced, and its calls are retried once; a call that
  loses its process twice fails.
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
from collections.abc import Callable
from typing import Any, Literal

from headrace.common.timeouts import timeout
from headrace.errors import EnvironmentFailure, InfrastructureFailure

Limit = Literal["time", "memory", "stack"]

WHOLE_S, WHOLE_FACTOR = 300.0, 20.0
"""Added to the time limit of a call, and multiplied with it, to get the bound on the whole: the queue, the import of
the function's module, the start of a child and the wait for a CPU take time on a busy machine."""

MAX_TRIES = 2

MAX_ANSWER_BYTES = 16 << 20
"""Largest answer."""


class LimitExceeded(Exception):
    """A call exceeded a limit. ``limit`` names it; "stack" means that the input is nested too deeply."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(f"limit of {limit}")
        self.limit = limit


class _ProcessLost(Exception):
    """The process of one call, or of all calls, was killed from outside."""


class BoundedCalls:
    """Bounded calls of a worker. ``whole_s`` and ``whole_factor``: see ``WHOLE_S``."""

    def __init__(self, whole_s: float = WHOLE_S, whole_factor: float = WHOLE_FACTOR) -> None:
        self._whole_s = whole_s
        self._whole_factor = whole_factor
        self._server: _CallServerProcess | None = None
        self._start_lock = asyncio.Lock()

    async def call(
        self,
        function: str,
        *arguments: Any,
        time_s: float,
        memory_bytes: int,
        on_work: Callable[[float], None] = lambda work_s: None,
    ) -> Any:
        """Call ``module:name`` and return its result. Arguments and result must be JSON-serializable. ``on_work`` gets
        the call's own working time, in seconds.

        Raises LimitExceeded; EnvironmentFailure: ``bounded-call-raised`` (with the function's error) or
        ``bounded-call-lost``; InfrastructureFailure ``bounded-call-starved``.
        """
        request = {"function": function, "arguments": arguments, "time_s": time_s, "memory_bytes": memory_bytes}
        whole_s = self._whole_factor * time_s + self._whole_s
        for _ in range(MAX_TRIES):
            server = await self._running_server()
            try:
                async with timeout(whole_s):
                    answer = await server.ask(request)
            except _ProcessLost as lost:
                why = str(lost)
                continue
            except TimeoutError:
                if server.is_silent_for(whole_s):
                    await server.close()  # it hangs, so the next call starts another one
                raise _starved(function, whole_s) from None
            if "lost" not in answer:
                on_work(answer.get("work_s", 0.0))
                return _returned_value(function, answer)
            why = answer["lost"]
        raise EnvironmentFailure(
            f"The process of {function} was lost {MAX_TRIES} times: {why}.",
            hint="Check whether something kills processes on this machine, such as the out-of-memory killer.",
            kind="bounded-call-lost",
            retryable=True,
        )

    async def close(self) -> None:
        """End all calls."""
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _running_server(self) -> _CallServerProcess:
        async with self._start_lock:
            if self._server is None or not self._server.is_alive:
                if self._server is not None:
                    await self._server.close()
                self._server = await _CallServerProcess.start()
            return self._server


def _starved(function: str, whole_s: float) -> InfrastructureFailure:
    return InfrastructureFailure(
        f"{function} did not return within {whole_s:g} s, the wait for a process and a CPU included.",
        hint="The machine is overloaded: give the worker fewer slots, or more CPUs.",
        kind="bounded-call-starved",
        retryable=True,
    )


def _returned_value(function: str, answer: dict[str, Any]) -> Any:
    if "exhausted" in answer:
        raise LimitExceeded(answer["exhausted"])
    if "raised" in answer:
        raise EnvironmentFailure(f"{function} raised {answer['raised']}", kind="bounded-call-raised", retryable=False)
    return answer["value"]


class _CallServerProcess:
    """The call server's process and its pending calls."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._read_task = asyncio.create_task(self._read())
        self._last_answer_at = asyncio.get_running_loop().time()

    @classmethod
    async def start(cls) -> _CallServerProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace_workers.bounded_calls.server"),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_ANSWER_BYTES)
        return cls(process, reader, writer)

    @property
    def is_alive(self) -> bool:
        return not self._read_task.done()

    def is_silent_for(self, seconds: float) -> bool:
        """Return True if it has answered no call in the last ``seconds``."""
        return asyncio.get_running_loop().time() - self._last_answer_at >= seconds

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return its answer. Raises _ProcessLost."""
        number = next(self._ids)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            if not self.is_alive:
                raise _ProcessLost("it has ended")
            self._writer.write(json.dumps({"id": number, **request}).encode() + b"\n")
            result: dict[str, Any] = await answer
            return result
        finally:
            del self._pending[number]
            if self.is_alive and (not answer.done() or answer.cancelled()):
                self._writer.write(json.dumps({"cancel": number}).encode() + b"\n")

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                answer = json.loads(line)
                self._last_answer_at = asyncio.get_running_loop().time()
                waiting = self._pending.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (OSError, ValueError):
            pass  # it has ended or sends invalid answers: the pending calls fail below
        finally:
            for waiting in self._pending.values():
                if not waiting.done():
                    waiting.set_exception(_ProcessLost("the call server has ended"))

    async def close(self) -> None:
        """Kill the process and all its calls."""
        self._writer.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._read_task.cancel()
        await asyncio.gather(self._read_task, return_exceptions=True)
