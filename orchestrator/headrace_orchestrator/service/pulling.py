"""Pulls: a learner waits for a batch, and leaves with one or with the reasons why there is none.

* A pull waits until a batch is ready, its time is over, or nothing will ever come.
* A batch is planned, read, computed and frozen without giving the event loop away in between.
* A learner that left before its answer began leaves no lease behind.
* A frozen batch that is damaged later is dissolved, and what is left of its groups is served in the same pull.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from headrace import wire
from headrace.errors import BatchAlreadyAcked, CorruptRecord
from headrace_orchestrator import logs
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.scheduler.core import Form, Redeliver
from headrace_orchestrator.service.serving import Bodies, Served, compose
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.waiting import ClientGone, Left, granted_wait

log = logs.logger(__name__)


class Pulls:
    """All pulls of a running service."""

    def __init__(self, shell: Shell, bodies: Bodies, metrics: Metrics, epoch: int) -> None:
        self._shell = shell
        self._bodies = bodies
        self._metrics = metrics
        self._epoch = epoch
        self._waiting: Counter[str] = Counter()

    def waiting(self, run: str) -> bool:
        """Whether a pull of the run waits now."""
        return self._waiting[run] > 0

    async def pull(self, run: str, request: wire.PullRequest, left: Left) -> Served | wire.EmptyReply:
        """Lease a batch; waits up to ``wait_s`` until one is ready. Raises ClientGone if nobody waits any more."""
        begun = self._shell.now()
        deadline = begun + granted_wait(request.wait_s)
        while True:
            plan = await self._planned(run, request, deadline, left)
            if isinstance(plan, wire.EmptyReply):
                break
            self._metrics.pull_wait.labels(self._metrics.run_label(run)).observe(self._shell.now() - begun)
            try:
                return await self._serve(run, plan, request, left)
            except CorruptRecord as error:
                self._dissolve(run, plan.batch, error)  # there is an end to it: each round has fewer records
        waited_s = self._shell.now() - begun
        self._metrics.pull_wait.labels(self._metrics.run_label(run)).observe(waited_s)
        for reason in plan.reasons:
            self._metrics.empty_pulls.labels(self._metrics.run_label(run), reason.code).inc()
        return msgspec.structs.replace(plan, waited_s=waited_s)

    async def _planned(
        self, run: str, request: wire.PullRequest, deadline: float, left: Left
    ) -> Redeliver | wire.EmptyReply:
        """A lease, or why there is none, when what it rests on is on disk."""
        try:
            return await self._wait(run, request, deadline, left)
        finally:
            self._shell.commit()
            await self._shell.store.log.synced()

    def _dissolve(self, run: str, batch: str, error: CorruptRecord) -> None:
        """Give up a frozen batch that cannot be read: the same id never stands for other bytes."""
        log.error("a frozen batch is damaged", run=run, batch=batch, detail=error.detail, **error.extra)
        self._metrics.damaged.inc()
        self._bodies.forget(batch)
        try:
            self._shell.core.dissolve(run, batch, "damaged", self._shell.now())
        except BatchAlreadyAcked:
            log.info("a damaged batch was acked while it was read", run=run, batch=batch)
        finally:
            self._shell.commit()

    async def _wait(
        self, run: str, request: wire.PullRequest, deadline: float, left: Left
    ) -> Redeliver | wire.EmptyReply:
        shell = self._shell
        while True:
            if shell.store.log.failure:
                await shell.store.log.synced()  # raises StoreError, which says what the disk says
            plan = self._try(run, request)
            if isinstance(plan, Redeliver) or plan.finished or shell.draining or shell.now() >= deadline:
                return plan
            self._waiting[run] += 1
            try:
                await shell.bells.of_run(run).wait(deadline - shell.now(), left)
            finally:
                self._waiting[run] -= 1

    def _try(self, run: str, request: wire.PullRequest) -> Redeliver | wire.EmptyReply:
        shell = self._shell
        if shell.draining:
            reason = wire.Reason(code="draining", message="The orchestrator is stopping; pull again after its restart.")
            return wire.EmptyReply(epoch=self._epoch, reasons=[reason])
        plan = shell.core.pull(run, request, shell.now())
        if isinstance(plan, Form):
            return self._form(run, plan, request)
        shell.commit()
        if isinstance(plan, wire.EmptyReply):
            shell.bells.offer_work()  # a pull that waits may have let one more group in
        return plan

    def _form(self, run: str, plan: Form, request: wire.PullRequest) -> Redeliver | wire.EmptyReply:
        shell = self._shell
        formed = compose(shell.store, plan, shell.core.spec(run), shell.core.version(run))
        self._metrics.damaged.inc(formed.damaged)
        if formed.lost:
            for group in formed.lost:
                shell.core.evict(run, group, shell.now())
            shell.commit()
            return self._try(run, request)  # there is an end to it: each round has fewer groups
        lease = shell.core.form(run, formed.plan, request, shell.now())
        shell.commit(formed=formed)
        self._bodies.keep(lease.batch, (formed.head, *formed.records))
        self._metrics.staleness.labels(self._metrics.run_label(run)).observe(formed.staleness)
        log.info("batch formed", run=run, batch=lease.batch, trajectories=len(formed.records))
        return lease

    async def _serve(self, run: str, lease: Redeliver, request: wire.PullRequest, left: Left) -> Served:
        served = await self._bodies.serve(lease, lambda error: self._dissolve(run, lease.batch, error))
        if left().done():
            back = wire.NackRequest(
                learner=request.learner,
                session=request.session,
                generation=lease.generation,
                reason="the client left before its answer began",
            )
            await self._shell.do(lambda now: self._shell.core.nack(run, lease.batch, back, now))
            raise ClientGone
        return served
