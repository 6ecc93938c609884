"""The capacity of one run's policy servers: their states and metrics, fed to the admission controller.

* A server counts from the moment that the run has it, and as long as it takes requests or is paused for weights.
* A run without servers that are known here, or that says so, has no cap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from headrace.runspec import AdmissionSpec
from headrace_orchestrator.policy_servers.admission import Admission, Reading, ServerPoll, poll
from headrace_orchestrator.policy_servers.server_state import WatchedServer


class CapacityMeter:
    """The capacity of one run's servers."""

    def __init__(self, spec: AdmissionSpec) -> None:
        ceiling = math.inf if spec.ceiling is None else spec.ceiling
        self._state = Admission(start=spec.start, floor=spec.floor, ceiling=ceiling)
        self.on = spec.adapt

    @property
    def attainable(self) -> int | None:
        """Training episodes that the run may have at workers; None for no cap."""
        return self._state.attainable if self.on else None

    def take_servers(self, servers: Iterable[WatchedServer], leased: int) -> None:
        """The servers that the run has now, in their states; ``leased``: its training episodes at workers."""
        there = {server.address: server for server in servers}
        self._state = self._state.only(there)
        news = {address: ServerPoll(_state(server)) for address, server in there.items() if self._changed(server)}
        self._state = poll(self._state, news, leased)

    def _changed(self, server: WatchedServer) -> bool:
        window = self._state.windows.get(server.address)
        return window is None or window.away != (_state(server) == "away")

    def measured(self, server: WatchedServer, reading: Reading, leased: int) -> None:
        """Take a reading of a server's metrics."""
        if server.address in self._state.windows:
            self._state = poll(self._state, {server.address: ServerPoll(_state(server), reading)}, leased)


def _state(server: WatchedServer) -> Literal["serving", "paused", "away"]:
    if server.state in ("ejected", "draining"):
        return "away"
    return "paused" if server.state == "syncing" or server.paused_at is not None else "serving"
