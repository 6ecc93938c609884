"""The same by SWE-ReX and SandboxFusion, where they install: neither isolates anything by itself here."""

from __future__ import annotations

import asyncio

from benchmarks.buffer.peers import Peer
from benchmarks.sandbox.ways import LIMITS, PROGRAM, in_turns
from benchmarks.table import Row
from headrace_sandbox.result import ExecResult
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

ROUNDS = 50

FUSION = "SandboxFusion: its package is a client; the server comes as a Docker image only"


async def rows() -> list[Row]:
    """Ours beside SWE-ReX on this machine, without a container: a command, and a cell of a shell that lives on."""
    peer = await asyncio.to_thread(Peer, "swe_rex", "SWE-ReX")
    runtime = BubblewrapRuntime()
    took: dict[str, float] = {}

    async def asked(do: str) -> ExecResult | None:
        answer = await asyncio.to_thread(peer.ask, do)
        if not answer:
            raise LookupError
        return None

    try:
        took = await in_turns(
            {
                "code": lambda: runtime.run_code(PROGRAM, LIMITS),
                "execute": lambda: asked("execute"),
                "session": lambda: asked("session"),
            },
            ROUNDS,
        )
    except LookupError:
        took = await in_turns({"code": lambda: runtime.run_code(PROGRAM, LIMITS)}, ROUNDS)
    await runtime.close()
    await asyncio.to_thread(peer.close)
    problem = f": {peer.problem}" if peer.problem else ""
    ours = took["code"]
    return [
        Row("run_code of print(1)", ours, "ms", f"SWE-ReX execute, local{problem}", took.get("execute"), 1.0, "lower"),
        Row("run_code of print(1)", ours, "ms", f"SWE-ReX in a shell{problem}", took.get("session"), 1.0, "lower"),
        Row("run_code of print(1)", ours, "ms", FUSION, None, 1.0, "lower"),
    ]
