"""Gathering of finished attempts into one submission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headrace.wire import messages
from headrace_workers.worker import attempts as module
from headrace_workers.worker.episode_duration import EpisodeDuration
from headrace_workers.worker.spool import Spool, SpoolEntry
from headrace_workers.worker.submitter import Submitter
from tests.builders import make_id
from tests.workers.fakes import assignment
from tests.workers.orchestrator import orchestrating
from tests.workers.worker.test_worker import working


def entry(number: int) -> SpoolEntry:
    return SpoolEntry(assignment(episode=make_id(number)), b"record")


class Connection:
    """Connection that accepts everything and keeps the number of records in each submission."""

    def __init__(self) -> None:
        self.submissions: list[int] = []
        self.both = asyncio.Event()

    async def submit(self, entries: list[tuple[messages.AttemptKey, bytes]]) -> list[messages.SubmitResult]:
        self.submissions.append(len(entries))
        if sum(self.submissions) == 2:
            self.both.set()
        return [messages.SubmitResult(episode=key.episode, verdict="accepted") for key, _ in entries]

    async def missing_assets(self, names: list[str]) -> list[str]:
        return []


async def submissions(spool: Spool, gather_s: Callable[[], float]) -> list[int]:
    """Return the sizes of the submissions of two records."""
    connection = Connection()
    submitter = Submitter(
        connection,  # type: ignore[arg-type]  # records without images
        spool,
        lambda entry, error: pytest.fail(str(error)),
        gather_s,
    )
    sending = asyncio.create_task(submitter.submit_forever())
    async with asyncio.timeout(20):
        await connection.both.wait()
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    return connection.submissions


@pytest.mark.parametrize(("wait_s", "together"), [(0.03, [2]), (0.0, [1, 1])])
async def test_a_record_waits_for_others_for_the_gathering_time(wait_s: float, together: list[int]):
    spool = Spool(1 << 20)
    spool.add(entry(1))
    asked: list[int] = []

    def gather_s() -> float:
        if not asked:  # the second record follows a moment later
            asyncio.get_running_loop().call_soon(spool.add, entry(2))
        asked.append(len(spool))
        return wait_s

    assert await submissions(spool, gather_s) == together


async def test_the_last_record_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "SUBMIT_EPISODE_SHARE", 1e12)
    monkeypatch.setattr(module, "LONGEST_SUBMIT_S", 3600.0)
    async with orchestrating() as stub:
        stub.queue = [assignment(episode=make_id(100 + number)) for number in range(3)]
        async with working(stub, slots=1):
            await stub.until(lambda: len(stub.records) == 3)


def test_the_usual_duration_follows_recent_episodes():
    duration = EpisodeDuration()
    assert duration.share_s(0.5, 10.0) == 0.0
    duration.add(4.0)
    assert duration.share_s(0.5, 10.0) == 2.0
    for _ in range(200):
        duration.add(8.0)
    assert duration.share_s(0.5, 10.0) == pytest.approx(4.0, rel=1e-3)


def test_the_gathering_time_is_limited():
    duration = EpisodeDuration()
    duration.add(3600.0)
    assert duration.share_s(0.01, 0.05) == 0.05
