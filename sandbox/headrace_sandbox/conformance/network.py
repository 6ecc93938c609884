"""Cases 26 and 27: addresses and sockets that a program must not reach."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys

import msgspec

from headrace.common.timeouts import timeout
from headrace_sandbox.conformance.suite import ESCAPED, CaseContext, CaseOutcome, Escape, SkipCase, Unclear, case

NETWORK_CASE_S = 60.0
"""Time limit of a case in a network namespace of its own."""


@case("26", "metadata service, private and public addresses, names", harmless=True)
async def addresses(context: CaseContext) -> str:
    return await _run_in_own_network(context, "26")


@case("27", "what listens on this machine: loopback, abstract sockets, Docker", harmless=True)
async def local_services(context: CaseContext) -> str:
    return await _run_in_own_network(context, "27")


async def _run_in_own_network(context: CaseContext, number: str) -> str:
    """Run a case in a network namespace of its own, so that it never contacts a real address."""
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        raise SkipCase(
            f"it needs root and the programs ip, unshare and nsenter; missing: {', '.join(missing) or 'root'}"
        )
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--net", "--", sys.executable, "-m", "headrace_sandbox.conformance.network_host"),
        *(context.runtime.name, context.way, number),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with timeout(NETWORK_CASE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise Unclear(f"the process of its network ended with {process.returncode}")
    outcome = msgspec.json.decode(output, type=CaseOutcome)
    if outcome.outcome == ESCAPED:
        raise Escape(outcome.evidence)
    if outcome.outcome == "unclear":
        raise Unclear(outcome.evidence)
    return outcome.outcome
