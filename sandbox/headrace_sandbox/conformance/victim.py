"""A supervisor that a case kills: ``python -m headrace_sandbox.conformance.victim RUNTIME WAY MARK``."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

from headrace_sandbox.conformance.suite import CaseContext, Way
from headrace_sandbox.runtimes.registry import make_runtime


async def main(name: str, way: str, mark: str) -> None:
    """Run a program that runs for a long time."""
    runtime = make_runtime(name)
    code = (
        f"import os, sys, time\nif sys.platform != 'linux':\n    time.sleep(60)\nos.execvp('sleep', ['{mark}', '300'])"
    )
    await CaseContext(runtime, cast(Way, way)).run(code, wall_s=60.0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
