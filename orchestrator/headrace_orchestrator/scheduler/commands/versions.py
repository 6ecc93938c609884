"""Announcements of versions, and rewinds to an earlier one.

* A version follows the one before in its lineage; gaps are versions that were skipped. Repeating one changes nothing.
* Groups that an announcement leaves too far behind are retired as a unit; a leased batch may still be acked.
* A rewind with the key of an earlier one changes nothing, and gets its reply.
* A rewind opens a lineage; groups with a row above the fork retire, batches with such a group are dissolved.
"""

from __future__ import annotations

from headrace.errors import Conflict, VersionConflict, VersionUnknown
from headrace.trajectory import Version
from headrace.wire import messages
from headrace.wire.messages import Weights
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups, policy_servers
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.scheduler.state.versions import parse_version


def parse_announced(run: Run, text: str, weights: Weights | None) -> Version:
    """The announced version; raises if it does not follow the current version, or already has other weights."""
    version = parse_version(text)
    now = run.versions.now
    if version.lineage >= len(run.versions.forks):
        raise VersionUnknown(
            f"Lineage {version.lineage} of run {run.name} was never opened; the current version is {now}.",
            hint="A rewind opens a lineage.",
        )
    if version.lineage != now.lineage or version.n < now.n:
        raise VersionConflict(
            f"Version {version} does not follow {now}, the current version of run {run.name}.",
            hint="Announce versions of the current lineage, in rising order; go back with a rewind.",
        )
    policy_servers.require_weights_fit(run, version, weights)
    return version


def announce(state: SchedulerState, run: Run, request: messages.VersionRequest, now: float) -> messages.VersionReply:
    """Announce a new version, or the weights of the current one."""
    weights = request.weights
    version = parse_announced(run, request.version, weights)
    is_repeat = weights is None or (version, weights) == (run.policy_servers.target, run.policy_servers.weights)
    if version != run.versions.now or not is_repeat:
        emit(state, events.VersionAnnounced(run=run.name, version=version, weights=weights), now)
        follow_ups.retire_out_of_bound(state, run, now)
        follow_ups.settle(state, run, now)
    return _version_reply(state, run, same_weights_as(run, version, weights))


def same_weights_as(run: Run, version: Version | None, weights: Weights | None) -> str:
    """An earlier version with the same bytes; empty if there is none."""
    earlier = None if version is None else run.policy_servers.same_weights_as(version, weights)
    return "" if earlier is None else str(earlier)


def rewind(state: SchedulerState, run: Run, request: messages.RewindRequest, now: float) -> messages.VersionReply:
    """Fork a new lineage from an earlier version."""
    fork = parse_version(request.version)
    opened = run.rewinds.get(request.key)
    if opened is not None and opened.n != fork.n:
        raise Conflict(f"The key {request.key!r} belongs to a rewind of run {run.name} to another version.")
    if opened is not None:
        return messages.VersionReply(epoch=state.epoch, version=str(opened))
    if fork.lineage >= len(run.versions.forks) or fork.n > run.versions.now.n or run.versions.distance(fork) is None:
        raise VersionUnknown(
            f"Run {run.name} has no version {fork} on the way to {run.versions.now}.",
            hint="Rewind to a version that the current one descends from.",
        )
    version = Version(len(run.versions.forks), fork.n)
    emit(state, events.VersionAnnounced(run=run.name, version=version, fork=fork, key=request.key), now)
    follow_ups.retire_out_of_bound(state, run, now)
    follow_ups.settle(state, run, now)
    return _version_reply(state, run)


def _version_reply(state: SchedulerState, run: Run, same_weights_as: str = "") -> messages.VersionReply:
    return messages.VersionReply(epoch=state.epoch, version=str(run.versions.now), same_weights_as=same_weights_as)
