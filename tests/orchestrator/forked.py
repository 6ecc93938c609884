"""Orchestrators as processes that start within milliseconds: forked from one that has everything imported.

``python -m tests.orchestrator.forked DATA`` reads commands from standard input: ``start SETTINGS`` (JSON) forks one,
and prints its process id and address; ``reap`` waits for one that was killed. Their retention keeps nothing, and has
steps in quick succession.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from headrace.server import logs
from headrace_orchestrator import server
from headrace_orchestrator.buffer.retention_rules import RetentionRules
from headrace_orchestrator.service.storage import retention as retaining
from headrace_orchestrator.settings import Address, Settings

RETAIN_EVERY_S = 0.002


def main(data: Path) -> None:
    retaining.RETAIN_EVERY_S = RETAIN_EVERY_S
    gc.freeze()
    child = 0
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "reap":
            os.waitpid(child, 0)
            child = 0
            _say("reaped")
            continue
        child = os.fork()
        if not child:
            sys.stdin.close()
            _run(Settings(data=data, port=0, retention=RetentionRules(trajectories=0), **json.loads(rest)))
            return
    if child:  # the parent has ended
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _run(settings: Settings) -> None:
    def ready(address: Address) -> None:
        _say(f"{os.getpid()} {address.url}")

    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(server.serve(settings, ready=ready))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Started(NamedTuple):
    """A running orchestrator."""

    pid: int
    url: str


class Forked:
    """Starts and kills forked orchestrators, one at a time."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._started: Started | None = None
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.orchestrator.forked", str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def start(self, **settings: Any) -> Started:
        """Start one; returns when it is ready."""
        pid, url = self._request(f"start {json.dumps(settings)}").split()
        self._started = Started(int(pid), url)
        return self._started

    def kill(self) -> None:
        """End it with SIGKILL."""
        assert self._started is not None
        os.kill(self._started.pid, signal.SIGKILL)
        self._started = None
        assert self._request("reap") == "reaped"

    def end(self) -> None:
        """End the parent process and its orchestrator."""
        self._parent.communicate(timeout=30)

    def _request(self, line: str) -> str:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(line + "\n")
        self._parent.stdin.flush()
        answer = self._parent.stdout.readline().strip()
        assert answer, "the process that starts orchestrators does not answer"
        return answer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
