"""Submissions: from a worker's body to its reply.

* A submission is answered when what its results rest on is on disk.
* A submission needs no task of its own, unless a record was rejected: the reason has to be looked up.
* A repeated submission gets the first result, however long ago it was.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from headrace.wire import messages
from headrace_orchestrator.buffer.assets.store import AssetStore
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.service.callbacks import StoredCallback
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.submission_batcher import SubmissionBatcher
from headrace_orchestrator.service.submission_records import (
    STALE_VERDICTS,
    SubmittedRecord,
    explained_result,
    parse_submission,
)


class Submissions:
    """All submissions of a running service."""

    def __init__(self, shell: Shell, assets: AssetStore, metrics: Metrics, epoch: int) -> None:
        self._store = shell.store
        self._batcher = SubmissionBatcher(shell, assets)
        self._metrics = metrics
        self._epoch = epoch
        self._explanations: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Wait until every submission with a rejected record is answered."""
        await asyncio.gather(*self._explanations, return_exceptions=True)

    async def submit(self, worker: str, body: bytes) -> messages.SubmitReply:
        """Judge a worker's records; returns when the accepted ones are on disk. Raises InvalidRequest, StoreError."""
        replied: asyncio.Future[messages.SubmitReply] = asyncio.get_running_loop().create_future()
        self.submit_nowait(worker, body, functools.partial(_settle, replied))
        return await replied

    def submit_nowait(self, worker: str, body: bytes, on_stored: StoredCallback[messages.SubmitReply]) -> None:
        """Do what ``submit`` does without a task: ``on_stored`` gets the reply, or StoreError. Raises
        InvalidRequest."""
        records = parse_submission(worker, body)
        self._batcher.add(records, functools.partial(self._reply, worker, records, on_stored))

    def _reply(
        self,
        worker: str,
        records: Sequence[SubmittedRecord],
        on_stored: StoredCallback[messages.SubmitReply],
        results: list[messages.SubmitResult] | Exception,
    ) -> None:
        if isinstance(results, Exception):
            on_stored(results)
        elif any(result.verdict in STALE_VERDICTS for result in results):
            task = asyncio.create_task(self._explain(worker, records, on_stored, results))
            self._explanations.add(task)
            task.add_done_callback(self._explanations.discard)
        else:
            on_stored(self._reply_with(results))

    async def _explain(
        self,
        worker: str,
        records: Sequence[SubmittedRecord],
        on_stored: StoredCallback[messages.SubmitReply],
        results: list[messages.SubmitResult],
    ) -> None:
        """Reply with the reasons why records were rejected."""
        try:
            for number, (record, result) in enumerate(zip(records, results, strict=True)):
                if result.verdict == "superseded" and await self._was_accepted(record.head, worker):
                    results[number] = messages.SubmitResult(episode=result.episode, verdict="duplicate")
                elif result.verdict in STALE_VERDICTS:
                    results[number] = explained_result(record.head, result, worker)
        except Exception as error:  # noqa: BLE001 - the callback raises it where the reply is awaited
            on_stored(error)
        else:
            on_stored(self._reply_with(results))

    async def _was_accepted(self, head: messages.SubmissionHead, worker: str) -> bool:
        """Tell whether the stored record of the episode is of this very attempt. The scheduler forgets an episode once
        its group is complete."""
        await self._store.project()
        found = await asyncio.to_thread(self._store.projection.find_episode, head.episode)
        return found is not None and (found.attempt, found.worker) == (head.attempt, worker)

    def _reply_with(self, results: list[messages.SubmitResult]) -> messages.SubmitReply:
        self._metrics.count_submissions(results)
        return messages.SubmitReply(epoch=self._epoch, results=results)


def _settle(replied: asyncio.Future[messages.SubmitReply], result: messages.SubmitReply | Exception) -> None:
    if replied.done():
        return  # the caller was cancelled
    if isinstance(result, Exception):
        replied.set_exception(result)
    else:
        replied.set_result(result)
