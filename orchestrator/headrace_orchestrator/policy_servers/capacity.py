"""The capacity of one run's policy servers, computed from their states and metrics.

* A server counts from the moment that the run has it, as long as it takes requests or is paused for weights.
* A run without servers that the orchestrator knows, or with ``adapt`` off, has no cap.
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
        self._adapt = spec.adapt

    @property
    def attainable(self) -> int | None:
        """Number of training episodes that the run may have at workers; None for no cap."""
        return self._state.attainable if self._adapt else None

    def take_servers(self, servers: Iterable[WatchedServer], leased: int) -> None:
        """Take the run's current servers and their states. ``leased``: the run's training episodes at workers."""
        present = {server.address: server for server in servers}
        self._state = self._state.keep_only(present)
        changes = {address: ServerPoll(_state(server)) for address, server in present.items() if self._changed(server)}
        self._state = poll(self._state, changes, leased)

    def _changed(self, server: WatchedServer) -> bool:
        window = self._state.windows.get(server.address)
        return window is None or window.absent != (_state(server) == "absent")

    def take_reading(self, server: WatchedServer, reading: Reading, leased: int) -> None:
        """Take a reading of a server's metrics."""
        if server.address in self._state.windows:
            self._state = poll(self._state, {server.address: ServerPoll(_state(server), reading)}, leased)


def _state(server: WatchedServer) -> Literal["serving", "paused", "absent"]:
    if server.state in ("ejected", "draining"):
        return "absent"
    return "paused" if server.state == "syncing" or server.paused_at is not None else "serving"
