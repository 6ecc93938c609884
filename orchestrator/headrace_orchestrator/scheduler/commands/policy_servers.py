"""The policy servers of a run, and the weights that they load.

* Servers that were added, drained or removed are known after a restart.
* A run that names no servers in its spec gets none: its workers use those that they were started with.
* A version with weights is loaded by the service; one without was loaded by the learner.
* Versions that were overtaken before a server had them are skipped, and listed as skipped.
* Repeating an announcement changes nothing, and served weights are not replaced under their version.
* The rest of an evaluation is cancelled once its version is not served any more.

The current condition of the servers is unknown here; the service sets it as ``reasons``.
"""

from __future__ import annotations

from headrace.errors import Conflict, InvalidRequest, UnknownServer, VersionConflict
from headrace.trajectory import Version
from headrace.wire import policy_server
from headrace.wire.messages import PolicyServerRequest, Weights
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

MAX_SERVERS = 4096
"""Maximum number of policy servers of a run: one reply lists the states of all."""


def _address(text: str) -> str:
    """The normal form of an address; raises InvalidRequest for an invalid one."""
    try:
        return policy_server.canonical_address(text)
    except ValueError as error:
        raise InvalidRequest(f"{error}.") from error


def add_server(state: SchedulerState, run: Run, request: PolicyServerRequest, now: float) -> None:
    """Add a server, or end the drain of one."""
    address = _address(request.address)
    if run.closed:
        raise Conflict(f"Run {run.name} was closed.")
    if not run.spec.policy.endpoints:
        raise Conflict(
            f"Run {run.name} has no policy.endpoints in its spec: each worker uses the server that it was started "
            "with, and would not use this one.",
            hint="Name servers in policy.endpoints of a new run, or start workers with --policy-endpoint.",
        )
    if len(run.policy_servers.servers) >= MAX_SERVERS and address not in run.policy_servers.servers:
        raise InvalidRequest(f"Run {run.name} has {MAX_SERVERS} policy servers, and no more can be added.")
    if run.policy_servers.servers.get(address) is not False:
        emit(state, events.ServerAdded(run=run.name, address=address), now)


def drain_server(state: SchedulerState, run: Run, request: PolicyServerRequest, now: float) -> None:
    """Let a server finish its requests, and give it no new ones."""
    address = _known_address(run, request.address)
    if not run.policy_servers.servers[address]:
        emit(state, events.ServerDrained(run=run.name, address=address), now)


def remove_server(state: SchedulerState, run: Run, request: PolicyServerRequest, now: float) -> None:
    """Remove a server."""
    emit(state, events.ServerRemoved(run=run.name, address=_known_address(run, request.address)), now)


def _known_address(run: Run, address: str) -> str:
    address = _address(address)
    if address not in run.policy_servers.servers:
        raise UnknownServer(
            f"Run {run.name} has no policy server {address}.", hint=f"`headrace servers {run.name}` lists them."
        )
    return address


def require_weights_fit(run: Run, version: Version, weights: Weights | None) -> None:
    """Raise VersionConflict for other weights of the version that is served; InvalidRequest for weights of a kind that
    the run does not train."""
    servers, adapter = run.policy_servers, run.spec.policy.adapter
    if weights is not None and (weights.kind == "adapter") != (adapter is not None):
        raise InvalidRequest(
            f"Run {run.name} trains "
            + ("the base" if adapter is None else f"adapter {adapter!r}")
            + f"; the weights of version {version} are of kind {weights.kind!r}.",
            hint="Name the adapter in policy.adapter of the run spec."
            if adapter is None
            else "Announce the folder of the adapter, with kind = 'adapter'.",
        )
    is_held = version == servers.held == servers.target
    if weights is not None and is_held and not weights.same_place(servers.weights):
        raise VersionConflict(
            f"The policy servers of run {run.name} hold version {version} from {servers.loaded.path!r} already."
            if servers.loaded is not None
            else f"The policy servers of run {run.name} hold version {version} already.",
            hint="Announce other weights as the next version.",
        )


def weights_served(state: SchedulerState, run: Run, version: Version, weights: Weights, now: float) -> None:
    """Record that the first server takes requests with a version."""
    if run.policy_servers.held != version:
        emit(state, events.WeightsLoaded(run=run.name, version=version, weights=weights), now)
        _cancel_unservable(state, run, now)


def _cancel_unservable(state: SchedulerState, run: Run, now: float) -> None:
    for evaluation in list(run.active_evaluations.values()):
        if run.policy_servers.is_replaced(evaluation.version):
            for group in run.evaluation_groups(evaluation):
                if group.state == "open":
                    follow_ups.retire(state, group, events.REPLACED, now)
    follow_ups.settle(state, run, now)
