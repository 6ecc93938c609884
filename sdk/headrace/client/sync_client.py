"""``headrace.Client``: the client with which a training loop pulls batches and announces versions.

* Several threads may share a client.
* While batches are held, their leases are renewed.
* Address and token come from the environment unless they are given.

It needs only the base dependencies.

::

    with headrace.Client() as client:
        client.create_run({"name": "guess", "environments": [{"id": "game:GuessTheNumber-v0-hard"}]}, exist_ok=True)
        for batch in client.batches("guess"):
            step = train(batch)
            client.ack(batch, version=step)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar
from weakref import WeakSet

from headrace.batch.batch import Batch
from headrace.client.connection_pool import ConnectionPool, Origin
from headrace.client.lease_renewal import LeaseRenewer
from headrace.client.leases import HEARTBEAT_S
from headrace.client.methods import BlockingMethods
from headrace.client.operations import PAGE, Operations, PullField, PullQuery, Resumed, pull_query
from headrace.client.prefetch import UNUSED_REASON, Prefetcher
from headrace.client.requests import Operation, run_operation
from headrace.client.wait_reports import WaitCallback
from headrace.errors import InvalidRequest, RunFinished, SetupError
from headrace.trajectory import Status
from headrace.wire import messages

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8470"
"""Default address of an orchestrator on this machine."""


def service_url(url: str | None) -> str:
    """The address to use: the argument, else ``HEADRACE_URL``, else ``DEFAULT_URL``."""
    if url is not None and not isinstance(url, str):
        raise InvalidRequest(f"The address of the service is {url!r}.", hint="Pass a text, such as 'http://host:8470'.")
    return url or os.environ.get("HEADRACE_URL") or DEFAULT_URL


def bearer_token(token: str | None) -> str:
    """The token to use: the argument, else ``HEADRACE_TOKEN``, else none.

    A line end after it, as in a file or a secret of Kubernetes, is removed. Raises SetupError for other control
    characters.
    """
    text = (token if token is not None else os.environ.get("HEADRACE_TOKEN", "")).strip()
    if not text.isprintable():
        raise SetupError(
            "The bearer token holds a line end or another control character.", hint="Check HEADRACE_TOKEN."
        )
    if not text.isascii():
        raise SetupError("The bearer token holds characters other than ASCII.", hint="Check HEADRACE_TOKEN.")
    return text


class Client(BlockingMethods):
    """A learner's connection to an orchestrator. All durations are in seconds.

    ``learner`` is a name that survives a restart of the learner: a new process of the same name takes over the
    batches that the old one held. ``session`` names one start of it, by default this process; all ranks of a
    data-parallel learner give the same name, and a new one at each start. ``retry_for_s``: duration of an outage after
    which ``Unavailable`` is raised. ``poll_s``: wait of one long poll. ``keepalive``: in the background, renew the
    leases of held batches, and report every ten seconds that the learner is there. ``on_wait(run, reasons)`` is called
    while a pull waits; by default the reasons are logged.

    Every method raises the ``HeadraceError`` in the service's response, or ``Unavailable``.
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
        self._connections = ConnectionPool(Origin(self.url), bearer_token(token))
        self._keepalive = LeaseRenewer(self._operations, self._connections) if keepalive else None
        self._prefetchers: WeakSet[Prefetcher] = WeakSet()

    def close(self) -> None:
        """Give back unused prefetched batches, stop renewing leases, tell the service that this learner is gone, and
        close the connections.

        Batches still held are served again when their leases expire.
        """
        for prefetcher in list(self._prefetchers):
            prefetcher.close()
        if self._keepalive is not None:
            self._keepalive.close()
        self._run(self._operations.say_goodbye())
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, operation: Operation[T]) -> T:
        return run_operation(operation, self._connections.send, time.sleep)

    def pull(
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
        """The next batch; waits for it, across restarts of the orchestrator.

        ``timeout_s`` None waits without a limit. ``groups`` waits for submitted groups by id. ``environments`` and
        ``tags`` restrict the batch to groups of one of these environments with all of these tags.
        ``fields=["assets"]`` also fetches the images and large arrays that its trajectories refer to, for
        ``batch.asset``. ``shard`` of ``shards`` is this rank's part: the k-th pull of every rank returns its part of
        the same batch; all ranks share a ``session``.

        Raises RunFinished if no batch will follow, GroupEnded if an awaited group will not be served,
        NothingToServe with ``extra["reasons"]`` at the timeout, Unavailable after an outage, BatchSuperseded if the
        batch of the other ranks is already over.
        """
        query = pull_query(run, environments, tags, fields, shard, shards, groups)
        return self._run(self._pull(query, timeout_s, on_wait))

    def _pull(self, query: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None) -> Operation[Batch]:
        pulling = self._operations.pull(query, timeout_s, on_wait)
        if self._keepalive is not None:
            self._keepalive.wake()
        batch = yield from pulling
        if self._keepalive is not None:
            self._keepalive.wake()
        return batch

    def batches(
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
    ) -> Iterator[Batch]:
        """Batches until the run is finished. Ack each one, or give it back, before taking the next, unless the run's
        staleness leaves room to hold several.

        ``prefetch`` batches are fetched ahead while the loop trains, so that the loop need not wait for them; unused
        ones are given back when the loop ends. Raises InvalidRequest if the run's staleness does not allow it.
        """
        query = pull_query(run, environments, tags, fields, shard, shards)
        with contextlib.suppress(RunFinished):
            if not prefetch:
                while True:
                    yield self._run(self._pull(query, timeout_s, on_wait))
            yield from self._prefetched(query, timeout_s, on_wait, prefetch)

    def _prefetched(
        self, query: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None, prefetch: int
    ) -> Iterator[Batch]:
        self._run(self._operations.require_room(query.run, prefetch))
        prefetcher = self._start_prefetcher(query, prefetch)
        try:
            while True:
                yield prefetcher.take(timeout_s, on_wait or self._operations.on_wait)
        finally:
            prefetcher.close()

    def _start_prefetcher(self, query: PullQuery, depth: int) -> Prefetcher:
        """Start prefetching, until the prefetcher or the client is closed."""
        prefetcher = Prefetcher(
            query.run,
            lambda on_wait: self._pull(query, None, on_wait),
            lambda batch: self._run(self._operations.give_back(batch, UNUSED_REASON)),
            self._connections,
            depth,
        )
        self._prefetchers.add(prefetcher)
        return prefetcher

    def resume(self, run: str, *, fields: Collection[PullField] = (), shard: int = 0, shards: int = 1) -> Resumed:
        """The batches that earlier processes of this learner leased and never acked.

        Those that are still fresh enough are served again, with the same bytes; the others are named with the reason
        why they are lost. Call it once, before the first pull. With ``shards`` every rank calls it and gets its part
        of each batch.
        """
        query = PullQuery(run=run, fields=tuple(fields), shard=shard, shards=shards)
        resumed = self._run(self._operations.resume(query))
        if self._keepalive is not None and resumed.batches:
            self._keepalive.wake()
        return resumed

    def trajectories(
        self,
        run: str,
        *,
        status: Status | None = None,
        environment: str | None = None,
        evaluation: str | None = None,
        page: int = PAGE,
    ) -> Iterator[messages.TrajectorySummary]:
        """Stored trajectories of a run, newest first, fetched in pages of ``page``."""
        filters = {"status": status, "environment": environment, "evaluation": evaluation}
        before = ""
        while True:
            listing = self._run(self._operations.page(run, filters, page, before))
            yield from listing.trajectories
            before = listing.next
            if not before:
                return
