"""One policy server of a run, as it was last seen.

* What it holds is what it confirmed last; whoever has not confirmed holds nothing that is known.
* Time that it was paused adds up, the pause that lasts included.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.engine import FRESH_VERSION
from headrace.trajectory import Version
from headrace.wire import PolicyServer, ServerState
from headrace_orchestrator.policies.admission import Load


class Seen(NamedTuple):
    """What a probe found. ``problem``: why it is no use; empty if it is well. ``weights``: as it names them itself,
    empty if it does not say. ``paused``: whether it holds requests back."""

    problem: str = ""
    weights: str = ""
    paused: bool = False


class Server:
    """The state of one server; ``address`` names it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.drains = False
        self.state: ServerState = "unknown"
        self.reason = ""
        self.seen: Seen | None = None
        self.load = Load()
        #: The call that is out.
        self.busy = ""
        self.probe_at = 0.0
        self._paused_at: float | None = None
        self._paused_before_s = 0.0

    @property
    def up(self) -> bool:
        """Whether it answered the last probe."""
        return self.seen is not None and not self.seen.problem

    @property
    def version(self) -> Version | None:
        """What it confirmed; None if that is nothing, or no version."""
        if self.seen is None or self.seen.problem or not self.seen.weights:
            return None
        return version_of(self.seen.weights)

    @property
    def paused_at(self) -> float | None:
        """Since when it is paused, or None."""
        return self._paused_at

    def pause(self, paused: bool, now: float) -> None:
        """It is seen to be paused, or not."""
        if paused and self._paused_at is None:
            self._paused_at = now
        elif not paused and self._paused_at is not None:
            self._paused_before_s += now - self._paused_at
            self._paused_at = None

    def shown(self, now: float) -> PolicyServer:
        """As workers and people see it."""
        paused_s = self._paused_before_s + (0.0 if self._paused_at is None else now - self._paused_at)
        version = self.version
        return PolicyServer(
            address=self.address,
            state=self.state,
            version="" if version is None else str(version),
            paused_s=paused_s,
            running=self.load.running,
            waiting=self.load.waiting,
            kv_cache_used=self.load.kv_cache_used,
            reason=self.reason,
        )


def version_of(text: str) -> Version | None:
    """The version that a server's word for its weights stands for; None if it stands for none."""
    if text == FRESH_VERSION:
        return Version(0, 0)
    try:
        return Version.parse(text)
    except ValueError:
        return None
