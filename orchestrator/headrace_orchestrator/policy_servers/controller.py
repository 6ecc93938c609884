"""The controller of a run's policy servers. Pure: observations in, calls out.

* Each server is probed periodically; at most one call at a time is out at a server.
* A server that answers takes requests; one that does not is ejected with the reason, and returns when it answers.
* A draining server takes no new requests, whatever it answers, and gets no new weights.
* A server checks new weights before it is paused: refused weights cause no pause.
* A server takes requests again only after it has confirmed its version.
* A server that certainly kept its old weights continues with them; if others serve a newer version it is ejected until
  it has caught up.
* A server with unknown weights is ejected and stays paused; its requests are ended, and continue elsewhere.
* No request waits in a paused server for longer than the pause lease, whoever paused it.
* Only the newest version is tried; a failed one is retried, and a new one is tried at once.
* Nothing is paused while an evaluation holds the version that is served.
* Rolling: one server after the other, while the others serve.
* A server that another run loads its weights into is left alone, and takes no requests of this run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from headrace.runspec import SyncSpec
from headrace.trajectory import Version
from headrace.wire.messages import PolicyServerState, PolicyServerStatus, Reason, Weights
from headrace.wire.policy_server import PauseMode, run_of_weight_version
from headrace_orchestrator.policy_servers.admission import Load, Reading
from headrace_orchestrator.policy_servers.server_state import CallProblem, ProbeResult, WatchedServer

PROBE_EVERY_S = 1.0
"""Interval of probes: a learner waits at most this long for a server that has returned."""

CHECK_TIMEOUT_S = 60.0
"""Time for a server to check the files of new weights. It serves meanwhile."""

RESUME_TIMEOUT_S = 10.0
"""Time for a server to answer a call that needs no work."""

LET_GO_TIMEOUT_S = 2.0
"""The same while this process shuts down."""

UNASKED = "?"
"""Assumed state of a server after a failed load, until it is asked."""

IN_SYNC = ("pause", "load", "confirm", "resume")
"""Stages in which a server takes no requests."""

CallKind = Literal["probe", "check", "pause", "load", "resume", "end-requests"]


class PolicyServerCall(NamedTuple):
    """A call to make. ``check`` and ``load`` are about ``weights``, which are ``version`` of ``run``; ``end-requests``
    pauses too, and ends what is in the server."""

    kind: CallKind
    address: str
    timeout_s: float = math.inf
    version: Version | None = None
    weights: Weights | None = None
    mode: PauseMode = "keep"
    run: str = ""


class WeightTarget(NamedTuple):
    """What the servers of a run are to hold. ``version``: None where the learner loads. ``held``: the newest that is
    served. ``hold``: which evaluation the servers must not be paused for, and for how many seconds more."""

    version: Version | None = None
    weights: Weights | None = None
    held: Version = Version(0, 0)
    hold: tuple[str, float] = ("", 0.0)


class ServerResumed(NamedTuple):
    """An event: a server resumed with ``version`` after a pause."""

    address: str
    version: Version
    paused_s: float


class SyncFailed(NamedTuple):
    """An event: a server could not be brought to a version."""

    address: str
    version: Version
    problem: CallProblem


class Controller:
    """All policy servers of one run. ``revision`` grows whenever what is told of them changes. ``run``: whose weights
    they are to hold."""

    def __init__(self, sync: SyncSpec, revision: int = 0, run: str = "") -> None:
        self._run = run
        self.servers: dict[str, WatchedServer] = {}
        self.target = WeightTarget()
        self.revision = revision
        self._sync = sync
        #: Servers that were taken away while they were paused.
        self._left_paused: list[str] = []
        self._events: list[ServerResumed | SyncFailed] = []

    # What happened --------------------------------------------------------------------------------------------

    def take_servers(self, servers: Mapping[str, bool], others: Mapping[str, str] | None = None) -> None:
        """The servers that the run has now: addresses, and whether each drains. ``others``: those of them that another
        run loads its weights into, and which run that is."""
        for address in [known for known in self.servers if known not in servers]:
            server = self.servers.pop(address)
            if server.paused_at is not None and not server.busy and server.is_whole:
                self._left_paused.append(address)
            self.revision += 1
        for address, drains in servers.items():
            if address not in self.servers:
                self.servers[address] = WatchedServer(address, self._run)
                self.revision += 1
            server = self.servers[address]
            other_run = (others or {}).get(address, "")
            if (server.drains, server.other_run) != (drains, other_run):
                server.drains, server.other_run = drains, other_run
                server.strange = server.strange or bool(other_run)
                self._judge(server)

    def take_target(self, target: WeightTarget) -> None:
        """Set the weights that the servers should hold."""
        before, self.target = self.target, target
        if (before.version, before.weights) != (target.version, target.weights):
            for server in self.servers.values():
                server.begin_anew()
                server.may_keep = server.version if server.state == "serving" else None
                if server.stage == "ready":
                    server.stage = ""
        if before[:3] != target[:3]:
            for server in self.servers.values():
                self._judge(server)

    def probed(self, address: str, seen: ProbeResult, now: float) -> None:
        """Take the result of a probe."""
        server = self.servers.get(address)
        if server is None:
            return
        server.busy = ""
        server.probe_at = now + PROBE_EVERY_S
        news = server.seen is None or seen != server.seen
        server.seen = seen
        server.pause(seen.paused, now)  # one that is down is not paused
        if server.stage == "confirm":
            if server.wanted is not None and server.version == server.wanted[0]:
                server.stage = "resume"
                server.loaded, server.strange = server.version, False
            else:
                said = seen.problem or f"it says that it holds {seen.weights!r}"
                self._fail(server, CallProblem("not-confirmed", f"it does not confirm the version: {said}"), now)
        self._judge(server, news)

    def answered(self, call: PolicyServerCall, problem: CallProblem | None, now: float) -> None:
        """Take the result of a call."""
        server = self.servers.get(call.address)
        if server is None:
            if call.kind in ("pause", "load") and (problem is None or problem.untouched):
                self._left_paused.append(call.address)
            return
        server.busy = ""
        if call.kind == "resume":
            self._resumed(server, problem, now)
        elif call.kind == "end-requests":
            server.ended_requests = problem is None
        elif problem is not None:
            self._broke(server, call, problem, now)
        elif call.kind == "check":
            newest = (call.version, call.weights) == (self.target.version, self.target.weights)
            server.stage = "ready" if newest else ""
        elif call.kind == "pause":
            server.stage = "load"
        elif call.kind == "load":
            server.stage = "confirm"
        self._judge(server)

    def measured(self, address: str, reading: Reading) -> None:
        """Take a server's load; it does not count as a change."""
        if address in self.servers and isinstance(reading, Load):
            self.servers[address].load = reading

    def _broke(self, server: WatchedServer, call: PolicyServerCall, problem: CallProblem, now: float) -> None:
        if call.kind == "load" and not problem.untouched and server.seen is not None:
            server.seen = server.seen._replace(weights=UNASKED)
        self._fail(server, problem, now)

    def _resumed(self, server: WatchedServer, problem: CallProblem | None, now: float) -> None:
        loaded, server.stage = server.stage == "resume", ""
        if problem is not None:
            return  # told again while it is seen to be paused
        if loaded:
            server.begin_anew()
            server.may_keep = None
        if server.version is not None and server.paused_at is not None:
            self._events.append(ServerResumed(server.address, server.version, now - server.paused_at))
        server.pause(False, now)
        if server.seen is not None:
            server.seen = server.seen._replace(paused=False)

    def _fail(self, server: WatchedServer, problem: CallProblem, now: float) -> None:
        server.fail(problem, now)
        if server.wanted is not None:
            self._events.append(SyncFailed(server.address, server.wanted[0], problem))

    # What to do -----------------------------------------------------------------------------------------------

    def step(self, now: float) -> list[PolicyServerCall]:
        """The calls to make now; each is out until its result is taken."""
        calls = [PolicyServerCall("resume", address, RESUME_TIMEOUT_S) for address in self._left_paused]
        self._left_paused.clear()
        for server in self.servers.values():
            if not server.busy:
                call = self._next(server, now)
                if call is not None:
                    server.busy = call.kind
                    calls.append(call)
                    self._judge(server)
        return calls

    @property
    def newest_served(self) -> bool:
        """Return True if a server takes requests with the target version."""
        target = self.target.version
        return target is not None and any(
            server.state == "serving" and server.version == target for server in self.servers.values()
        )

    def let_go(self) -> list[PolicyServerCall]:
        """The calls at shutdown, which resume every paused server whose weights are certain."""
        paused = [server for server in self.servers.values() if server.paused_at is not None]
        return [
            PolicyServerCall("resume", server.address, LET_GO_TIMEOUT_S)
            for server in paused
            if server.is_whole and server.busy != "load"
        ]

    def events(self) -> list[ServerResumed | SyncFailed]:
        """The events about new weights since the last call."""
        events, self._events = self._events, []
        return events

    def due(self, now: float) -> float | None:
        """When to look again, if nothing happens before."""
        return min((at for server in self.servers.values() for at in self._dues(server, now)), default=None)

    def _dues(self, server: WatchedServer, now: float) -> Iterator[float]:
        if not server.busy:
            yield server.probe_at
            if server.retry_at > now:
                yield server.retry_at
            if server.paused_at is not None:
                at = max(server.told_at, server.paused_at + self._sync.pause_lease_s)
                if at > now:  # before that it was looked at
                    yield at

    def _next(self, server: WatchedServer, now: float) -> PolicyServerCall | None:
        """The next call to a server, if any."""
        if server.stage in IN_SYNC:
            return self._go_on(server, now)
        if server.seen is not None and server.seen.weights == UNASKED:
            return PolicyServerCall("probe", server.address)
        if server.other_run:
            return PolicyServerCall("probe", server.address) if server.probe_at <= now else None
        if server.paused_at is not None and server.told_at <= now:
            stray = self._stray(server, server.paused_at, now)
            if stray is not None:
                server.told_at = now + PROBE_EVERY_S
                return stray
        if self._may_begin(server, now):
            return self._begin(server, now)
        return PolicyServerCall("probe", server.address) if server.probe_at <= now else None

    def _stray(self, server: WatchedServer, paused_at: float, now: float) -> PolicyServerCall | None:
        """What a paused server needs that gets no new weights at the moment: nobody else is to pause a server that we
        drive."""
        driven = self.target.version is not None
        over = now >= paused_at + self._sync.pause_lease_s
        if server.is_whole:
            return PolicyServerCall("resume", server.address, RESUME_TIMEOUT_S) if driven or over else None
        if (over or server.problem is not None) and not server.ended_requests:
            return PolicyServerCall("end-requests", server.address, RESUME_TIMEOUT_S, mode="abort")
        return None

    def _may_begin(self, server: WatchedServer, now: float) -> bool:
        target = self.target
        if target.version is None or not server.up or server.drains or server.retry_at > now:
            return False
        if any(other.seen is None for other in self.servers.values()):
            return False  # all that are well are to go together
        if self._current(server):
            return False
        if server.stage == "":
            return True
        others = any(other.stage in IN_SYNC for other in self.servers.values())
        return target.hold[1] <= 0 and not (others and self._sync.order == "rolling")

    def _begin(self, server: WatchedServer, now: float) -> PolicyServerCall:
        target = self.target
        if server.stage == "":
            assert target.version is not None
            assert target.weights is not None
            server.stage = "check"
            server.wanted = target.version, target.weights
            return PolicyServerCall("check", server.address, CHECK_TIMEOUT_S, target.version, target.weights)
        server.stage = "pause"
        server.began_at = now
        server.pause(True, now)
        return PolicyServerCall("pause", server.address, self._sync.pause_lease_s, mode=self._sync.pause)

    def _go_on(self, server: WatchedServer, now: float) -> PolicyServerCall | None:
        left_s = server.began_at + self._sync.pause_lease_s - now
        if server.stage == "load":
            if self.target.version is None or server.wanted is None or left_s <= 0:
                why = "the pause lease ran out" if left_s <= 0 else "the learner loads now"
                self._fail(server, CallProblem("pause-lease-over", why, untouched=True), now)
                return None
            return PolicyServerCall("load", server.address, left_s, *server.wanted, run=self._run)
        if server.stage == "confirm":
            return PolicyServerCall("probe", server.address)
        return PolicyServerCall("resume", server.address, RESUME_TIMEOUT_S)

    # What to tell ---------------------------------------------------------------------------------------------

    def shown(self, now: float) -> list[PolicyServerStatus]:
        """The states of all servers, for workers and listings."""
        return [server.shown(now) for server in self.servers.values()]

    def reasons(self) -> list[Reason]:
        """The reasons that servers keep a learner waiting: failed, waiting or loading weights, or no server."""
        reasons = []
        target = self.target
        if target.version is not None:
            reasons = self._sync_reasons(target.version)
        out = [server for server in self.servers.values() if server.state == "ejected"]
        if out and len(out) == len(self.servers):
            told = "; ".join(f"{server.address}: {server.reason}" for server in out)
            reasons.append(
                Reason(
                    code="no-policy-servers",
                    message=f"No policy server takes requests. {told}.",
                    facts={"servers": len(out)},
                )
            )
        return reasons

    def _sync_reasons(self, version: Version) -> list[Reason]:
        if not self.servers:
            text = (
                f"Version {version} came with weights, and the run has no policy servers to load them into: "
                "name them in policy.endpoints, or with `headrace servers`"
            )
            return [_reason(version, f"{text}.", kind="no-servers")]
        behind = [server for server in self.servers.values() if not server.drains and server.version != version]
        failed = [server for server in behind if server.problem is not None]
        if failed:
            told = "; ".join(f"{server.address}: {server.problem.message}" for server in failed if server.problem)
            kinds = sorted({server.problem.kind for server in failed if server.problem})
            return [_reason(version, f"weight sync of version {version} failed: {told}.", kind=kinds[0])]
        if not behind:
            return []
        evaluation, hold_s = self.target.hold
        if hold_s > 0:
            text = f"weight sync of version {version} waits: evaluation {evaluation} holds version {self.target.held}"
            return [
                _reason(
                    version, f"{text} for {hold_s:.0f} s at the most.", evaluation=evaluation, hold_s=round(hold_s, 1)
                )
            ]
        text = f"weight sync of version {version}: {len(self.servers) - len(behind)} of {len(self.servers)} servers"
        return [_reason(version, f"{text} hold it.")]

    def _judge(self, server: WatchedServer, news: bool = False) -> None:
        state, reason = self._judged(server)
        if (state, reason) != (server.state, server.reason) or news:
            server.state, server.reason = state, reason
            self.revision += 1

    def _judged(self, server: WatchedServer) -> tuple[PolicyServerState, str]:
        seen = server.seen
        if seen is None:
            return "unknown", ""
        if server.stage in IN_SYNC:
            return "syncing", f"version {server.wanted[0] if server.wanted else None} is being loaded"
        if seen.problem:
            return "ejected", seen.problem
        if server.drains:
            return "draining", ""
        if server.other_run:
            return "ejected", f"run {server.other_run} loads its weights into it"
        problem = self._misfit(server, seen)
        if problem:
            return "ejected", problem
        return ("syncing", "it is paused") if seen.paused else ("serving", "")

    def _current(self, server: WatchedServer) -> bool:
        """Return True if a server holds the target. The name is not enough: other runs also count from 0.0."""
        target = self.target
        if server.version != target.version or server.strange:
            return False
        return target.version in (target.held, server.loaded)

    def _misfit(self, server: WatchedServer, seen: ProbeResult) -> str:
        """The reason that an answering server must not take requests."""
        version, target = server.version, self.target
        why = f" ({server.problem.message})" if server.problem is not None else ""
        if seen.weights and version is None and server.is_whole:
            return f"it holds weights of run {run_of_weight_version(seen.weights)}: {seen.weights!r}{why}"
        if seen.weights and version is None:
            return f"nobody knows which weights it holds: it says {seen.weights!r}{why}"
        if target.version is None:
            return ""
        if version is not None and (server.strange or (version == target.version and not self._current(server))):
            return f"another run named its weights {version}, and it is to hold this run's {target.version}{why}"
        if version in (target.version, target.held):
            return ""
        if version is None:
            return f"it does not say which weights it holds, and is to hold {target.version}"
        if version == server.may_keep and server.problem is None:
            return ""  # its turn is yet to come
        return f"it holds {version} and is to hold {target.version}{why}"


def _reason(version: Version, message: str, **facts: object) -> Reason:
    return Reason(code="weight-sync", message=message, facts={"version": str(version), **facts})
