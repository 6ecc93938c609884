"""Batching of submissions that arrive within a few turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.errors import StoreError
from headrace.wire.messages import SubmissionHead, SubmitResult
from headrace_orchestrator.service import submission_batcher
from headrace_orchestrator.service.shell import Shell
from headrace_orchestrator.service.submission_batcher import SubmissionBatcher
from headrace_orchestrator.service.submission_records import SubmittedRecord
from tests.orchestrator.serving import orchestrator, record_for, submission


class Judge:
    """A judge and a shell that note which records were judged together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.together: list[list[str]] = []
        self.commits = self.syncs = 0
        self.accepted: dict[str, Any] = {}
        self._error = error
        monkeypatch.setattr(submission_batcher, "SubmissionJudge", lambda *args: self)
        self.store = SimpleNamespace(log=self)
        self.core = SimpleNamespace(state_at=lambda now: None)

    def now(self) -> float:
        return 0.0

    def judge(self, records: Sequence[SubmittedRecord]) -> list[SubmitResult]:
        self.together.append([record.head.episode for record in records])
        if self._error is not None:
            raise self._error
        return [SubmitResult(episode=record.head.episode, verdict="accepted") for record in records]

    def commit(self, accepted: Any) -> None:
        self.commits += 1

    async def synced(self) -> None:
        self.syncs += 1

    def batcher(self) -> SubmissionBatcher:
        return SubmissionBatcher(cast(Shell, self), cast(Any, None))


def body(*episodes: str) -> list[SubmittedRecord]:
    return [
        SubmittedRecord("w", SubmissionHead(episode=id, attempt=1, nonce="n", size_bytes=64), memoryview(b""))
        for id in episodes
    ]


async def judged(batcher: SubmissionBatcher, records: Sequence[SubmittedRecord]) -> list[SubmitResult]:
    results: asyncio.Future[list[SubmitResult]] = asyncio.get_running_loop().create_future()

    def settle(result: list[SubmitResult] | Exception) -> None:
        if isinstance(result, Exception):
            results.set_exception(result)
        else:
            results.set_result(result)

    batcher.add(records, settle)
    return await results


async def test_submissions_judged_together_share_one_wait_for_the_disk_and_each_gets_its_own_results(
    monkeypatch: pytest.MonkeyPatch,
):
    judge = Judge(monkeypatch)
    batcher = judge.batcher()
    first, second = await asyncio.gather(judged(batcher, body("a", "b")), judged(batcher, body("c")))
    assert [result.episode for result in first] == ["a", "b"]
    assert [result.episode for result in second] == ["c"]
    assert judge.together == [["a", "b", "c"]]
    assert (judge.commits, judge.syncs) == (1, 1)


async def test_submissions_of_a_few_turns_of_the_event_loop_are_judged_together(monkeypatch: pytest.MonkeyPatch):
    judge = Judge(monkeypatch)
    batcher = judge.batcher()
    replies = []
    for name in ("a", "b"):
        replies.append(asyncio.create_task(judged(batcher, body(name))))
        await asyncio.sleep(0)
        assert not judge.together
    await asyncio.gather(*replies)
    assert judge.together == [["a", "b"]]


async def test_no_turn_of_the_event_loop_judges_many_records(monkeypatch: pytest.MonkeyPatch):
    judge = Judge(monkeypatch)
    batcher = judge.batcher()
    half = [f"{number}" for number in range(submission_batcher.MAX_TOGETHER // 2)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(judged(batcher, body(*half)) for _ in range(6)))
    counting.cancel()
    assert [len(records) for records in judge.together] == [submission_batcher.MAX_TOGETHER] * 3
    assert turns >= 3


async def test_a_failure_of_the_store_is_the_result_of_every_submission_that_was_judged_together(
    monkeypatch: pytest.MonkeyPatch,
):
    judge = Judge(monkeypatch, StoreError("the disk is full"))
    batcher = judge.batcher()
    errors = await asyncio.gather(judged(batcher, body("a")), judged(batcher, body("b")), return_exceptions=True)
    assert [type(error) for error in errors] == [StoreError, StoreError]
    assert judge.commits == 1


async def test_a_result_that_the_disk_refused_is_not_delivered(monkeypatch: pytest.MonkeyPatch):
    judge = Judge(monkeypatch)

    async def refuse() -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(judge, "synced", refuse)
    batcher = judge.batcher()
    errors = await asyncio.gather(judged(batcher, body("a")), judged(batcher, body("b")), return_exceptions=True)
    assert [type(error) for error in errors] == [StoreError, StoreError]


async def test_a_callback_that_raises_costs_the_other_submissions_nothing(monkeypatch: pytest.MonkeyPatch):
    judge = Judge(monkeypatch)
    batcher = judge.batcher()
    batcher.add(body("a"), lambda given: 1 / 0)  # type: ignore[arg-type, return-value]
    assert [result.episode for result in await judged(batcher, body("b"))] == ["b"]
    assert judge.together == [["a", "b"]]


async def test_the_same_record_twice_at_once_is_accepted_once(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        attempt = (await api.lease(free=1))[0]
        record = submission([(attempt, record_for(attempt))])
        answers = await asyncio.gather(*(api.submit(record) for _ in range(8)))
        assert sorted(results[0].verdict for results in answers) == ["accepted"] + ["duplicate"] * 7
