"""How long one execution takes, at the median."""

from __future__ import annotations

from benchmarks.sandbox.docker import docker_exec
from benchmarks.sandbox.ways import COMMAND, LIMITS, PROGRAM, Way, bare, in_turns, living
from benchmarks.table import Row
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

ROUNDS = 60

MOST_GVISOR_MS = 60.0
"""A command in a sandbox of gVisor that lives on may take so long."""


async def rows() -> list[Row]:
    """A fork and a fresh sandbox beside a bare interpreter; commands in sandboxes of other runtimes that live on."""
    runtime = BubblewrapRuntime()
    ways: dict[str, Way] = {
        "bare": bare,
        "code": lambda: runtime.run_code(PROGRAM, LIMITS),
        "fresh": lambda: runtime.run(COMMAND, LIMITS),
    }
    gvisor, no_gvisor = await living("gvisor")
    if gvisor is not None:
        ways["gvisor"] = lambda: gvisor.run(COMMAND, LIMITS)
    with docker_exec() as (docker, against):
        if docker is not None:
            ways["docker"] = docker
        took = await in_turns(ways, ROUNDS)
    if gvisor is not None:
        await gvisor.close()
    await runtime.close()
    exec_gvisor = "gvisor: a command in a sandbox that lives on"
    return [
        Row("run_code of print(1)", took["code"], "ms", "a bare python -c", took["bare"], 0.6, "lower"),
        Row("a fresh sandbox with python -c", took["fresh"], "ms", "a bare python -c", took["bare"], 1.9, "lower"),
        Row("run_code of print(1)", took["code"], "ms", against, took.get("docker"), 0.1, "lower"),
        Row(exec_gvisor, took["gvisor"], "ms", "the goal", MOST_GVISOR_MS, 1.0, "lower")
        if gvisor is not None
        else Row(exec_gvisor, float("nan"), "ms", no_gvisor, None, 1.0, "lower"),
    ]
