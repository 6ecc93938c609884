"""The components of Headrace as processes of a local fleet: their command lines, and when they are ready.

* Workers stop before policies, and those before the orchestrator.
* A worker's token is in its environment and in no command line.
* A component is ready when it answers.
* A port that another process has is refused before anything starts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from headrace.errors import PortInUse, SetupError
from headrace_orchestrator.cli.processes.supervisor import Component, LocalFleet, python_module

ORCHESTRATOR_STAGE, POLICY_STAGE, WORKER_STAGE, LEARNER_STAGE = range(4)

START_TIMEOUT_S = 60.0
"""To answer the first request; reading a large log takes a while, and says so meanwhile."""

_LOOK_S = 0.05
"""Between looks at a component that is starting."""


def orchestrator(
    data: Path, *, host: str, port: int, tokens: Path | None = None, arguments: Sequence[str] = ()
) -> Component:
    """The orchestrator of a data directory, with more arguments of its command."""
    arguments = ["orchestrator", "--data", str(data), "--host", host, "--port", str(port), *arguments]
    if tokens is not None:
        arguments += ["--tokens", str(tokens)]
    return Component(
        name="orchestrator",
        command=python_module("headrace_orchestrator.cli", *arguments),
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
    """A worker. It names itself at the orchestrator, anew after each restart. The token goes by the environment, so
    that it is in no process list. Hashes are fixed: some generators of tasks depend on them, and a seed must mean the
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
        command=python_module("headrace_workers", *arguments),
        environment={"PYTHONHASHSEED": "0", **({"HEADRACE_TOKEN": token} if token else {})},
        stage=WORKER_STAGE,
    )


def tiny_policy(name: str, port: int, *, seed: int = 0) -> Component:
    """A tiny policy. Its weights live in its process: one that is restarted begins at version 0.0 again."""
    return Component(
        name=name,
        command=python_module("headrace_workers.tiny_policy", "--port", str(port), "--seed", str(seed)),
        stage=POLICY_STAGE,
    )


def free_port() -> int:
    """A port of the loopback interface that is free now. It is fixed, so that a restart keeps the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def require_free(host: str, port: int) -> None:
    """Raise PortInUse if another process has the port: it would answer in the component's place."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(
                f"Port {port} on {host} cannot be bound: {error.strerror}.",
                hint="Stop the process that has it, or choose another port.",
                port=port,
            ) from error


def await_answer(
    fleet: LocalFleet,
    name: str,
    port: int,
    path: str,
    *,
    host: str = "127.0.0.1",
    timeout_s: float = START_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the component answers 200. Raises SetupError if it ends, or stays silent for too long."""
    deadline = clock() + timeout_s
    while not _answers(host, port, path):
        fleet.require(name)
        if clock() >= deadline:
            raise SetupError(
                f"{name} did not answer at {host}:{port}{path} within {timeout_s:g} s. The end of its log:\n"
                f"{fleet.tail(name)}",
                hint=f"Its log is {fleet.log_file(name)}.",
            )
        sleep(_LOOK_S)
    fleet.require(name)


def _answers(host: str, port: int, path: str) -> bool:
    connection = HTTPConnection(host, port, timeout=1.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
