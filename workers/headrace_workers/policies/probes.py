"""Health probes of policy servers that are out or silent.

* A server that is out is probed when it is due, and returns when it answers.
* A server with open requests that has been silent for a while is probed. If two probes in a row fail, it is put out,
  and its requests move to other servers where possible.
* No server is probed while no requests are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace_workers.policies.router import ServerRouter
from headrace_workers.policies.server_client import PolicyServerClient

LOOK_S = 0.5
"""Interval at which the prober looks for servers to probe."""

SILENT_S = 5.0
"""Silence after which a server with open requests is probed. Long answers take longer than this; a probe is cheap."""

MISSES = 2
"""Failed probes in a row that mean a frozen server. A busy server may miss one."""


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
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Stop the background task and all probes."""
        tasks = [task for task in (self._task, *self._probes.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while any(server.open or server.out_until is not None for server in self._router.servers.values()):
            self._look()
            await asyncio.sleep(LOOK_S)

    def _look(self) -> None:
        for address in self._router.due():
            self._probe(address, self._ask_back)
        silent_since = self._clock() - SILENT_S
        for server in self._router.servers.values():
            if server.open and server.out_until is None and server.heard_at < silent_since:
                self._probe(server.address, self._ask_alive)

    def _probe(self, address: str, ask: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        if address not in self._probes:
            task = self._probes[address] = asyncio.get_running_loop().create_task(ask(address))
            task.add_done_callback(lambda _: self._probes.pop(address, None))

    async def _ask_back(self, address: str) -> None:
        """Probe a server that is out."""
        server = self._server(address)
        problem = await server.problem()
        if not problem:
            server.is_back()
        self._router.probed(address, problem)

    async def _ask_alive(self, address: str) -> None:
        """Probe a silent server."""
        server = self._server(address)
        problem = await server.problem()
        if not problem:
            self._misses.pop(address, None)
            self._router.heard(address)
            return
        self._misses[address] = self._misses.get(address, 0) + 1
        if self._misses[address] >= MISSES:
            del self._misses[address]
            self._router.silent(address, problem)
            server.give_up("not-responding")
