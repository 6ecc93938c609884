"""Priorities of groups in a prioritized draw, as a learner sets them.

* A priority holds until it is set again; a group starts with 1.
* Groups that are over are named in the reply; the others are set anyway.
* A priority that cannot be a weight is refused, and so are priorities that no draw would use.
"""

from __future__ import annotations

from headrace.errors import Conflict, InvalidRequest
from headrace.selection import SELECTION_RULES
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import emit
from headrace_orchestrator.scheduler.state.eligible.draw_weights import MAX_PRIORITY, MIN_PRIORITY
from headrace_orchestrator.scheduler.state.groups import Group
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

MAX_REQUEST_GROUPS = 16_384
"""Maximum number of groups of one request, to keep its event small."""


def set_priorities(
    state: SchedulerState, run: Run, request: messages.PrioritiesRequest, now: float
) -> messages.PrioritiesReply:
    """Set the priorities of groups in flight; raises Conflict or InvalidRequest."""
    order = run.spec.selection.order
    if SELECTION_RULES.find(order).weight is None:
        raise Conflict(
            f"Run {run.name} selects groups {order}: priorities would have no effect.",
            hint="Create the run with selection = {'order': 'prioritized'}.",
        )
    if len(request.priorities) > MAX_REQUEST_GROUPS:
        raise InvalidRequest(
            f"One request sets at most {MAX_REQUEST_GROUPS} priorities; this one sets {len(request.priorities)}.",
            hint="Set them in several requests.",
        )
    for id, priority in request.priorities.items():
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"The priority of group {id} is {priority}; priorities must be between {MIN_PRIORITY:g} and "
                f"{MAX_PRIORITY:g}.",
                hint="Only ratios matter: scale them. To exclude a group from draws, use a filter.",
            )
    in_flight = {id: priority for id, priority in request.priorities.items() if _is_in_flight(run.groups.get(id))}
    if in_flight:
        emit(state, events.PrioritiesSet(run=run.name, priorities=in_flight), now)
    over = [id for id in request.priorities if id not in in_flight]
    return messages.PrioritiesReply(epoch=state.epoch, set=len(in_flight), over=over)


def _is_in_flight(group: Group | None) -> bool:
    return group is not None and group.state != "retired" and group.evaluation is None
