"""The state of one policy server of a run: its last probe, and the progress of new weights.

* A server's version is the one that it confirmed last; without a confirmation it is unknown.
* Weights of another run are not a version of this run, whatever their number.
* The paused time is a sum that includes the current pause.
* The delay before the next attempt doubles with each consecutive failure, up to a bound.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from headrace.trajectory import Version
from headrace.wire.messages import PolicyServerState, PolicyServerStatus, Weights
from headrace.wire.policy_server import parse_weight_version
from headrace_orchestrator.policy_servers.admission import Load

RETRY_FIRST_S = 1.0
RETRY_MAX_S = 30.0
"""First and longest delay between two attempts to load weights or an adapter into a server."""

Stage = Literal["", "check", "ready", "pause", "load", "confirm", "resume"]
"""Stages of a weight sync at one server: none; its files are checked; the check passed and it waits for its turn; the
server is pausing; it loads; it confirms its version; it resumes."""


class ProbeResult(NamedTuple):
    """The result of a probe. ``problem``: empty if the server answers. ``weights``: the server's name for its weights,
    or empty. ``paused``: True if it holds requests back."""

    problem: str = ""
    weights: str = ""
    paused: bool = False


class CallProblem(NamedTuple):
    """The problem of a failed call. ``untouched``: the server certainly kept its weights."""

    kind: str
    message: str
    untouched: bool = False


class WatchedServer:
    """The state of the server at ``address``. ``run``: the run whose weights count; empty for those of any run."""

    def __init__(self, address: str, run: str = "") -> None:
        self._run = run
        self.address = address
        self.draining = False
        #: The other run that loads its weights into this server; empty if none does.
        self.other_run = ""
        #: True if its weights may be those of another run, whatever they are called.
        self.maybe_foreign = False
        #: The version that this controller loaded last.
        self.loaded_version: Version | None = None
        self.state: PolicyServerState = "unknown"
        self.reason = ""
        self.last_probe: ProbeResult | None = None
        self.load = Load()
        #: The kind of the call that has no result yet; empty without one.
        self.pending_call = ""
        self.probe_at = 0.0
        self.stage: Stage = ""
        #: The version of the current or last sync, and its weights.
        self.sync_target: tuple[Version, Weights] | None = None
        #: The time of the request to pause for this sync; the pause itself may be older.
        self.pause_requested_at = 0.0
        #: The version that it served when the target changed, and may serve until its turn.
        self.interim_version: Version | None = None
        #: The problem of the last failed sync, and the time of the next attempt.
        self.sync_problem: CallProblem | None = None
        self.retry_at = 0.0
        #: The time from which a paused server may get another call, and whether its requests were ended.
        self.next_instruction_at = 0.0
        self.requests_ended = False
        self._failures = 0
        #: The start of the current pause; None if it is not paused.
        self.paused_at: float | None = None
        self._paused_before_s = 0.0

    @property
    def up(self) -> bool:
        """Return True if the server answered the last probe."""
        return self.last_probe is not None and not self.last_probe.problem

    @property
    def version(self) -> Version | None:
        """The confirmed version; None without one, or if it belongs to another run."""
        probe = self.last_probe
        return parse_weight_version(probe.weights, self._run) if probe is not None and self.up else None

    @property
    def weights_known(self) -> bool:
        """Return True if the server confirmed a version of any run, with which it may continue."""
        return self.last_probe is not None and self.up and parse_weight_version(self.last_probe.weights) is not None

    def set_paused(self, paused: bool, now: float) -> None:
        """Record whether the server is paused."""
        if paused and self.paused_at is None:
            self.paused_at = now
        elif not paused and self.paused_at is not None:
            self._paused_before_s += now - self.paused_at
            self.paused_at = None
            self.requests_ended = False

    def record_failure(self, problem: CallProblem, now: float) -> None:
        """Record that a sync failed."""
        self.stage = ""
        self.sync_problem = problem
        self.retry_at = now + retry_delay_s(self._failures)
        self._failures += 1

    def reset_failures(self) -> None:
        """Forget failures, so that a new version is tried at once."""
        self.sync_problem = None
        self.retry_at = 0.0
        self._failures = 0

    def status(self, now: float) -> PolicyServerStatus:
        """The status for workers and listings."""
        paused_s = self._paused_before_s + (0.0 if self.paused_at is None else now - self.paused_at)
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


def retry_delay_s(earlier_failures: int) -> float:
    """The delay before the next attempt, after a failure that follows ``earlier_failures`` consecutive ones."""
    return min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** min(earlier_failures, 10))  # bounded, so that no count overflows
