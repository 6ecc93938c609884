"""Groups that a learner submits: awaited by id, bounded by bytes, served or ended with a reason.

* The bytes held, reserved and requested must fit the byte bound together, before any group of a request is admitted.
* One request admits a limited number of episodes.
* A group of a quarantined task ends at once, with the reason; the others of its request are admitted.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from headrace.errors import Conflict, GroupExists, InvalidRequest
from headrace.runspec import TaskSpec, field_problems
from headrace.trajectory import Task
from headrace.wire import messages
from headrace_orchestrator.scheduler.commands import follow_ups
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

MAX_GROUP_SIZE = 4096
"""Maximum of ``RunSpec.group_size``."""

MAX_REQUEST_EPISODES = 16_384
"""Maximum number of episodes that one request admits: more would block other requests for too long."""


def parse_task(value: dict[str, Any], name: str) -> Task:
    """A task as submitted, under its own id or else ``name``; raises InvalidRequest."""
    try:
        spec = TaskSpec.model_validate(value)
    except ValidationError as error:
        problems = "; ".join(f"{item['field']}: {item['problem']}" for item in field_problems(error))
        hint = "A task names its environment and seed."
        raise InvalidRequest(f"The task is invalid: {problems}.", hint=hint) from error
    return Task(
        environment=spec.environment,
        seed=spec.seed,
        kwargs=spec.kwargs,
        example=spec.example,
        id=spec.id or name,
        tags=spec.tags,
    )


def submit(state: SchedulerState, run: Run, groups: list[messages.GroupRequest], now: float) -> list[str]:
    """Admit submitted groups, all or none; returns their ids."""
    submitted: dict[str, tuple[Task, int]] = {}
    for group in groups:
        id = group.id or state.new_id()
        size = run.spec.group_size if group.size is None else group.size
        if not 1 <= size <= MAX_GROUP_SIZE:
            raise InvalidRequest(f"A group has 1 to {MAX_GROUP_SIZE} episodes; group {id} has {size}.")
        if id in submitted or id in run.groups or id in run.submitted_ends:
            raise GroupExists(f"Run {run.name} has a group {id!r} already.", hint="Give each group an id of its own.")
        submitted[id] = (parse_task(group.task, id), size)
    episodes = sum(size for _, size in submitted.values())
    if episodes > MAX_REQUEST_EPISODES:
        raise InvalidRequest(
            f"One request admits at most {MAX_REQUEST_EPISODES} episodes; this one has {episodes}.",
            hint="Submit the groups in several requests.",
        )
    if run.closed:
        raise Conflict(f"Run {run.name} was closed.")
    _require_room(run, episodes)
    for id, (task, size) in submitted.items():
        follow_ups.admit_group(state, run, id, task, size, now, submitted=True)
        if run.is_quarantined(task):
            follow_ups.retire(state, run.groups[id], "quarantined", now)
    return list(submitted)


def _require_room(run: Run, episodes: int) -> None:
    """Raise Conflict if the estimated bytes of the episodes do not fit the byte bounds."""
    ledger = run.ledger
    new = episodes * ledger.estimate
    if ledger.held_bytes + ledger.reserved_bytes + new > run.spec.max_bytes:
        raise Conflict(
            f"Groups in flight hold {ledger.held_bytes} bytes and {ledger.reserved_bytes} more are reserved; these "
            f"{episodes} episodes are estimated at {new}. The bound is {run.spec.max_bytes}.",
            hint="Ack batches first, or give the run a larger max_bytes.",
        )
    if not ledger.bounds.fit(new):
        raise Conflict(
            f"These {episodes} episodes are estimated at {new} bytes, and the bounds of the service leave no room.",
            hint="Ack batches first, or start the service with larger bounds; an empty pull names the full bound.",
        )
