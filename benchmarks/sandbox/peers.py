"""The same work by SWE-ReX and SandboxFusion, where they are installed; without a container neither isolates."""

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
    """Compare with SWE-ReX on this machine, without a container: a command, and a cell of a persistent shell."""
    peer = await asyncio.to_thread(Peer, "swe_rex", "SWE-ReX")
    runtime = BubblewrapRuntime()
    ms: dict[str, float] = {}

    async def ask_peer(action: str) -> ExecResult | None:
        answer = await asyncio.to_thread(peer.ask, action)
        if not answer:
            raise LookupError
        return None

    try:
        ms = await in_turns(
            {
                "code": lambda: runtime.run_code(PROGRAM, LIMITS),
                "execute": lambda: ask_peer("execute"),
                "session": lambda: ask_peer("session"),
            },
            ROUNDS,
        )
    except LookupError:
        ms = await in_turns({"code": lambda: runtime.run_code(PROGRAM, LIMITS)}, ROUNDS)
    await runtime.close()
    await asyncio.to_thread(peer.close)
    problem = f": {peer.problem}" if peer.problem else ""
    ours = ms["code"]
    return [
        Row("run_code of print(1)", ours, "ms", f"SWE-ReX execute, local{problem}", ms.get("execute"), 1.0, "lower"),
        Row("run_code of print(1)", ours, "ms", f"SWE-ReX in a shell{problem}", ms.get("session"), 1.0, "lower"),
        Row("run_code of print(1)", ours, "ms", FUSION, None, 1.0, "lower"),
    ]
