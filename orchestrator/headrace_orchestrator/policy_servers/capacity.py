"""What the policy servers of one run take at a time: their states and metrics, fed to the controller of admission.

* A server counts from the moment that the run has it, and as long as it takes requests or is paused for weights.
* A run without servers that are known here, or that says so, has no cap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from headrace.runspec import AdmissionSpec
from headrace_orchestrator.policy_servers.admission import Admission, Reading, Seen, poll
from headrace_orchestrator.policy_servers.server_state import Server


class Meter:
    """The admission of one run."""

    def __init__(self, spec: AdmissionSpec) -> None:
        ceiling = math.inf if spec.ceiling is None else spec.ceiling
        self._state = Admission(start=spec.start, floor=spec.floor, ceiling=ceiling)
        self.on = spec.adapt

    @property
    def attainable(self) -> int | None:
        """Training episodes that the run may have at workers; None for no cap."""
        return self._state.attainable if self.on else None

    def take_servers(self, servers: Iterable[Server], leased: int) -> None:
        """The servers that the run has now, in their states; ``leased``: its training episodes at workers."""
        there = {server.address: server for server in servers}
        self._state = self._state.only(there)
        news = {address: Seen(_state(server)) for address, server in there.items() if self._changed(server)}
        self._state = poll(self._state, news, leased)

    def _changed(self, server: Server) -> bool:
        window = self._state.windows.get(server.address)
        return window is None or window.away != (_state(server) == "away")

    def measured(self, server: Server, reading: Reading, leased: int) -> None:
        """What the metrics of a server said."""
        if server.address in self._state.windows:
            self._state = poll(self._state, {server.address: Seen(_state(server), reading)}, leased)


def _state(server: Server) -> Literal["serving", "paused", "away"]:
    if server.state in ("ejected", "draining"):
        return "away"
    return "paused" if server.state == "syncing" or server.paused_at is not None else "serving"
