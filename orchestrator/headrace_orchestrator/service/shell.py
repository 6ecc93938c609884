"""The shell around the scheduler core, which carries out all commands.

* A command is decided and its events are appended in one turn of the event loop.
* No response ends before everything that it rests on is on disk; neither does an error.
* A timer for the scheduler's next deadline lets time pass, except while the disk refuses writes.
* The state in memory never gets ahead of the log: a decision that cannot be stored stops the service until a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import Any, TypeVar

from headrace.common.ids import new_id
from headrace.errors import InternalError, StoreError
from headrace.server import logs
from headrace.wire import codec
from headrace_orchestrator.buffer.projection.entries import ProjectedTrajectory
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import (
    AnyEvent,
    AttemptEnded,
    BatchAcked,
    BatchFormed,
    BatchReleased,
    EpisodeEnded,
    RunClosed,
    RunCreated,
    ServerAdded,
    ServerDrained,
    ServerRemoved,
    SessionStarted,
    TaskQuarantined,
    VersionAnnounced,
)
from headrace_orchestrator.scheduler.state.batches import NACKED
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service.batches.build import BuiltBatch
from headrace_orchestrator.service.storage.frames import BatchWrite, TrajectoryWrite, Write
from headrace_orchestrator.service.storage.record_events import event_of, record_for_event
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.service.waiters import Disconnected, WaitQueue, WaitQueues

T = TypeVar("T")

Command = Callable[[SchedulerState, float], T]
"""A command of the scheduler with all but its last arguments bound: the state, and the time in seconds."""

log = logs.logger(__name__)

HEADRACE_VERSION = installed_version("headrace")


class Shell:
    """Scheduler, store, metrics and wait queues of a running service. ``clock`` gives monotonic seconds."""

    def __init__(self, core: Scheduler, store: Store, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.core = core
        self.store = store
        self.queues = WaitQueues()
        self.draining = False
        #: Called with events when they are appended.
        self.listeners: list[Callable[[Sequence[AnyEvent]], None]] = []
        self._metrics = metrics
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def now(self) -> float:
        """Monotonic seconds of the scheduler's clock."""
        return self._clock()

    def run(self, name: str) -> Run:
        """The run of that name, to be read only; raises UnknownRun."""
        return self.core.state.run(name)

    def decide(self, command: Command[T]) -> T:
        """Carry out a command of the scheduler and append its events. They are not on disk yet."""
        now = self._clock()
        try:
            return command(self.core.state_at(now), now)
        finally:
            self.commit()

    async def execute(self, command: Command[T]) -> T:
        """Carry out a command of the scheduler; returns, or raises, when what it rests on is on disk."""
        now = self._clock()
        try:
            return command(self.core.state_at(now), now)
        finally:
            self.commit()
            await self.store.log.synced()

    async def long_poll(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        complete: Callable[[T], bool],
        queue: WaitQueue,
        deadline: float,
        disconnected: Disconnected,
    ) -> T:
        """Repeat an attempt after each wake-up of the queue, until its result is complete, the deadline has passed or
        the service drains; returns the last result. Raises ClientDisconnected."""
        while True:
            result = await attempt()
            remaining_s = deadline - self._clock()
            if complete(result) or self.draining or remaining_s <= 0:
                return result
            await queue.wait(remaining_s, disconnected)

    def commit(self, accepted: Mapping[str, TrajectoryWrite] | None = None, formed: BuiltBatch | None = None) -> None:
        """Append the events since the last commit. ``accepted``: the records of submissions by episode; ``formed``: the
        batch that was frozen."""
        try:
            events, before = self.core.drain(), self.store.log.size_bytes
            self.store.append([self._stored_form(event, accepted or {}, formed) for event in events])
            self.core.bounds.disk_bytes += self.store.log.size_bytes - before
            self.store.rotate_if_due(self.core)
            for event in events:
                if (log_event := _LOG_EVENT.get(type(event))) is not None:
                    log_event(event)
            self._metrics.count_events(events)
            self.queues.notify(events)
            for listener in self.listeners:
                listener(events)
            self.set_timer()
        except StoreError:
            raise
        except Exception as error:
            raise self._stop(error) from error

    def _stored_form(
        self, event: AnyEvent, accepted: Mapping[str, TrajectoryWrite], formed: BuiltBatch | None
    ) -> Write:
        """The event with the record or the batch that is stored along with it."""
        if isinstance(event, BatchFormed):
            if formed is None:
                raise InternalError(f"Batch {event.batch} was formed without its head.")
            return BatchWrite(event, formed.head, formed.plan.groups)
        if not isinstance(event, EpisodeEnded):
            return event
        if event.by_worker:
            return accepted[event.episode]
        trajectory = record_for_event(event, new_id=new_id, headrace_version=HEADRACE_VERSION)
        record = codec.encode(trajectory)
        outcome = event_of(trajectory, len(record))
        return TrajectoryWrite(ProjectedTrajectory(outcome, trajectory.stop_reason, trajectory.provenance, ()), record)

    def _stop(self, error: Exception) -> InternalError:
        """Stop deciding and storing: a restart goes back to the state in the log."""
        log.exception("a decision could not be stored; the orchestrator ends")
        problem = f"a decision could not be stored ({type(error).__name__}: {error}), so memory and log differ"
        self.store.log.stop(problem)
        self.stop_timer()
        return InternalError(f"The orchestrator stopped: {problem}.", hint="Ask again when it has been started anew.")

    # Time -----------------------------------------------------------------------------------------------------

    def set_timer(self) -> None:
        """Schedule ``tick`` for the scheduler's next deadline. A timer that is too early does no harm.

        While the disk refuses, no time passes: no holder of a lease could renew it."""
        if self.store.log.failure:
            return
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        self.stop_timer()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self.now()), self._tick)

    def stop_timer(self) -> None:
        """Stop the scheduler's time until ``set_timer``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        try:
            self.core.tick(self.now())
            self.commit()
        except StoreError as error:
            log.error("time does not pass until the store works", problem=error.detail)
        except Exception as error:  # noqa: BLE001 - nothing awaits a timer: it is logged whole, and the service stops
            if not self.store.log.failure:
                self._stop(error)
        self.queues.wake_all()


def _log_episode_ended(event: EpisodeEnded) -> None:
    if event.failure is not None and event.status == "failed":
        log.warning(
            "episode failed",
            run=event.run,
            episode=event.episode,
            attempt=event.attempt,
            layer=event.failure.layer,
            kind=event.failure.kind,
            message=event.failure.message,
        )


def _log_batch_released(event: BatchReleased) -> None:
    if event.reason.startswith(NACKED):
        reason = event.reason.removeprefix(NACKED)
        log.info("batch given back", run=event.run, batch=event.batch, reason=reason)


def _log_version_announced(event: VersionAnnounced) -> None:
    if event.fork is not None:
        log.info("rewound", run=event.run, version=str(event.version))


_LOG_EVENT: dict[type, Callable[[Any], None]] = {
    RunCreated: lambda event: log.info("run created", run=event.run),
    RunClosed: lambda event: log.info("run closed", run=event.run),
    EpisodeEnded: _log_episode_ended,
    AttemptEnded: lambda event: log.info(
        "attempt requeued", run=event.run, episode=event.episode, attempt=event.attempt, reason=event.reason
    ),
    TaskQuarantined: lambda event: log.warning(
        "task quarantined", run=event.run, environment=event.task.environment, history=event.history
    ),
    SessionStarted: lambda event: log.info("session started", run=event.run, learner=event.learner),
    BatchAcked: lambda event: log.info(
        "batch acked", run=event.run, batch=event.batch, version=str(event.version or "")
    ),
    BatchReleased: _log_batch_released,
    VersionAnnounced: _log_version_announced,
    ServerAdded: lambda event: log.info("policy server added", run=event.run, address=event.address),
    ServerDrained: lambda event: log.info("policy server drains", run=event.run, address=event.address),
    ServerRemoved: lambda event: log.info("policy server removed", run=event.run, address=event.address),
}
"""Functions that write an event to the program's log, by type: the lines that operators read. The log of the
data directory has all events."""
