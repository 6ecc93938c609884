"""Priorities of groups in a prioritized draw, as a learner sets them.

* A priority holds until it is set anew; a group starts with 1.
* Groups that are over meanwhile are named in the answer; the others are set all the same.
* A priority that cannot be a weight is refused, and so are priorities where no draw would use them.
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
"""Most groups of one request, which keeps its event small."""


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
                f"The priority of group {id} is {priority}; priorities lie between {MIN_PRIORITY:g} and "
                f"{MAX_PRIORITY:g}.",
                hint="Only ratios matter: scale them. Leave a group that is never to be drawn out with a filter.",
            )
    found = {id: priority for id, priority in request.priorities.items() if _in_flight(run.groups.get(id))}
    if found:
        emit(state, events.PrioritiesSet(run=run.name, priorities=found), now)
    over = [id for id in request.priorities if id not in found]
    return messages.PrioritiesReply(epoch=state.epoch, set=len(found), over=over)


def _in_flight(group: Group | None) -> bool:
    return group is not None and group.state != "retired" and group.evaluation is None
