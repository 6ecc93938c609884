"""Where submissions come in: those of a few turns of the event loop are judged together.

* What is judged together shares one lookup, one append and one wait for the disk; each submission gets its own results.
* No turn of the event loop judges many more than ``MAX_TOGETHER`` records.
* Whoever cannot be told its results costs the others nothing.
* What goes wrong with the store is told to everyone whose records were judged together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from headrace.errors import StoreError
from headrace.server import logs
from headrace.wire.messages import SubmitResult
from headrace_orchestrator.buffer.assets import Assets
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.submission_records import Intake, Submitted

log = logs.logger(__name__)

MAX_TOGETHER = 32
"""Records that are judged before others get the event loop: some three milliseconds. While the log's writer stores them
the next ones are judged: with all that come from 64 connections in one go, either would wait for the other."""

MORE_TURNS = 3
"""Turns of the event loop in which others may come to the first one that waits. In each of them sockets are read: the
more records share a commit and a sync, the less each costs. Many more turns would leave the disk without work. An idle
event loop takes them in microseconds."""

Told = Callable[[list[SubmitResult] | Exception], None]
"""Takes the results of a submission, or what went wrong."""


class _Waiting(NamedTuple):
    submitted: Sequence[Submitted]
    told: Told


class Gate:
    """All submissions of a running service."""

    def __init__(self, shell: Shell, assets: Assets) -> None:
        self._shell = shell
        self._assets = assets
        self._waiting: deque[_Waiting] = deque()
        self._answers: set[asyncio.Task[None]] = set()

    def take(self, submitted: Sequence[Submitted], told: Told) -> None:
        """``told`` gets one result each, in their order, when what they rest on is on disk; or StoreError."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._judge_after, MORE_TURNS)
        self._waiting.append(_Waiting(submitted, told))

    def _judge_after(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._judge_after, turns - 1)
        else:
            self._judge_waiting()

    def _judge_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        together = self._next_in_line()
        try:
            results = self._judged(together)
        except Exception as error:  # noqa: BLE001 - it is told to each of them
            answer = self._answer(together, [], error)
        else:
            answer = self._answer(together, results)
        task = loop.create_task(answer)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)
        if self._waiting:
            loop.call_soon(self._judge_waiting)  # behind what wakes the log: the disk begins with these

    async def _answer(
        self, together: Sequence[_Waiting], results: Sequence[SubmitResult], error: Exception | None = None
    ) -> None:
        """Tell each its results, or all the error, once everything that they rest on is on disk."""
        try:
            await self._shell.store.log.synced()
        except StoreError as refused:
            error = refused
        given = iter(results if error is None else ())
        for waiting in together:
            own = list(islice(given, len(waiting.submitted)))
            try:
                waiting.told(error or own)
            except Exception:
                log.exception("results could not be told")

    def _next_in_line(self) -> list[_Waiting]:
        """Those who came first, up to ``MAX_TOGETHER`` records, but one submission at least."""
        taken = [self._waiting.popleft()]
        count = len(taken[0].submitted)
        while self._waiting and count + len(self._waiting[0].submitted) <= MAX_TOGETHER:
            taken.append(self._waiting.popleft())
            count += len(taken[-1].submitted)
        return taken

    def _judged(self, together: Sequence[_Waiting]) -> list[SubmitResult]:
        shell = self._shell
        submitted = [item for waiting in together for item in waiting.submitted]
        intake = Intake(shell.core, shell.store, self._assets, shell.now())
        try:
            return intake.judge(submitted)
        finally:
            shell.commit(intake.accepted)
