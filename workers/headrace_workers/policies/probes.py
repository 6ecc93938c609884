"""Health probes of policy servers that are suspended or silent.

* A suspended server is probed when its suspension ends, and returns when it answers.
* A server with open requests that has been silent for a while is probed. If two probes in a row fail, it is suspended,
  and its requests move to other servers where possible.
* No server is probed while no requests are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace_workers.policies.router import ServerRouter
from headrace_workers.policies.server_client import PolicyServerClient

INTERVAL_S = 0.5
"""Interval at which the prober starts probes."""

SILENT_S = 5.0
"""Silence after which a server with open requests is probed. Long answers take longer than this; a probe is cheap."""

MAX_MISSES = 2
"""Failed probes in a row after which a server counts as frozen. A busy server may fail one."""


class ServerProber:
    """Probes the servers of a router in the background."""

    def __init__(
        self, router: ServerRouter, server: Callable[[str], PolicyServerClient], clock: Callable[[], float]
    ) -> None:
        self._router = router
        self._server = server
        self._clock = clock
        self._misses: dict[str, int] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the background task if it is not running."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._probe_forever())

    async def stop(self) -> None:
        """Stop the background task and all probes."""
        tasks = [task for task in (self._task, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_forever(self) -> None:
        while any(server.open or server.suspended_until is not None for server in self._router.servers.values()):
            self._start_probes()
            await asyncio.sleep(INTERVAL_S)

    def _start_probes(self) -> None:
        for address in self._router.due_for_probe():
            self._probe(address, self._probe_suspended)
        silent_since = self._clock() - SILENT_S
        for server in self._router.servers.values():
            if server.open and server.suspended_until is None and server.heard_at < silent_since:
                self._probe(server.address, self._probe_silent)

    def _probe(self, address: str, probe: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        if address not in self._probes:
            task = self._probes[address] = asyncio.get_running_loop().create_task(probe(address))
            task.add_done_callback(lambda _: self._probes.pop(address, None))

    async def _probe_suspended(self, address: str) -> None:
        """Probe a suspended server."""
        server = self._server(address)
        problem = await server.problem()
        if not problem:
            server.forget_properties()
        self._router.probed(address, problem)

    async def _probe_silent(self, address: str) -> None:
        """Probe a silent server."""
        server = self._server(address)
        problem = await server.problem()
        if not problem:
            self._misses.pop(address, None)
            self._router.heard(address)
            return
        self._misses[address] = self._misses.get(address, 0) + 1
        if self._misses[address] >= MAX_MISSES:
            del self._misses[address]
            self._router.silent(address, problem)
            server.fail_open_requests("not-responding")
