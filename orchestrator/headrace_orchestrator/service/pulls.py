"""Pulls: a learner waits for a batch, and leaves with one or with the reasons why there is none.

* A pull waits until a batch is ready, its time is over, or nothing will ever come.
* Forming a batch does not hold up the event loop; what changed meanwhile is planned anew, so nothing stale is frozen.
* One batch of a run is formed at a time; who waits for its turn is answered from what is left.
* A batch is on its way while its lease is written, and ends when that is on disk: without its end it is no batch.
* A learner that left before its answer began leaves no lease behind; one that others hold too stays.
* A frozen batch that is damaged later is dissolved, and what is left of its groups is served in the same pull.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import msgspec

from headrace.errors import BatchAlreadyAcked, Conflict, CorruptRecord, SessionSuperseded
from headrace.server import logs
from headrace.wire import messages
from headrace.wire.alignment import ALIGNMENT
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.core import Form, Plan, Redeliver
from headrace_orchestrator.service.batches import BatchBodies, BodyParts, ServedBatch, build_batch, planned_groups
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.waiters import ClientDisconnected, Left

log = logs.logger(__name__)


REMEMBERED = 64
"""Leases that are known to have reached their learner: far more than pulls that can be under way for one."""


class Pulls:
    """All pulls of a running service."""

    def __init__(self, shell: Shell, bodies: BatchBodies, metrics: Metrics, epoch: int) -> None:
        self._shell = shell
        self._bodies = bodies
        self._metrics = metrics
        self._epoch = epoch
        self._waiting: Counter[str] = Counter()
        self._serving: Counter[tuple[str, int]] = Counter()
        self._served: deque[tuple[str, int]] = deque(maxlen=REMEMBERED)
        self._forming: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def waiting(self, run: str) -> bool:
        """Whether a pull of the run waits now."""
        return self._waiting[run] > 0

    async def pull(self, run: str, request: messages.PullRequest, left: Left) -> ServedBatch | messages.EmptyReply:
        """Lease a batch; waits up to ``wait_s`` until one is ready. Raises ClientDisconnected."""
        begun = self._shell.now()
        deadline = begun + request.wait_s
        answer: ServedBatch | messages.EmptyReply | None = None
        while answer is None:  # there is an end to it: each round has fewer records
            answer = await self._answer(run, request, deadline, left)
        waited_s = self._shell.now() - begun
        self._metrics.pull_wait.labels(self._metrics.run_label(run)).observe(waited_s)
        if isinstance(answer, ServedBatch):
            return answer
        for reason in answer.reasons:
            self._metrics.empty_pulls.labels(self._metrics.run_label(run), reason.code).inc()
        return msgspec.structs.replace(answer, waited_s=waited_s)

    async def _answer(
        self, run: str, request: messages.PullRequest, deadline: float, left: Left
    ) -> ServedBatch | messages.EmptyReply | None:
        """A batch, whose end comes when what it rests on is on disk; or why there is none, when that is so; None where
        the batch is damaged."""
        lease: Redeliver | None = None
        served: ServedBatch | None = None
        try:
            plan = await self._wait(run, request, deadline, left)
            if isinstance(plan, messages.EmptyReply):
                return plan
            lease = plan
            self._serving[lease.batch, lease.generation] += 1
            served = await self._serve(run, lease, request, left)
            return replace(served, body=self._ended_on_disk(served.body))
        except CorruptRecord as error:
            if lease is None:
                raise
            self._dissolve(run, lease, error)
            return None
        finally:
            if lease is not None:
                self._done_with(lease)
            self._shell.commit()
            if served is None:
                await self._shell.store.log.synced()

    async def _ended_on_disk(self, body: AsyncIterator[BodyParts]) -> AsyncIterator[BodyParts]:
        """A body on its way while what it rests on is written: whoever has not got its end has no batch."""
        held: BodyParts = ()
        async for parts in body:
            if held:
                yield held
            held = parts
        end = memoryview(held[-1])
        yield (*held[:-1], end[:-ALIGNMENT])
        await self._shell.store.log.synced()
        yield (end[-ALIGNMENT:],)

    def _done_with(self, lease: Redeliver) -> None:
        key = (lease.batch, lease.generation)
        self._serving[key] -= 1
        if not self._serving[key]:
            del self._serving[key]

    def _dissolve(self, run: str, lease: Redeliver, error: CorruptRecord) -> None:
        """Give up a frozen batch that cannot be read: the same id never stands for other bytes."""
        batch = lease.batch
        log.error("a frozen batch is damaged", run=run, batch=batch, detail=error.detail, **error.extra)
        self._metrics.damaged.inc()
        self._bodies.forget(batch)
        try:
            answering = self._serving[batch, lease.generation]
            self._shell.core.dissolve(run, batch, "damaged", self._shell.now(), answering=answering)
        except BatchAlreadyAcked:
            log.info("a damaged batch was acked while it was read", run=run, batch=batch)
        finally:
            self._shell.commit()

    async def _wait(
        self, run: str, request: messages.PullRequest, deadline: float, left: Left
    ) -> Redeliver | messages.EmptyReply:
        shell = self._shell
        while True:
            if shell.store.log.failure:
                await shell.store.log.synced()  # raises StoreError, which says what the disk says
            plan = await self._try(run, request)
            if isinstance(plan, Redeliver) or plan.finished or shell.draining or shell.now() >= deadline:
                return plan
            self._waiting[run] += 1
            try:
                await shell.bells.of_run(run).wait(deadline - shell.now(), left)
            finally:
                self._waiting[run] -= 1

    async def _try(self, run: str, request: messages.PullRequest) -> Redeliver | messages.EmptyReply:
        plan = self._ask(run, request)
        if not isinstance(plan, Form):
            return plan
        async with self._forming[run]:
            while True:
                plan = self._ask(run, request)  # another pull may have taken what was planned
                if not isinstance(plan, Form):
                    return plan
                lease = await self._form(run, plan, request)
                if lease is not None:
                    return lease

    def _ask(self, run: str, request: messages.PullRequest) -> Plan:
        shell = self._shell
        if shell.draining:
            reason = messages.Reason(
                code="draining", message="The orchestrator is stopping; pull again after its restart."
            )
            return messages.EmptyReply(epoch=self._epoch, reasons=[reason])
        plan = shell.core.pull(run, request, shell.now())
        shell.commit()
        if isinstance(plan, messages.EmptyReply):
            shell.bells.offer_work()  # a pull that waits may have let one more group in
        return plan

    async def _form(self, run: str, plan: Form, request: messages.PullRequest) -> Redeliver | None:
        """Form a planned batch; None where it has to be planned anew. There is an end to it: each round has fewer
        groups, or a version was announced meanwhile."""
        shell = self._shell
        groups = planned_groups(shell.store, run, plan)
        formed = await asyncio.to_thread(build_batch, shell.store.log, plan, groups, shell.core.spec(run))
        if planned_groups(shell.store, run, plan) != groups:
            return None  # its records were moved to another file, or its groups are over
        self._metrics.damaged.inc(formed.damaged)
        if formed.lost:
            self._evict(run, formed.lost)
            return None
        try:
            lease = shell.core.form(run, formed.plan, request, shell.now())
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
        """Retire groups of which nothing is left to serve."""
        for group in groups:
            self._shell.core.evict(run, group, self._shell.now())
        self._shell.commit()

    async def _serve(self, run: str, lease: Redeliver, request: messages.PullRequest, left: Left) -> ServedBatch:
        served = await self._bodies.serve(lease, lambda error: self._dissolve(run, lease, error))
        if left().done():
            key = (lease.batch, lease.generation)
            if lease.shards > 1 or self._serving[key] > 1 or key in self._served:
                raise ClientDisconnected  # the lease is shared: with other ranks, or with a repetition of this pull
            back = messages.NackRequest(
                learner=request.learner,
                session=request.session,
                generation=lease.generation,
                reason="the client left before its answer began",
            )
            await self._shell.do(lambda now: self._shell.core.nack(run, lease.batch, back, now))
            raise ClientDisconnected
        self._served.append((lease.batch, lease.generation))
        return served
