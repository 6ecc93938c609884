"""Submissions: from a worker's body to the reply that it gets.

* A submission is answered when what its results rest on is on disk.
* It costs no task of its own, but where a record is not wanted: why, is looked up.
* A repeated submission gets the first result, however long ago it was.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from headrace.wire import messages
from headrace_orchestrator.buffer.assets import Assets
from headrace_orchestrator.metrics import Metrics
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.submission_batcher import Gate
from headrace_orchestrator.service.submission_records import UNWANTED, Submitted, parse_submission, unwanted

Told = Callable[[messages.SubmitReply | Exception], None]


class Submissions:
    """All submissions of a running service."""

    def __init__(self, shell: Shell, assets: Assets, metrics: Metrics, epoch: int) -> None:
        self._store = shell.store
        self._gate = Gate(shell, assets)
        self._metrics = metrics
        self._epoch = epoch
        self._explaining: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Returns when everybody was told who is being told why a record is not wanted."""
        await asyncio.gather(*self._explaining, return_exceptions=True)

    async def submit(self, worker: str, body: bytes) -> messages.SubmitReply:
        """Judge a worker's records; returns when the accepted ones are on disk. Raises InvalidRequest, StoreError."""
        replied: asyncio.Future[messages.SubmitReply] = asyncio.get_running_loop().create_future()
        self.take(worker, body, functools.partial(_settle, replied))
        return await replied

    def take(self, worker: str, body: bytes, told: Told) -> None:
        """The same without a task: ``told`` gets the reply later, or StoreError. Raises InvalidRequest."""
        submitted = parse_submission(worker, body)
        self._gate.take(submitted, functools.partial(self._judged, worker, submitted, told))

    def _judged(
        self, worker: str, submitted: Sequence[Submitted], told: Told, results: list[messages.SubmitResult] | Exception
    ) -> None:
        if isinstance(results, Exception):
            told(results)
        elif any(result.verdict in UNWANTED for result in results):
            task = asyncio.create_task(self._explain(worker, submitted, told, results))
            self._explaining.add(task)
            task.add_done_callback(self._explaining.discard)
        else:
            told(self._reply(results))

    async def _explain(
        self, worker: str, submitted: Sequence[Submitted], told: Told, results: list[messages.SubmitResult]
    ) -> None:
        """Reply with the reasons why records are not wanted."""
        try:
            for number, (item, result) in enumerate(zip(submitted, results, strict=True)):
                if result.verdict == "superseded" and await self._was_accepted(item.head, worker):
                    results[number] = messages.SubmitResult(episode=result.episode, verdict="duplicate")
                elif result.verdict in UNWANTED:
                    results[number] = unwanted(item.head, result, worker)
        except Exception as error:  # noqa: BLE001 - it is raised where the reply is waited for
            told(error)
        else:
            told(self._reply(results))

    async def _was_accepted(self, head: messages.Submission, worker: str) -> bool:
        """Whether this very attempt gave the episode its record; the core forgets an episode once its group is
        complete."""
        await self._store.project()
        found = await asyncio.to_thread(self._store.projection.find_episode, head.episode)
        return found is not None and (found.attempt, found.worker) == (head.attempt, worker)

    def _reply(self, results: list[messages.SubmitResult]) -> messages.SubmitReply:
        self._metrics.judged(results)
        return messages.SubmitReply(epoch=self._epoch, results=results)


def _settle(replied: asyncio.Future[messages.SubmitReply], given: messages.SubmitReply | Exception) -> None:
    if replied.done():
        return  # whoever waited has left
    if isinstance(given, Exception):
        replied.set_exception(given)
    else:
        replied.set_result(given)
