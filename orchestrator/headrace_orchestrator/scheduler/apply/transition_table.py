"""The transition of each event, and the two ways to apply one: ``emit`` for commands, ``apply`` for replay.

* State changes only by applying an event: a command decides and emits, and the event is applied at once.
* Replaying the same events in the same order gives the same durable state.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import InternalError
from headrace_orchestrator.scheduler.apply import attempts, batches, groups, runs
from headrace_orchestrator.scheduler.events import AnyEvent, Event, WorkerDraining
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState

TRANSITIONS: dict[type[Event], Callable[..., None]] = {
    **runs.TRANSITIONS,
    **groups.TRANSITIONS,
    **attempts.TRANSITIONS,
    **batches.TRANSITIONS,
}
"""Functions of the state, the event and the time."""


def emit(state: SchedulerState, event: AnyEvent, now: float) -> None:
    """Apply an event that a command decided on, and keep it for the shell."""
    TRANSITIONS[type(event)](state, event, now)
    if not isinstance(event, WorkerDraining):
        state.index.touched.add(event.run)
    state.undrained.append(event)


def apply(state: SchedulerState, event: AnyEvent, now: float) -> None:
    """Apply an event of the log; raises InternalError for one that does not fit because an earlier one was lost."""
    try:
        TRANSITIONS[type(event)](state, event, now)
        if not isinstance(event, WorkerDraining):
            state.index.touched.add(event.run)
    except KeyError as error:
        raise InternalError(f"{type(event).__name__} names {error}, which is unknown here.") from error
