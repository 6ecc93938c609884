"""``headrace.AsyncClient``: the same client for an event loop. Needs the extra ``async``.

* The async client has the methods of the sync one, with the same arguments.
* Without aiohttp it says what to install.
* Proxy settings of the environment are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headrace.batch.batch import Batch
from headrace.client.buffer_pool import BufferPool
from headrace.client.connection_pool import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, Origin
from headrace.client.methods import AsyncMethods
from headrace.client.operations import (
    PAGE,
    Operations,
    PullField,
    PullQuery,
    Resumed,
)
from headrace.client.prefetch import UNUSED_REASON
from headrace.client.requests import ApiRequest, ApiResponse, Operation, Sleep, TransportFailure, request_headers
from headrace.client.sync_client import address, bearer
from headrace.client.wait_reports import WaitCallback, report_wait, timeout_error
from headrace.common.arguments import sorted_names
from headrace.common.timeouts import timeout
from headrace.errors import HeadraceError, MissingExtra, RunFinished
from headrace.trajectory import Status
from headrace.wire import messages

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

log = logging.getLogger("headrace.client.sync_client")

CONNECTIONS = 8
"""Open at once at most: long polls of several runs, beside short calls."""


class AsyncClient(AsyncMethods):
    """A learner's connection to an orchestrator, for ``async`` code. Arguments are those of ``Client``.

    Made anywhere, used in one event loop: ``async with AsyncClient() as client``. Raises MissingExtra without aiohttp.
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
        self.url = address(url)
        self._flows = Operations(
            learner=learner, session=session, retry_for_s=retry_for_s, poll_s=poll_s, on_wait=on_wait
        )
        self._connections = _AsyncConnectionPool(Origin(self.url), bearer(token))
        self._keepalive = keepalive
        self._renewals: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """Stop renewing leases and close the connections."""
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
            self._renewals = None
        await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, flow: Operation[T]) -> T:
        answer: ApiResponse | TransportFailure | None = None
        try:
            while True:
                asked = flow.send(answer)
                if isinstance(asked, Sleep):
                    answer = None
                    await asyncio.sleep(asked.seconds)
                else:
                    answer = await self._connections.send(asked)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            flow.close()

    async def _renew_leases(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # then a lease is due
                async with timeout(self._flows.leases.next_due_s()):
                    await self._changed.wait()
            self._changed.clear()
            for run in self._flows.leases.due():
                try:
                    await self._run(self._flows.renew(run))
                except HeadraceError as error:
                    log.warning("The batch leases of run %r could not be renewed: %s", run, error)

    # Batches

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
        """As ``Client.pull``. Cancelled, it leaves the batch to the next pull."""
        wanted = PullQuery(
            run=run,
            groups=None if groups is None else tuple(groups),
            environments=sorted_names("environments", environments),
            tags=sorted_names("tags", tags),
            fields=tuple(fields),
            shard=shard,
            shards=shards,
        )
        return await self._pulled(wanted, timeout_s, on_wait)

    async def _pulled(self, wanted: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None) -> Batch:
        batch = await self._run(self._flows.pull(wanted, timeout_s, on_wait))
        self._held()
        return batch

    def _held(self) -> None:
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
        """As ``Client.batches``. Wrap it in ``contextlib.aclosing`` where the loop may end early."""
        wanted = PullQuery(
            run=run,
            environments=sorted_names("environments", environments),
            tags=sorted_names("tags", tags),
            fields=tuple(fields),
            shard=shard,
            shards=shards,
        )
        with contextlib.suppress(RunFinished):
            if not prefetch:
                while True:
                    yield await self._pulled(wanted, timeout_s, on_wait)
            async with contextlib.aclosing(self._ahead(wanted, timeout_s, on_wait, prefetch)) as ahead:
                async for batch in ahead:
                    yield batch

    async def _ahead(
        self, wanted: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None, prefetch: int
    ) -> AsyncGenerator[Batch]:
        await self._run(self._flows.require_room(wanted.run, prefetch))
        news = _PullStatus()
        pulls: deque[asyncio.Task[Batch]] = deque()
        try:
            while True:
                self._pull_ahead(pulls, wanted, prefetch, news)
                batch = await news.first(pulls, wanted.run, timeout_s, on_wait or self._flows.on_wait)
                self._pull_ahead(pulls, wanted, prefetch, news)
                yield batch
        finally:
            for pull in pulls:
                pull.cancel()
            for found in await asyncio.gather(*pulls, return_exceptions=True):
                if isinstance(found, Batch):
                    await self._run(self._flows.give_back(found, UNUSED_REASON))

    def _pull_ahead(
        self, pulls: deque[asyncio.Task[Batch]], wanted: PullQuery, prefetch: int, news: _PullStatus
    ) -> None:
        while len(pulls) < prefetch:
            pull = self._after(pulls[-1] if pulls else None, wanted, news)
            pulls.append(asyncio.create_task(pull, name="headrace-prefetch"))

    async def _after(self, before: asyncio.Task[Batch] | None, wanted: PullQuery, news: _PullStatus) -> Batch:
        """The next batch, once the pull before it has one: ranks name their pulls in order."""
        if before is not None:
            await asyncio.shield(before)
        return await self._pulled(wanted, None, news.note)

    async def resume(self, run: str, *, fields: Collection[PullField] = (), shard: int = 0, shards: int = 1) -> Resumed:
        """As ``Client.resume``."""
        wanted = PullQuery(run=run, fields=tuple(fields), shard=shard, shards=shards)
        resumed = await self._run(self._flows.resume(wanted))
        if resumed.batches:
            self._held()
        return resumed

    # Trajectories

    async def trajectories(
        self,
        run: str,
        *,
        status: Status | None = None,
        environment: str | None = None,
        evaluation: str | None = None,
        page: int = PAGE,
    ) -> AsyncIterator[messages.TrajectorySummary]:
        """As ``Client.trajectories``."""
        filters = {"status": status, "environment": environment, "evaluation": evaluation}
        before = ""
        while True:
            listing = await self._run(self._flows.page(run, filters, page, before))
            for summary in listing.trajectories:
                yield summary
            before = listing.next
            if not before:
                return


class _PullStatus:
    """Why the pulls ahead wait, told to the loop when it waits for them."""

    def __init__(self) -> None:
        self._reasons: list[messages.Reason] = []
        self._arrived = asyncio.Event()

    def note(self, run: str, reasons: list[messages.Reason]) -> None:
        self._reasons = reasons
        self._arrived.set()

    async def first(
        self, pulls: deque[asyncio.Task[Batch]], run: str, timeout_s: float | None, on_wait: WaitCallback | None
    ) -> Batch:
        """The batch of the first pull, which is taken out; raises what that raised, and NothingToServe in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not pulls[0].done():
            arrived = asyncio.create_task(self._arrived.wait())
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                await asyncio.wait((pulls[0], arrived), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrived.cancel()
            if pulls[0].done():
                break
            if not self._arrived.is_set():
                raise timeout_error(run, timeout_s or 0.0, self._reasons)
            self._arrived.clear()
            report_wait(on_wait, run, self._reasons)
        return pulls.popleft().result()


class _AsyncConnectionPool:
    """aiohttp's pool, opened with the first request because a session belongs to an event loop."""

    def __init__(self, origin: Origin, token: str) -> None:
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise MissingExtra(
                "AsyncClient needs aiohttp, which is not installed.", hint="Run: pip install 'headrace[async]'"
            ) from error
        self._aiohttp = aiohttp
        self._origin = origin
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self._buffers = BufferPool()

    async def send(self, request: ApiRequest) -> ApiResponse | TransportFailure:
        session = self._opened()
        for _ in range(2):  # lets the loop see, and act on, that the server has closed an idle connection
            await asyncio.sleep(0)
        timeout = self._aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=request.wait_s + READ_TIMEOUT_S
        )
        try:
            async with session.request(
                request.method,
                self._url(request),
                data=request.body or None,
                headers=request_headers(self._token, request),
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                body = await _read(response, self._buffers)
        except self._aiohttp.ClientConnectorError as error:
            return TransportFailure(detail=f"cannot connect to {self._origin.url}: {error}", sent=False)
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            return TransportFailure(detail=f"{type(error).__name__}: {error}".rstrip(": "), sent=True)
        found = {name.lower(): value for name, value in response.headers.items()}
        return ApiResponse(status=response.status, headers=found, body=body)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _url(self, request: ApiRequest) -> Any:
        from yarl import URL

        origin = self._origin
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        scheme = "https" if origin.secure else "http"
        # The target is quoted already; yarl must not do it again.
        return URL(f"{scheme}://{host}:{origin.port}{origin.prefix}{request.target}", encoded=True)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = self._aiohttp.ClientSession(
                connector=self._aiohttp.TCPConnector(limit=CONNECTIONS), trust_env=False
            )
        return self._session


async def _read(response: aiohttp.ClientResponse, buffers: BufferPool) -> memoryview:
    size = response.content_length
    if size is None:
        return memoryview(await response.read())
    buffer, at = buffers.take(size), 0
    async for chunk in response.content.iter_any():
        buffer[at : at + len(chunk)] = chunk
        at += len(chunk)
    return buffer
