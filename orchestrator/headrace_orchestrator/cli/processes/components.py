"""The components of Headrace as child processes: their command lines, and the checks that they are ready.

* Workers stop before policies, and policies before the orchestrator.
* A worker's token is in its environment and in no command line.
* A component is ready when it answers.
* A port of another process is refused before anything starts.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from headrace.errors import SetupError
from headrace.server.listener import listen
from headrace_orchestrator.cli.processes.supervisor import Component, ProcessSupervisor

ORCHESTRATOR_STAGE, POLICY_STAGE, WORKER_STAGE, LEARNER_STAGE = range(4)

START_TIMEOUT_S = 60.0
"""Time to answer the first request. Reading a large log takes a while, and its progress is reported."""

_CHECK_INTERVAL_S = 0.05
"""Interval between checks of a starting component."""


def orchestrator(
    data: Path, *, host: str, port: int, tokens: Path | None = None, arguments: Sequence[str] = ()
) -> Component:
    """The orchestrator of a data directory, as a component. ``arguments``: further arguments of its command."""
    arguments = ["orchestrator", "--data", str(data), "--host", host, "--port", str(port), *arguments]
    if tokens is not None:
        arguments += ["--tokens", str(tokens)]
    return Component(
        name="orchestrator",
        command=_python_module("headrace_orchestrator.cli", *arguments),
        stage=ORCHESTRATOR_STAGE,
    )


def worker(
    name: str,
    url: str,
    *,
    slots: int,
    policy_endpoint: str,
    grace_s: float,
    imports: Sequence[str] = (),
    sandbox: str = "",
    token: str = "",
) -> Component:
    """A worker, as a component. It takes a new name after each restart. The token is passed in the environment, so that
    no process list shows it. The hash seed is fixed: some task generators depend on hashes, and a seed must mean the
    same task in every worker."""
    arguments = ["--orchestrator", url, "--slots", str(slots), "--grace-s", f"{grace_s:g}"]
    for module in imports:
        arguments += ["--import", module]
    if sandbox:
        arguments += ["--sandbox", sandbox]
    if policy_endpoint:
        arguments += ["--policy-endpoint", policy_endpoint]
    return Component(
        name=name,
        command=_python_module("headrace_workers", *arguments),
        environment={"PYTHONHASHSEED": "0", **({"HEADRACE_TOKEN": token} if token else {})},
        stage=WORKER_STAGE,
    )


def tiny_policy(name: str, port: int, *, seed: int = 0) -> Component:
    """A tiny policy, as a component. Its weights are in memory: after a restart it is at version 0.0 again."""
    return Component(
        name=name,
        command=_python_module("headrace_workers.tiny_policy", "--port", str(port), "--seed", str(seed)),
        stage=POLICY_STAGE,
    )


def _python_module(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def free_port() -> int:
    """Find a free port of the loopback interface. A fixed port keeps a component's address in a restart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def require_free(host: str, port: int, *, option: str = "--port") -> None:
    """Raise PortInUse if another process uses the port, because that process would answer in the component's place, and
    SetupError if it cannot be bound."""
    listen(host, port, option=option).close()


def await_answer(
    supervisor: ProcessSupervisor,
    name: str,
    port: int,
    path: str,
    *,
    host: str = "127.0.0.1",
    timeout_s: float = START_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the component answers 200. Raises SetupError if it ends, or does not answer in time."""
    deadline = clock() + timeout_s
    while not _answers(host, port, path):
        supervisor.require(name)
        if clock() >= deadline:
            raise SetupError(
                f"{name} did not answer at {host}:{port}{path} within {timeout_s:g} s. The end of its log:\n"
                f"{supervisor.tail(name)}",
                hint=f"Its log is {supervisor.log_file(name)}.",
            )
        sleep(_CHECK_INTERVAL_S)
    supervisor.require(name)


def _answers(host: str, port: int, path: str) -> bool:
    connection = HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
