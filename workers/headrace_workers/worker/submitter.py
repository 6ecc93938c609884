"""Submission of finished attempts to the orchestrator.

* One submission is in flight at a time, with all records queued meanwhile; records may wait to be batched.
* An outage of the orchestrator loses nothing: the same records are sent again until they are answered.
* A refused record is logged and replaced by a failed record, so the attempt still ends in exactly one record.
* A body that is refused as a whole is sent again record by record, so one bad record does not affect the others.
* A record that is too large for a proxy is kept, and sent again behind the others.
* A record that repeatedly causes an internal error of the orchestrator is replaced too, so it does not block others.
* Missing images are sent before the records that refer to them; images that the orchestrator has dropped meanwhile are
  sent again.
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
"""Most records in one submission: they take about 50 ms of the orchestrator's time."""

MAX_BYTES = 32 << 20
"""Most bytes in one submission, including images: far below the orchestrator's limit, and sent in a fraction of a
second."""

SHORTEST_GATHER_S = 0.02
"""Shortest gathering time. Episodes of less than half a second end close together anyway."""

PARALLEL_UPLOADS = 8
"""Images sent in parallel: the orchestrator writes them to disk together."""

MAX_INTERNAL_ERRORS = 3
"""Internal errors of the orchestrator after which a record sent alone is replaced. One may be temporary; three in a
row, with growing pauses, mean that it cannot process the record, which blocks all records behind it."""


class SubmissionConnection(Protocol):
    """The part of the connection that the submitter uses."""

    async def submit(self, entries: list[tuple[messages.AttemptKey, bytes]]) -> list[messages.SubmitResult]:
        """Submit records; returns one result for each, in order."""
        ...

    async def missing_assets(self, names: list[str]) -> list[str]:
        """Return the assets among ``names`` that must be sent."""
        ...

    async def send_asset(self, asset: AssetData) -> None:
        """Send an asset, and return when the orchestrator has stored it."""
        ...


class Submitter:
    """Submits the entries of the spool. ``substitute`` makes the failed record that replaces a refused one;
    ``gather_s`` returns how long a record may wait for others, in seconds."""

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
        """Records still to be sent one by one, after a body with that many was refused."""
        self._internal_errors = 0
        """Consecutive internal errors caused by the oldest record alone."""

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
        """Send the assets of these records that the orchestrator does not have."""
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
        """Handle a refused body: send its records one by one, and replace a record that is refused alone."""
        if len(batch) > 1:
            self._single_sends_left = len(batch)
            return
        self._replace_refused(batch[0], error)
        self._next_single()

    def _handle_too_large(self, batch: list[SpoolEntry]) -> None:
        """Handle a body too large for a proxy: send less at a time, and postpone a record that is too large alone."""
        if len(batch) > 1:
            self._single_sends_left = len(batch)
            return
        self._spool.postpone(batch[0].name)
        self._next_single()

    def _handle_internal_error(self, batch: list[SpoolEntry], error: InternalError) -> None:
        """Handle an internal error of the orchestrator. Only a record sent alone is known to have caused it."""
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
            return  # the record stays in the spool; its images are sent again
        if result.verdict not in ("accepted", "duplicate"):
            logger(entry.assignment).info("submission answered", verdict=result.verdict)
        self._spool.remove(entry.name)

    def _replace_refused(self, entry: SpoolEntry, error: HeadraceError) -> None:
        log = logger(entry.assignment)
        if entry.is_substitute:
            # Nothing is left to send; the orchestrator ends the attempt when its lease expires.
            log.error("a substitute record was refused too; the attempt is abandoned", error=str(error))
            self._spool.remove(entry.name)
            return
        log.error("a record was refused and is replaced by a failed record", error=str(error))
        self._spool.add(self._substitute(entry, error))
