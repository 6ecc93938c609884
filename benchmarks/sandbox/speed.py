"""The median time of one execution."""

from __future__ import annotations

from benchmarks.sandbox.docker import docker_exec
from benchmarks.sandbox.ways import COMMAND, LIMITS, PROGRAM, Way, bare, in_turns, open_persistent
from benchmarks.table import Row
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

ROUNDS = 60

MOST_GVISOR_MS = 60.0
"""The goal for a command in a persistent sandbox of gVisor."""


async def rows() -> list[Row]:
    """Compare a fork and a fresh sandbox with a bare interpreter; time commands in other persistent sandboxes."""
    runtime = BubblewrapRuntime()
    ways: dict[str, Way] = {
        "bare": bare,
        "code": lambda: runtime.run_code(PROGRAM, LIMITS),
        "fresh": lambda: runtime.run(COMMAND, LIMITS),
    }
    gvisor, no_gvisor = await open_persistent("gvisor")
    if gvisor is not None:
        ways["gvisor"] = lambda: gvisor.run(COMMAND, LIMITS)
    with docker_exec() as (docker, docker_label):
        if docker is not None:
            ways["docker"] = docker
        ms = await in_turns(ways, ROUNDS)
    if gvisor is not None:
        await gvisor.close()
    await runtime.close()
    exec_gvisor = "gvisor: a command in a persistent sandbox"
    return [
        Row("run_code of print(1)", ms["code"], "ms", "a bare python -c", ms["bare"], 0.6, "lower"),
        Row("a fresh sandbox with python -c", ms["fresh"], "ms", "a bare python -c", ms["bare"], 1.9, "lower"),
        Row("run_code of print(1)", ms["code"], "ms", docker_label, ms.get("docker"), 0.1, "lower"),
        Row(exec_gvisor, ms["gvisor"], "ms", "the goal", MOST_GVISOR_MS, 1.0, "lower")
        if gvisor is not None
        else Row(exec_gvisor, float("nan"), "ms", no_gvisor, None, 1.0, "lower"),
    ]
