"""``headrace.AsyncClient``: the client for asynchronous code. Needs ``headrace[async]``.

* The async client has the methods of the sync one, with the same arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from types import TracebackType
from typing import Self, TypeVar

from headrace.batch.batch import Batch
from headrace.client.async_connection_pool import AsyncConnectionPool
from headrace.client.connection_pool import Origin
from headrace.client.leases import HEARTBEAT_S
from headrace.client.methods import AsyncMethods
from headrace.client.operations import PAGE, Operations, PullField, PullQuery, Resumed, pull_query
from headrace.client.prefetch import UNUSED_REASON
from headrace.client.requests import ApiResponse, FileWork, Operation, Sleep, TransportFailure
from headrace.client.sync_client import bearer_token, service_url
from headrace.client.wait_reports import WaitCallback, report_wait, timeout_error
from headrace.common.timeouts import timeout
from headrace.errors import HeadraceError, RunFinished
from headrace.trajectory import Status
from headrace.wire import messages

T = TypeVar("T")

log = logging.getLogger("headrace.client.sync_client")


class AsyncClient(AsyncMethods):
    """A learner's connection to an orchestrator, for ``async`` code. Arguments are those of ``Client``.

    It may be created anywhere, and is used in one event loop: ``async with AsyncClient() as client``. Raises
    MissingExtra without aiohttp.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        learner: str = "learner",
        session: str = "",
        retry_for_s: float = 60.0,
        poll_s: float = 20.0,
        keepalive: bool = True,
        on_wait: WaitCallback | None = None,
    ) -> None:
        self.url = service_url(url)
        self._operations = Operations(
            learner=learner,
            session=session,
            retry_for_s=retry_for_s,
            poll_s=poll_s,
            on_wait=on_wait,
            heartbeat_s=HEARTBEAT_S if keepalive else 0.0,
        )
        self._connections = AsyncConnectionPool(Origin(self.url), bearer_token(token))
        self._keepalive = keepalive
        self._renewals: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Stop renewing leases, tell the service that this learner is gone, and close the connections."""
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
            self._renewals = None
        await self._run(self._operations.say_goodbye())
        await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, operation: Operation[T]) -> T:
        response: ApiResponse | TransportFailure | None = None
        try:
            while True:
                step = operation.send(response)
                if isinstance(step, Sleep):
                    response = None
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, FileWork):
                    response = None
                    await asyncio.to_thread(step.call)
                else:
                    response = await self._connections.send(step)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            operation.close()

    async def _renew_leases(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # a lease is due
                async with timeout(self._operations.leases.next_due_s()):
                    await self._changed.wait()
            self._changed.clear()
            for run in self._operations.leases.due():
                try:
                    await self._run(self._operations.renew(run))
                except HeadraceError as error:
                    log.warning("The batch leases of run %r could not be renewed: %s", run, error)

    async def pull(
        self,
        run: str,
        *,
        timeout_s: float | None = None,
        groups: Sequence[str] | None = None,
        environments: Collection[str] = (),
        tags: Collection[str] = (),
        on_wait: WaitCallback | None = None,
        fields: Collection[PullField] = (),
        shard: int = 0,
        shards: int = 1,
    ) -> Batch:
        """Like ``Client.pull``. If it is cancelled, the next pull gets the batch."""
        query = pull_query(run, environments, tags, fields, shard, shards, groups)
        return await self._pull(query, timeout_s, on_wait)

    async def _pull(self, query: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None) -> Batch:
        pulling = self._operations.pull(query, timeout_s, on_wait)
        self._start_renewals()
        batch = await self._run(pulling)
        self._start_renewals()
        return batch

    def _start_renewals(self) -> None:
        if self._keepalive:
            if self._renewals is None:
                self._renewals = asyncio.create_task(self._renew_leases(), name="headrace-keepalive")
            self._changed.set()

    async def batches(
        self,
        run: str,
        *,
        timeout_s: float | None = None,
        on_wait: WaitCallback | None = None,
        environments: Collection[str] = (),
        tags: Collection[str] = (),
        fields: Collection[PullField] = (),
        shard: int = 0,
        shards: int = 1,
        prefetch: int = 0,
    ) -> AsyncIterator[Batch]:
        """Like ``Client.batches``. Wrap it in ``contextlib.aclosing`` if the loop may end early."""
        query = pull_query(run, environments, tags, fields, shard, shards)
        with contextlib.suppress(RunFinished):
            if not prefetch:
                while True:
                    yield await self._pull(query, timeout_s, on_wait)
            async with contextlib.aclosing(self._prefetched(query, timeout_s, on_wait, prefetch)) as batches:
                async for batch in batches:
                    yield batch

    async def _prefetched(
        self, query: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None, prefetch: int
    ) -> AsyncGenerator[Batch]:
        await self._run(self._operations.require_room(query.run, prefetch))
        status = _PullStatus()
        pulls: deque[asyncio.Task[Batch]] = deque()
        try:
            while True:
                self._start_pulls(pulls, query, prefetch, status)
                batch = await status.first(pulls, query.run, timeout_s, on_wait or self._operations.on_wait)
                self._start_pulls(pulls, query, prefetch, status)
                yield batch
        finally:
            for pull in pulls:
                pull.cancel()
            for result in await asyncio.gather(*pulls, return_exceptions=True):
                if isinstance(result, Batch):
                    await self._run(self._operations.give_back(result, UNUSED_REASON))

    def _start_pulls(
        self, pulls: deque[asyncio.Task[Batch]], query: PullQuery, prefetch: int, status: _PullStatus
    ) -> None:
        while len(pulls) < prefetch:
            pull = self._pull_after(pulls[-1] if pulls else None, query, status)
            pulls.append(asyncio.create_task(pull, name="headrace-prefetch"))

    async def _pull_after(self, before: asyncio.Task[Batch] | None, query: PullQuery, status: _PullStatus) -> Batch:
        """The next batch, pulled after the pull before it has succeeded, so that ranks name their pulls in order."""
        if before is not None:
            await asyncio.shield(before)
        return await self._pull(query, None, status.set_reasons)

    async def resume(self, run: str, *, fields: Collection[PullField] = (), shard: int = 0, shards: int = 1) -> Resumed:
        """Like ``Client.resume``."""
        query = PullQuery(run=run, fields=tuple(fields), shard=shard, shards=shards)
        resumed = await self._run(self._operations.resume(query))
        if resumed.batches:
            self._start_renewals()
        return resumed

    async def trajectories(
        self,
        run: str,
        *,
        status: Status | None = None,
        environment: str | None = None,
        evaluation: str | None = None,
        page: int = PAGE,
    ) -> AsyncIterator[messages.TrajectorySummary]:
        """Like ``Client.trajectories``."""
        filters = {"status": status, "environment": environment, "evaluation": evaluation}
        before = ""
        while True:
            listing = await self._run(self._operations.page(run, filters, page, before))
            for summary in listing.trajectories:
                yield summary
            before = listing.next
            if not before:
                return


class _PullStatus:
    """The reasons why prefetching pulls wait, reported when the training loop waits for them."""

    def __init__(self) -> None:
        self._reasons: list[messages.Reason] = []
        self._arrived = asyncio.Event()

    def set_reasons(self, run: str, reasons: list[messages.Reason]) -> None:
        self._reasons = reasons
        self._arrived.set()

    async def first(
        self, pulls: deque[asyncio.Task[Batch]], run: str, timeout_s: float | None, on_wait: WaitCallback | None
    ) -> Batch:
        """Take the batch of the first pull. Raises that pull's error, or NothingToServe at the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not pulls[0].done():
            arrived = asyncio.create_task(self._arrived.wait())
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                await asyncio.wait((pulls[0], arrived), timeout=remaining_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrived.cancel()
            if pulls[0].done():
                break
            if not self._arrived.is_set():
                raise timeout_error(run, timeout_s or 0.0, self._reasons)
            self._arrived.clear()
            report_wait(on_wait, run, self._reasons)
        return pulls.popleft().result()
