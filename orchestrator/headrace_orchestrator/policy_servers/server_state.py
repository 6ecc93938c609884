"""The state of one policy server of a run: its last probe, and the progress of new weights.

* A server's weights are those that it confirmed last; without a confirmation they are unknown.
* Weights of another run are not a version of this run, whatever their number.
* The paused time adds up, including the current pause.
* The delay before the next try grows with each failure in a row, up to a bound.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from headrace.trajectory import Version
from headrace.wire.messages import PolicyServerState, PolicyServerStatus, Weights
from headrace.wire.policy_server import parse_weight_version
from headrace_orchestrator.policy_servers.admission import Load

RETRY_FIRST_S = 1.0
RETRY_MOST_S = 30.0
"""Between tries to bring a server to the version that it should hold: the first pause, doubled up to the longest."""

Stage = Literal["", "check", "ready", "pause", "load", "confirm", "resume"]
"""How far new weights are: not at all; the files are looked at; they are good, and it waits for its turn; it is being
paused; they are being loaded; it is asked what it holds now; it is let go on."""


class ProbeResult(NamedTuple):
    """The result of a probe. ``problem``: empty if the server is well. ``weights``: their name at the server, or empty.
    ``paused``: true if it holds requests back."""

    problem: str = ""
    weights: str = ""
    paused: bool = False


class CallProblem(NamedTuple):
    """The problem of a failed call. ``untouched``: the server certainly kept its weights."""

    kind: str
    message: str
    untouched: bool = False


class WatchedServer:
    """The state of one server; ``address`` names it. ``run``: whose weights count; empty for anybody's."""

    def __init__(self, address: str, run: str = "") -> None:
        self._run = run
        self.address = address
        self.drains = False
        #: The run that loads its weights into it, if that is another one.
        self.other_run = ""
        #: Whether another run did, and what it holds may be of that one, whatever it is called.
        self.strange = False
        #: The version that was loaded into it last.
        self.loaded: Version | None = None
        self.state: PolicyServerState = "unknown"
        self.reason = ""
        self.seen: ProbeResult | None = None
        self.load = Load()
        #: The call that is out.
        self.busy = ""
        self.probe_at = 0.0
        self.stage: Stage = ""
        #: The version that it is brought to, or was tried to be last, and where it is.
        self.wanted: tuple[Version, Weights] | None = None
        #: When it was asked to pause for that; the pause itself may be older.
        self.began_at = 0.0
        #: What it served when that version came, and may serve until its turn.
        self.may_keep: Version | None = None
        #: Why it could not be brought there, how often in a row, and when that is tried again.
        self.problem: CallProblem | None = None
        self.retry_at = 0.0
        #: When a paused server may be told the next thing, and whether its requests were ended already.
        self.told_at = 0.0
        self.ended_requests = False
        self._failures = 0
        self._paused_at: float | None = None
        self._paused_before_s = 0.0

    @property
    def up(self) -> bool:
        """Return True if the server answered the last probe."""
        return self.seen is not None and not self.seen.problem

    @property
    def version(self) -> Version | None:
        """The confirmed version; None if there is none or it belongs to another run."""
        return parse_weight_version(self.seen.weights, self._run) if self.seen is not None and self.up else None

    @property
    def is_whole(self) -> bool:
        """Return True if it confirmed a version of any run, with which it may continue."""
        return self.seen is not None and self.up and parse_weight_version(self.seen.weights) is not None

    @property
    def paused_at(self) -> float | None:
        """The time of its pause, or None."""
        return self._paused_at

    def pause(self, paused: bool, now: float) -> None:
        """Record that it is paused, or not."""
        if paused and self._paused_at is None:
            self._paused_at = now
        elif not paused and self._paused_at is not None:
            self._paused_before_s += now - self._paused_at
            self._paused_at = None
            self.ended_requests = False

    def fail(self, problem: CallProblem, now: float) -> None:
        """Record a failure to bring it to its target version."""
        self.stage = ""
        self.problem = problem
        self.retry_at = now + min(RETRY_MOST_S, RETRY_FIRST_S * 2**self._failures)
        self._failures += 1

    def begin_anew(self) -> None:
        """Forget failures: there is a new version to try."""
        self.problem = None
        self.retry_at = 0.0
        self._failures = 0

    def shown(self, now: float) -> PolicyServerStatus:
        """The state for workers and listings."""
        paused_s = self._paused_before_s + (0.0 if self._paused_at is None else now - self._paused_at)
        version = self.version
        return PolicyServerStatus(
            address=self.address,
            state=self.state,
            version="" if version is None else str(version),
            paused_s=paused_s,
            running=self.load.running,
            waiting=self.load.waiting,
            kv_cache_used=self.load.kv_cache_used,
            reason=self.reason,
        )
