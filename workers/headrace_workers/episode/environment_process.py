"""The process that runs environments, one at a time.

* It answers requests from the socket on its standard input: make, reset, step, grade, close.
* An exception of an environment is sent as text; the process continues.
* It ends with the worker, even during a call.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
from typing import Any

from headrace.environment import grade_of, make
from headrace.errors import EnvironmentFailure, EpisodeFailure, HeadraceError
from headrace_workers.episode.environment_adapter import name_images
from headrace_workers.episode.error_text import describe_error
from headrace_workers.imports import import_all

NICENESS = 5
"""Lower priority than the worker, whose event loop all other episodes need."""

PR_SET_PDEATHSIG = 1

LENGTH = struct.Struct("<I")
"""The length before each message. Messages are pickled: both processes belong to this program."""


class EnvironmentHost:
    """Runs the environment that was made last."""

    def __init__(self) -> None:
        self._environment: Any = None
        self._runner = asyncio.Runner()

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Make, reset, step, grade or close the environment."""
        if method == "make":
            return self._make(*arguments)
        if method == "close":
            close = getattr(self._environment, "close", None)
            return self._result(close) if close is not None else None
        if method == "grade":
            grade = grade_of(self._environment)
            return self._result(grade) if grade is not None else None
        return name_images(self._result(getattr(self._environment, method), *arguments))

    def _make(self, environment_id: str, kwargs: dict[str, Any]) -> None:
        self._environment = make(environment_id, **kwargs)
        if getattr(self._environment, "next_agent", None) is not None:
            raise EnvironmentFailure(
                f"{environment_id} has several agents; only single-agent environments can run in a separate process.",
                kind="several-agents",
                retryable=False,
            )

    def _result(self, method: Any, *arguments: Any) -> Any:
        answer = method(*arguments)
        return self._runner.run(_await(answer)) if inspect.isawaitable(answer) else answer


async def _await(value: Any) -> Any:
    return await value


def answer_request(host: EnvironmentHost, method: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Answer a request: ``ok`` with a value; ``failure`` or ``refused`` with fields; ``raised`` with the error text."""
    try:
        return "ok", host.call(method, arguments)
    except EpisodeFailure as error:
        return "failure", error.code, error.detail, error.hint, error.kind, error.retryable
    except HeadraceError as error:
        return "refused", error.code, error.detail, error.hint
    except BaseException as error:  # noqa: BLE001 - sent to the worker, which reports it
        return "raised", describe_error(error)


def encode_answer(answer: tuple[Any, ...]) -> bytes:
    """Encode an answer, or a failure if it cannot be pickled."""
    try:
        data = pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 - objects of the environment can raise any error
        data = pickle.dumps(("raised", f"its result cannot be sent to the worker: {describe_error(error)}"))
    return LENGTH.pack(len(data)) + data


def main() -> None:
    """Serve the socket on standard input. The arguments are modules to import first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(NICENESS)
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    import_all(sys.argv[1:])
    host = EnvironmentHost()
    with connection, connection.makefile("rb") as requests:
        connection.sendall(encode_answer(("ok", None)))
        while head := requests.read(LENGTH.size):
            method, arguments = pickle.loads(requests.read(*LENGTH.unpack(head)))
            connection.sendall(encode_answer(answer_request(host, method, arguments)))
