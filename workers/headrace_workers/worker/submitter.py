"""Hands finished episodes to the orchestrator.

* One submission is on its way at a time, with all that has queued meanwhile; records may wait for others.
* While the orchestrator is away nothing is lost: the same records are sent again until they are answered.
* A refused record is logged, and a failed record goes in its place: the episode still ends in exactly one.
* A body that is refused whole is sent again record by record, so that one bad record costs only itself.
* A record that is too large for a proxy in between is kept, and sent again behind the others.
* A record that the orchestrator fails at again and again is replaced as well, so that it does not block the others.
* Images go ahead of the records that refer to them, those only that are not there; what the orchestrator has let go
  meanwhile is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from headrace.assets import AssetData
from headrace.errors import Forbidden, HeadraceError, InternalError, RequestError, Unauthorized, from_problem
from headrace.wire import messages
from headrace_workers.worker.backoff import Backoff
from headrace_workers.worker.logs import logger
from headrace_workers.worker.spool import Spool, SpoolEntry

MAX_RECORDS = 1024
"""Records of one submission: some 50 ms of the orchestrator's time."""

MAX_BYTES = 32 << 20
"""Bytes of one submission, images included: far below what the orchestrator takes, and sent in a fraction of a
second."""

SHORTEST_GATHER_S = 0.02
"""Less is not waited for: episodes of less than half a second end in crowds anyway."""

PARALLEL_UPLOADS = 8
"""Images that are sent side by side: the orchestrator brings them to disk together."""


MAX_INTERNAL_ERRORS = 3
"""So often a record alone may meet an internal error of the orchestrator. One may be a passing fault of it; three in a
row with growing pauses are a record that it cannot take, and all records behind it wait."""


class SubmissionConnection(Protocol):
    """What the submitter needs of the connection."""

    async def submit(self, entries: list[tuple[messages.AttemptKey, bytes]]) -> list[messages.SubmitResult]:
        """One result for each record, in their order."""
        ...

    async def missing_assets(self, names: list[str]) -> list[str]:
        """Of these assets those that are to be sent."""
        ...

    async def send_asset(self, asset: AssetData) -> None:
        """Returns when it is on the orchestrator's disk."""
        ...


class Submitter:
    """Empties the spool. ``substitute`` makes the failed record that replaces a refused one; ``gather_s`` gives how
    long a record may wait for others, in seconds."""

    def __init__(
        self,
        connection: SubmissionConnection,
        spool: Spool,
        substitute: Callable[[SpoolEntry, HeadraceError], SpoolEntry],
        gather_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._gather_s = gather_s
        self._connection = connection
        self._spool = spool
        self._substitute = substitute
        self._single_sends_left = 0
        """Records that are still to be sent one by one, after a body of so many was turned down whole."""
        self._internal_errors = 0
        """Internal errors in a row that the oldest record has met alone."""

    async def submit_forever(self) -> None:
        """Run until cancelled."""
        backoff = Backoff()
        while True:
            await self._spool.filled.wait()
            gather_s = self._gather_s()
            if gather_s > SHORTEST_GATHER_S:
                await asyncio.sleep(gather_s)
            batch = self._spool.oldest(1 if self._single_sends_left else MAX_RECORDS, MAX_BYTES)
            try:
                await self._send_assets(batch)
                results = await self._connection.submit([(entry.key, entry.record) for entry in batch])
            except (Unauthorized, Forbidden) as error:
                await backoff.pause(error)
            except RequestError as error:
                if not error.extra.get("proxy"):
                    self._handle_refused_body(batch, error)
                    continue
                self._handle_too_large(batch)
                await backoff.pause(error)
            except InternalError as error:
                self._handle_internal_error(batch, error)
                await backoff.pause(error)
            except HeadraceError as error:
                await backoff.pause(error)
            else:
                backoff.reset()
                self._next_single()
                for entry, result in zip(batch, results, strict=True):
                    self._handle_result(entry, result)
                for result in islice((result for result in results if result.verdict == "assets-missing"), 1):
                    await backoff.pause(from_problem(result.problem or {}))

    async def _send_assets(self, batch: Sequence[SpoolEntry]) -> None:
        """See that all is there that these records refer to."""
        assets = {name: asset for entry in batch for name, asset in entry.assets.items()}
        names = list(assets)
        for start in range(0, len(names), messages.MAX_ASSET_NAMES):
            missing = await self._connection.missing_assets(names[start : start + messages.MAX_ASSET_NAMES])
            for first in range(0, len(missing), PARALLEL_UPLOADS):
                sending = (
                    self._connection.send_asset(assets[name]) for name in missing[first : first + PARALLEL_UPLOADS]
                )
                for error in await asyncio.gather(*sending, return_exceptions=True):
                    if error is not None:
                        raise error

    def _handle_refused_body(self, batch: list[SpoolEntry], error: HeadraceError) -> None:
        """A body was refused whole: send its records one by one, and replace the one that is refused alone."""
        if len(batch) > 1:
            self._single_sends_left = len(batch)
            return
        self._replace_refused(batch[0], error)
        self._next_single()

    def _handle_too_large(self, batch: list[SpoolEntry]) -> None:
        """A proxy takes no body of that size: send less at a time, and what is too large alone behind the others."""
        if len(batch) > 1:
            self._single_sends_left = len(batch)
            return
        self._spool.postpone(batch[0].name)
        self._next_single()

    def _handle_internal_error(self, batch: list[SpoolEntry], error: InternalError) -> None:
        """The orchestrator met a defect of its own. Which record it was shows only where it was alone."""
        self._internal_errors += len(batch) == 1
        if len(batch) > 1 or self._internal_errors >= MAX_INTERNAL_ERRORS:
            self._internal_errors = 0
            self._handle_refused_body(batch, error)

    def _next_single(self) -> None:
        self._internal_errors = 0
        self._single_sends_left = max(0, self._single_sends_left - 1)

    def _handle_result(self, entry: SpoolEntry, result: messages.SubmitResult) -> None:
        if result.verdict == "refused":
            self._replace_refused(entry, from_problem(result.problem or {}))
            return
        if result.verdict == "assets-missing":
            return  # it stays, and its images go with it again
        if result.verdict not in ("accepted", "duplicate"):
            logger(entry.assignment).info("submission answered", verdict=result.verdict)
        self._spool.remove(entry.name)

    def _replace_refused(self, entry: SpoolEntry, error: HeadraceError) -> None:
        log = logger(entry.assignment)
        if entry.is_substitute:
            # Without a readable answer to this one the orchestrator's lease ends it; there is nothing left to send.
            log.error("a failed record was refused as well; the attempt is given up", error=str(error))
            self._spool.remove(entry.name)
            return
        log.error("a record was refused; a failed record goes in its place", error=str(error))
        self._spool.add(self._substitute(entry, error))
