"""The shell around the scheduler core: the one way in which a command is carried out.

* A command is decided and appended without giving the event loop away in between.
* No answer ends before everything that it rests on is on disk, errors included.
* Time passes by a timer that is set for the core's next deadline; while the disk refuses, it does not pass.
* Memory never goes on without the log: a decision that cannot be stored stops the service until a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import TypeVar

from headrace.common.ids import new_id
from headrace.errors import InternalError, StoreError
from headrace.server import logs
from headrace.wire import codec
from headrace_orchestrator.buffer.projection.entries import TrajectoryEntry
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import (
    AnyEvent,
    AttemptEnded,
    BatchFormed,
    EpisodeEnded,
    TaskQuarantined,
)
from headrace_orchestrator.service.batches import BuiltBatch
from headrace_orchestrator.service.storage.record_events import event_of, record_for_event
from headrace_orchestrator.service.storage.store import BatchWrite, Store, StoreWrite, TrajectoryWrite
from headrace_orchestrator.service.waiters import Bells

T = TypeVar("T")

log = logs.logger(__name__)

HEADRACE_VERSION = installed_version("headrace")


class Shell:
    """Core, store, metrics and bells of a running service. ``clock`` gives monotonic seconds."""

    def __init__(self, core: Scheduler, store: Store, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.core = core
        self.store = store
        self.bells = Bells()
        self.draining = False
        #: Told of events when they are appended.
        self.listeners: list[Callable[[Sequence[AnyEvent]], None]] = []
        self._metrics = metrics
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def now(self) -> float:
        """Monotonic seconds, as the core counts them."""
        return self._clock()

    async def do(self, command: Callable[[float], T]) -> T:
        """Carry out a command of the core; returns, or raises, when what it rests on is on disk."""
        try:
            return command(self.now())
        finally:
            self.commit()
            await self.store.log.synced()

    def commit(self, accepted: Mapping[str, TrajectoryWrite] | None = None, formed: BuiltBatch | None = None) -> None:
        """Append what the core has decided since the last time. ``accepted`` are the records of submissions by
        episode, ``formed`` the batch that was frozen."""
        try:
            events, before = self.core.drain(), self.store.log.size_bytes
            self.store.put([self._decided(event, accepted or {}, formed) for event in events])
            self.core.bounds.disk_bytes += self.store.log.size_bytes - before
            self.store.keep_state(self.core)
            for event in events:
                _log(event)
            self._metrics.observe(events)
            self.bells.tell(events)
            for listener in self.listeners:
                listener(events)
            self.set_timer()
        except StoreError:
            raise
        except Exception as error:
            raise self._stop(error) from error

    def _decided(
        self, event: AnyEvent, accepted: Mapping[str, TrajectoryWrite], formed: BuiltBatch | None
    ) -> StoreWrite:
        """What is stored of an event."""
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
        return TrajectoryWrite(TrajectoryEntry(outcome, trajectory.stop_reason, trajectory.provenance, ()), record)

    def _stop(self, error: Exception) -> InternalError:
        """Nothing more is decided or stored: a restart goes back to what the log says."""
        log.exception("a decision could not be stored; restart the orchestrator")
        problem = f"a decision could not be stored ({type(error).__name__}: {error}), so memory and log differ"
        self.store.log.stop(problem)
        self.stop_timer()
        return InternalError(f"The orchestrator stopped: {problem}.", hint="Restart it, then ask again.")

    # Time -----------------------------------------------------------------------------------------------------

    def set_timer(self) -> None:
        """See that ``tick`` runs at the core's next deadline. A timer that is early only looks once too often.

        While the disk refuses, time stands still: who holds a lease cannot renew it."""
        if self.store.log.failure:
            return
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        self.stop_timer()
        self._timer_at = deadline
        self._timer = asyncio.get_running_loop().call_later(max(0.0, deadline - self.now()), self._tick)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        try:
            self.core.tick(self.now())
            self.commit()
        except StoreError as error:
            log.error("time does not pass any more; restart the orchestrator", problem=error.detail)
        except Exception as error:  # noqa: BLE001 - nobody waits for a timer: it is logged whole, and the service stops
            if not self.store.log.failure:
                self._stop(error)
        self.bells.ring_all()


def _log(event: AnyEvent) -> None:
    """Say what people want to read; the rest is in the log of the data directory."""
    match event:
        case EpisodeEnded() if event.failure is not None and event.status == "failed":
            log.warning(
                "episode failed",
                run=event.run,
                episode=event.episode,
                attempt=event.attempt,
                layer=event.failure.layer,
                kind=event.failure.kind,
                message=event.failure.message,
            )
        case AttemptEnded():
            log.info(
                "attempt requeued", run=event.run, episode=event.episode, attempt=event.attempt, reason=event.reason
            )
        case TaskQuarantined():
            log.warning("task quarantined", run=event.run, environment=event.task.environment, history=event.history)
        case _:
            pass
