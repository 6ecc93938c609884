"""Where submissions come in: those of a few turns of the event loop are judged together.

* What is judged together shares one lookup, one append and one wait for the disk; each submission gets its own results.
* No turn of the event loop judges many more than ``MAX_TOGETHER`` records.
* What goes wrong with the store is told to everyone whose records were judged together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from headrace.errors import StoreError
from headrace.wire import SubmitResult
from headrace_orchestrator.buffer.assets import Assets
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.submission import Intake, Submitted

MAX_TOGETHER = 256
"""Records that are judged before others get the event loop: some ten milliseconds."""

MORE_TURNS = 2
"""Turns of the event loop in which others may come to the first one that waits. In each of them sockets are read: the
more records share a commit and a sync, the less each costs. Many more turns would leave the disk without work. An idle
event loop takes them in microseconds."""


class _Waiting(NamedTuple):
    submitted: Sequence[Submitted]
    results: asyncio.Future[list[SubmitResult]]


class Gate:
    """All submissions of a running service."""

    def __init__(self, shell: Shell, assets: Assets) -> None:
        self._shell = shell
        self._assets = assets
        self._waiting: deque[_Waiting] = deque()
        self._answers: set[asyncio.Task[None]] = set()

    async def judge(self, submitted: Sequence[Submitted]) -> list[SubmitResult]:
        """One result each, in their order, when what they rest on is on disk. Raises StoreError."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._judge_after, MORE_TURNS)
        results: asyncio.Future[list[SubmitResult]] = loop.create_future()
        self._waiting.append(_Waiting(submitted, results))
        return await results

    def _judge_after(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._judge_after, turns - 1)
        else:
            self._judge_waiting()

    def _judge_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        together = self._take()
        if self._waiting:
            loop.call_soon(self._judge_waiting)
        try:
            results = self._judged([item for waiting in together for item in waiting.submitted])
        except Exception as error:  # noqa: BLE001 - it is raised where each of them waits
            answer = self._answer(together, [], error)
        else:
            answer = self._answer(together, results)
        task = loop.create_task(answer)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(
        self, together: Sequence[_Waiting], results: Sequence[SubmitResult], error: Exception | None = None
    ) -> None:
        """Give each its results, or all the error, once everything that they rest on is on disk."""
        try:
            await self._shell.store.log.synced()
        except StoreError as refused:
            error = refused
        given = iter(results)
        for waiting in together:
            own = [next(given) for _ in waiting.submitted] if error is None else []
            if waiting.results.done():
                continue  # its client has left
            if error is None:
                waiting.results.set_result(own)
            else:
                waiting.results.set_exception(error)

    def _take(self) -> list[_Waiting]:
        """The next in line, up to ``MAX_TOGETHER`` records, but one submission at least."""
        taken = [self._waiting.popleft()]
        count = len(taken[0].submitted)
        while self._waiting and count + len(self._waiting[0].submitted) <= MAX_TOGETHER:
            taken.append(self._waiting.popleft())
            count += len(taken[-1].submitted)
        return taken

    def _judged(self, submitted: Sequence[Submitted]) -> list[SubmitResult]:
        shell = self._shell
        intake = Intake(shell.core, shell.store, self._assets, shell.now())
        try:
            return intake.judge(submitted)
        finally:
            shell.commit(intake.accepted)
