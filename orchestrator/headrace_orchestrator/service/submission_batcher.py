"""Batching of submissions: those that arrive within a few turns of the event loop are judged together.

* Submissions that are judged together share one lookup, one append and one wait for the disk; each gets its own
  results.
* No turn of the event loop judges many more than ``MAX_TOGETHER`` records.
* A callback that raises costs the other submissions nothing.
* A failure of the store is the result of every submission that was judged together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from headrace.errors import StoreError
from headrace.server import logs
from headrace.wire.messages import SubmitResult
from headrace_orchestrator.buffer.assets.store import AssetStore
from headrace_orchestrator.service.callbacks import StoredCallback
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.submission_records import SubmissionJudge, SubmittedRecord

log = logs.logger(__name__)

MAX_TOGETHER = 32
"""Records that are judged in one turn of the event loop: some three milliseconds. The next ones are judged while the
log's writer stores these; if all that arrive from 64 connections were judged at once, loop and writer would wait for
each other."""

MORE_TURNS = 3
"""Turns of the event loop in which other submissions may join the first one. Sockets are read in each of them: the more
records share a commit and a sync, the less each costs. Many more turns would leave the disk without work. An idle event
loop takes them in microseconds."""


class _PendingSubmission(NamedTuple):
    records: Sequence[SubmittedRecord]
    on_stored: StoredCallback[list[SubmitResult]]


class SubmissionBatcher:
    """All submissions of a running service that are not judged yet."""

    def __init__(self, shell: Shell, assets: AssetStore) -> None:
        self._shell = shell
        self._assets = assets
        self._pending: deque[_PendingSubmission] = deque()
        self._replies: set[asyncio.Task[None]] = set()

    def add(self, records: Sequence[SubmittedRecord], on_stored: StoredCallback[list[SubmitResult]]) -> None:
        """Queue records to be judged. ``on_stored`` gets one result each, in their order, or StoreError."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._judge_after, MORE_TURNS)
        self._pending.append(_PendingSubmission(records, on_stored))

    def _judge_after(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._judge_after, turns - 1)
        else:
            self._judge_batch()

    def _judge_batch(self) -> None:
        loop = asyncio.get_running_loop()
        batch = self._next_batch()
        try:
            results = self._judge(batch)
        except Exception as error:  # noqa: BLE001 - it is the result of each of them
            reply = self._reply(batch, [], error)
        else:
            reply = self._reply(batch, results)
        task = loop.create_task(reply)
        self._replies.add(task)
        task.add_done_callback(self._replies.discard)
        if self._pending:
            loop.call_soon(self._judge_batch)  # after the callback that wakes the log: the disk begins with this batch

    async def _reply(
        self, batch: Sequence[_PendingSubmission], results: Sequence[SubmitResult], error: Exception | None = None
    ) -> None:
        """Call each submission's callback with its results, or all with the error, once everything that the results
        rest on is on disk."""
        try:
            await self._shell.store.log.synced()
        except StoreError as refused:
            error = refused
        remaining = iter(results if error is None else ())
        for submission in batch:
            own = list(islice(remaining, len(submission.records)))
            try:
                submission.on_stored(error or own)
            except Exception:
                log.exception("the callback of a submission failed")

    def _next_batch(self) -> list[_PendingSubmission]:
        """The oldest submissions, up to ``MAX_TOGETHER`` records, but one submission at least."""
        batch = [self._pending.popleft()]
        count = len(batch[0].records)
        while self._pending and count + len(self._pending[0].records) <= MAX_TOGETHER:
            batch.append(self._pending.popleft())
            count += len(batch[-1].records)
        return batch

    def _judge(self, batch: Sequence[_PendingSubmission]) -> list[SubmitResult]:
        shell = self._shell
        records = [record for submission in batch for record in submission.records]
        now = shell.now()
        judge = SubmissionJudge(shell.core.state_at(now), shell.store, self._assets, now)
        try:
            return judge.judge(records)
        finally:
            shell.commit(judge.accepted)
