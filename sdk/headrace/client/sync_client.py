"""``headrace.Client``: what a training loop uses to get batches and to report versions.

* Several threads may share a client.
* While batches are held, their leases are renewed.
* Address and token come from the environment unless they are given.

It needs nothing beyond the base dependencies.

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
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar
from weakref import WeakSet

from headrace.batch.batch import Batch
from headrace.client.connection_pool import ConnectionPool, Origin
from headrace.client.lease_renewal import LeaseRenewer, run_operation
from headrace.client.methods import BlockingMethods
from headrace.client.operations import (
    PAGE,
    Operations,
    PullField,
    PullQuery,
    Resumed,
)
from headrace.client.prefetch import UNUSED_REASON, Prefetcher
from headrace.client.requests import Operation
from headrace.client.wait_reports import WaitCallback
from headrace.common.arguments import sorted_names
from headrace.errors import RunFinished, SetupError
from headrace.trajectory import Status
from headrace.wire import messages

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8470"
"""Where an orchestrator on this machine listens unless told otherwise."""


def address(url: str | None) -> str:
    """The address to use: the argument, ``HEADRACE_URL``, or this machine's default port."""
    return url or os.environ.get("HEADRACE_URL") or DEFAULT_URL


def bearer(token: str | None) -> str:
    """The token to use: the argument, ``HEADRACE_TOKEN``, or none; without the line end that a file or a secret of
    Kubernetes gives it. Raises SetupError for what no header can carry."""
    found = (token if token is not None else os.environ.get("HEADRACE_TOKEN", "")).strip()
    if not found.isprintable():
        raise SetupError(
            "The bearer token holds a line end or another control character.", hint="Check HEADRACE_TOKEN."
        )
    return found


class Client(BlockingMethods):
    """A learner's connection to an orchestrator. All durations are in seconds.

    ``learner`` is a name that survives a restart of the learner: a new process of the same name takes over the
    batches that the old one held. ``session`` sorted_names one start of it, by default this process; all ranks of a
    data-parallel learner give the same, and a new one at each start. ``retry_for_s``: how long one outage is borne
    before ``Unavailable`` is raised. ``poll_s``: wait of one long poll. ``keepalive``: renew leases in the background
    while batches are held. ``on_wait(run, reasons)`` is called while a pull waits; by default the reasons are logged.

    Every method raises the ``HeadraceError`` that the service answered, or ``Unavailable``.
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
        self._connections = ConnectionPool(Origin(self.url), bearer(token))
        self._keepalive = LeaseRenewer(self._flows, self._connections) if keepalive else None
        self._prefetching: WeakSet[Prefetcher] = WeakSet()

    def close(self) -> None:
        """Give back what was prefetched and not used, stop renewing leases and close the connections. Batches still
        held come back when their leases end."""
        for ahead in list(self._prefetching):
            ahead.close()
        if self._keepalive is not None:
            self._keepalive.close()
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, flow: Operation[T]) -> T:
        return run_operation(flow, self._connections)

    # Batches

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

        ``timeout_s`` None waits without end. ``groups`` awaits submitted groups by id. ``environments`` and ``tags``
        ask for groups of one of these environments that carry all of these tags. ``fields=["assets"]`` brings the
        images and large arrays that its trajectories refer to, for ``batch.asset``. ``shard`` of ``shards`` is this
        rank's part: the k-th pull of every rank gets its part of the same batch; all ranks share a ``session``. Raises
        RunFinished when no batch will come, NothingToServe with ``extra["reasons"]`` at the timeout, Unavailable after
        an outage, BatchSuperseded where the batch of the other ranks is over already.
        """
        wanted = PullQuery(
            run=run,
            groups=None if groups is None else tuple(groups),
            environments=sorted_names("environments", environments),
            tags=sorted_names("tags", tags),
            fields=tuple(fields),
            shard=shard,
            shards=shards,
        )
        return self._run(self._pulled(wanted, timeout_s, on_wait))

    def _pulled(self, wanted: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None) -> Operation[Batch]:
        batch = yield from self._flows.pull(wanted, timeout_s, on_wait)
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
        """Batches until the run is finished. Each is to be acked (or given back) before the next is asked for, unless
        the run's staleness leaves room to hold several.

        ``prefetch`` fetches so many ahead while the loop trains, so that a batch that is there costs it nothing; what
        is not used is given back when the loop ends. Raises InvalidRequest where the run's staleness does not allow it.
        """
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
                    yield self._run(self._pulled(wanted, timeout_s, on_wait))
            yield from self._ahead(wanted, timeout_s, on_wait, prefetch)

    def _ahead(
        self, wanted: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None, prefetch: int
    ) -> Iterator[Batch]:
        self._run(self._flows.require_room(wanted.run, prefetch))
        ahead = self._prefetch(wanted, prefetch)
        try:
            while True:
                yield ahead.take(timeout_s, on_wait or self._flows.on_wait)
        finally:
            ahead.close()

    def _prefetch(self, wanted: PullQuery, ahead: int) -> Prefetcher:
        """Pull ahead, until it is closed or the client is."""
        begun = Prefetcher(
            wanted.run,
            lambda note: self._pulled(wanted, None, note),
            lambda batch: self._run(self._flows.give_back(batch, UNUSED_REASON)),
            self._connections,
            ahead,
        )
        self._prefetching.add(begun)
        return begun

    def resume(self, run: str, *, fields: Collection[PullField] = (), shard: int = 0, shards: int = 1) -> Resumed:
        """What a learner that was started again left: the batches that it leased and never acked and that are still
        within bound, the same bytes; and the names of the others, with why they are lost. Ask once, before the first
        pull. With ``shards`` every rank asks, and gets its part of each."""
        wanted = PullQuery(run=run, fields=tuple(fields), shard=shard, shards=shards)
        resumed = self._run(self._flows.resume(wanted))
        if self._keepalive is not None and resumed.batches:
            self._keepalive.wake()
        return resumed

    # Trajectories

    def trajectories(
        self,
        run: str,
        *,
        status: Status | None = None,
        environment: str | None = None,
        evaluation: str | None = None,
        page: int = PAGE,
    ) -> Iterator[messages.TrajectorySummary]:
        """Stored trajectories of a run, newest first. Fetched in pages of ``page``."""
        filters = {"status": status, "environment": environment, "evaluation": evaluation}
        before = ""
        while True:
            listing = self._run(self._flows.page(run, filters, page, before))
            yield from listing.trajectories
            before = listing.next
            if not before:
                return
