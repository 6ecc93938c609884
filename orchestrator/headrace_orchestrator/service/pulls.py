"""Pulls: a learner waits for a batch, and gets one or the reasons for which it has to wait.

* A pull waits until a batch is ready, its time is over, or the run has ended.
* Forming a batch does not block the event loop; an outdated plan is made anew, so nothing stale is frozen.
* One batch of a run is formed at a time; the pulls that wait for their turn get batches of the groups that are left.
* A batch is sent while its lease is written, and its end only when that is on disk: without its end it is not valid.
* A learner that disconnected before its response began leaves no lease behind; a lease that others share stays.
* A frozen batch that is found damaged is dissolved; the same pull is served the rest of its groups.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import msgspec

from headrace.errors import BatchAlreadyAcked, Conflict, CorruptRecord, EstimatorFailed, SessionSuperseded
from headrace.server import logs
from headrace.wire import messages
from headrace.wire.alignment import ALIGNMENT
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.commands import batches
from headrace_orchestrator.scheduler.commands.follow_ups import evict
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Plan, Redeliver
from headrace_orchestrator.scheduler.commands.pulls import form, pull
from headrace_orchestrator.scheduler.commands.sessions import end_wait
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service.batches.bodies import BatchBodies, BatchBody, ServedBatch
from headrace_orchestrator.service.batches.build import build_batch, planned_groups
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.waiters import ClientDisconnected, Disconnected

log = logs.logger(__name__)


REMEMBERED = 64
"""Number of leases remembered as having reached their learner: far more than one learner's pulls at a time."""


class Pulls:
    """All pulls of a running service."""

    def __init__(self, shell: Shell, bodies: BatchBodies, metrics: Metrics, epoch: int) -> None:
        self._shell = shell
        self._bodies = bodies
        self._metrics = metrics
        self._epoch = epoch
        self._serving: Counter[tuple[str, int]] = Counter()
        self._served: deque[tuple[str, int]] = deque(maxlen=REMEMBERED)
        self._forming: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def waiting(self, run: str) -> bool:
        """Tell whether a pull of the run waits now."""
        return len(self._shell.queues.for_pulls(run)) > 0

    async def pull(
        self, run: str, request: messages.PullRequest, disconnected: Disconnected
    ) -> ServedBatch | messages.EmptyReply:
        """Lease a batch; waits up to ``wait_s`` until one is ready. Raises ClientDisconnected."""
        begun = self._shell.now()
        deadline = begun + request.wait_s
        reply: ServedBatch | messages.EmptyReply | None = None
        try:
            while reply is None:  # this ends: each round has fewer records
                reply = await self._try_once(run, request, deadline, disconnected)
        except ClientDisconnected:
            end_wait(self._shell.run(run), request.learner, self._shell.now())
            raise
        waited_s = self._shell.now() - begun
        self._metrics.pull_wait.labels(self._metrics.run_label(run)).observe(waited_s)
        if isinstance(reply, ServedBatch):
            return reply
        for reason in reply.reasons:
            self._metrics.empty_pulls.labels(self._metrics.run_label(run), reason.code).inc()
        return msgspec.structs.replace(reply, waited_s=waited_s)

    async def _try_once(
        self, run: str, request: messages.PullRequest, deadline: float, disconnected: Disconnected
    ) -> ServedBatch | messages.EmptyReply | None:
        """A batch, whose end is sent when what it rests on is on disk; or an empty reply, once what it rests on is on
        disk; None where the batch turned out to be damaged."""
        lease: Redeliver | None = None
        served: ServedBatch | None = None
        try:
            plan = await self._wait(run, request, deadline, disconnected)
            if isinstance(plan, messages.EmptyReply):
                return plan
            lease = plan
            self._serving[lease.batch, lease.generation] += 1
            served = await self._serve(run, lease, request, disconnected)
            return replace(served, body=self._ended_on_disk(served.body))
        except CorruptRecord as error:
            if lease is None:
                raise
            self._dissolve(run, lease, error)
            return None
        finally:
            if lease is not None:
                self._release_lease(lease)
            self._shell.commit()
            if served is None:
                await self._shell.store.log.synced()

    async def _ended_on_disk(self, body: AsyncIterator[BatchBody]) -> AsyncIterator[BatchBody]:
        """Send a body while its events are written, and its last bytes when they are on disk: without these it is not
        valid."""
        last: BatchBody = ()
        async for parts in body:
            if last:
                yield last
            last = parts
        end = memoryview(last[-1])
        yield (*last[:-1], end[:-ALIGNMENT])
        await self._shell.store.log.synced()
        yield (end[-ALIGNMENT:],)

    def _release_lease(self, lease: Redeliver) -> None:
        key = (lease.batch, lease.generation)
        self._serving[key] -= 1
        if not self._serving[key]:
            del self._serving[key]

    def _dissolve(self, run: str, lease: Redeliver, error: CorruptRecord) -> None:
        """Dissolve a frozen batch that cannot be read: the same id never names other bytes."""
        batch = lease.batch
        log.error("a frozen batch is damaged", run=run, batch=batch, detail=error.detail, **error.extra)
        self._metrics.damaged.inc()
        self._bodies.forget(batch)
        try:
            answering = self._serving[batch, lease.generation]
            self._shell.decide(
                lambda state, now: batches.dissolve(state, state.run(run), batch, "damaged", now, answering)
            )
        except BatchAlreadyAcked:
            log.info("a damaged batch was acked while it was read", run=run, batch=batch)

    async def _wait(
        self, run: str, request: messages.PullRequest, deadline: float, disconnected: Disconnected
    ) -> Redeliver | messages.EmptyReply:
        shell = self._shell

        async def attempt() -> Redeliver | messages.EmptyReply:
            if shell.store.log.failure:
                await shell.store.log.synced()  # raises StoreError with the disk's error
            return await self._lease(run, request)

        return await shell.long_poll(
            attempt,
            complete=lambda plan: isinstance(plan, Redeliver) or plan.finished,
            queue=shell.queues.for_pulls(run),
            deadline=deadline,
            disconnected=disconnected,
        )

    async def _lease(self, run: str, request: messages.PullRequest) -> Redeliver | messages.EmptyReply:
        plan = self._plan(run, request)
        if not isinstance(plan, Form):
            return plan
        async with self._forming[run]:
            while True:
                plan = self._plan(run, request)  # another pull may have taken the planned groups
                if not isinstance(plan, Form):
                    return plan
                lease = await self._form(run, plan, request)
                if lease is not None:
                    return lease

    def _plan(self, run: str, request: messages.PullRequest) -> Plan:
        shell = self._shell
        if shell.draining:
            reason = messages.Reason(
                code="draining", message="The orchestrator is stopping; pull again after its restart."
            )
            return messages.EmptyReply(epoch=self._epoch, reasons=[reason])
        plan = shell.decide(lambda state, now: pull(state, state.run(run), request, now))
        if isinstance(plan, messages.EmptyReply):
            shell.queues.offer_work()  # a pull that waits may have admitted one more group
        return plan

    async def _form(self, run: str, plan: Form, request: messages.PullRequest) -> Redeliver | None:
        """Form a planned batch; None where it has to be planned anew. That ends: each round has fewer groups, or a
        version was announced meanwhile."""
        shell = self._shell
        groups = planned_groups(shell.store, run, plan)
        try:
            formed = await asyncio.to_thread(build_batch, shell.store.log, plan, groups, shell.run(run).spec)
        except EstimatorFailed as error:
            shell.run(run).estimator_failure = str(error)
            raise
        shell.run(run).estimator_failure = ""
        if planned_groups(shell.store, run, plan) != groups:
            return None  # its records were moved to another file, or its groups have retired
        self._metrics.damaged.inc(formed.damaged)
        if formed.lost:
            self._evict(run, formed.lost)
            return None
        try:
            now = shell.now()
            state = shell.core.state_at(now)
            lease = form(state, state.run(run), formed.plan, request, now)
        except Conflict as error:
            if isinstance(error, SessionSuperseded):
                raise
            log.info("a batch is planned anew", run=run, detail=error.detail)
            return None
        shell.commit(formed=formed)
        self._bodies.keep(lease.batch, formed.body)
        self._metrics.staleness.labels(self._metrics.run_label(run)).observe(formed.staleness)
        log.info("batch formed", run=run, batch=lease.batch, trajectories=formed.trajectories)
        return lease

    def _evict(self, run: str, groups: Sequence[str]) -> None:
        """Retire groups whose stored records are all lost."""

        def evict_all(state: SchedulerState, now: float) -> None:
            for group in groups:
                evict(state, state.run(run), group, now)

        self._shell.decide(evict_all)

    async def _serve(
        self, run: str, lease: Redeliver, request: messages.PullRequest, disconnected: Disconnected
    ) -> ServedBatch:
        served = await self._bodies.serve(lease, lambda error: self._dissolve(run, lease, error))
        if disconnected().done():
            key = (lease.batch, lease.generation)
            if lease.shards > 1 or self._serving[key] > 1 or key in self._served:
                raise ClientDisconnected  # the lease is shared: with other ranks, or with a repetition of this pull
            back = messages.NackRequest(
                learner=request.learner,
                session=request.session,
                generation=lease.generation,
                reason="the client left before its answer began",
            )
            await self._shell.execute(lambda state, now: batches.nack(state, state.run(run), lease.batch, back, now))
            raise ClientDisconnected
        self._served.append((lease.batch, lease.generation))
        return served
