"""The worker against a minimal orchestrator, over real HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.runspec import RunSpec
from headrace.trajectory import Task
from headrace.validation import validate
from headrace.wire import messages
from headrace_workers.episode.environment_threads import CallAbandonedError, EnvironmentThreads
from headrace_workers.worker import Worker, WorkerSettings
from headrace_workers.worker import worker as module
from headrace_workers.worker.loop_lag import LoopLag
from tests.builders import make_id
from tests.workers.fakes import Clock, OneTurn, Script, assignment, say, tools
from tests.workers.orchestrator import Orchestrator, orchestrating


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_workers.worker.backoff.FIRST_S", 0.005)
    monkeypatch.setattr("headrace_workers.worker.backoff.LAST_S", 0.02)
    monkeypatch.setattr("headrace_workers.worker.heartbeat.RETRY_S", 0.01)
    monkeypatch.setattr(module, "EMPTY_PAUSE_S", 0.005)


class Waits(OneTurn):
    """Environment whose step waits in the event loop forever."""

    async def step(self, action: str) -> Any:
        await asyncio.Event().wait()


def attempts(count: int, **changes: Any) -> list[messages.Assignment]:
    return [assignment(episode=make_id(100 + number), nonce=f"n{number}", **changes) for number in range(count)]


class Started:
    """A worker that runs in the test's event loop."""

    def __init__(self, worker: Worker, task: asyncio.Task[bool]) -> None:
        self.worker = worker
        self.task = task


@asynccontextmanager
async def working(
    stub: Orchestrator,
    environment: Callable[..., Any] = OneTurn,
    policy: Any = None,
    **settings: Any,
) -> AsyncIterator[Started]:
    its_tools = tools(policy or Script(say("x")), environment, time.monotonic)
    values = {"name": "worker-1", "orchestrator": stub.url, "slots": 8, "grace_s": 10.0} | settings
    worker = Worker(WorkerSettings(**values), its_tools)
    task = asyncio.create_task(worker.run())
    try:
        yield Started(worker, task)
    finally:
        worker.stop()
        worker.stop()
        await task
        its_tools.threads.close()


async def test_attempts_are_leased_run_and_submitted_once_each() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(50)
        async with working(stub):
            await stub.until(lambda: len(stub.records) == 50)
    assert {record.episode for record in stub.records} == {make_id(100 + number) for number in range(50)}
    assert all(record.status == "finished" for record in stub.records)
    assert all(request.free <= 8 for request in stub.leases)
    assert len(stub.submissions) < 50
    assert stub.spec_requests == 1


async def test_a_worker_reports_its_name_and_capabilities() -> None:
    async with orchestrating() as stub:
        stub.token = "secret"
        async with working(stub, pool="p", capabilities=("a", "b"), token="secret"):
            await stub.until(lambda: stub.leases and stub.heartbeats)
    request = stub.leases[0]
    assert (request.worker, request.pool, request.capabilities, request.slots) == ("worker-1", "p", ["a", "b"], 8)
    assert set(stub.heartbeats[0].stats) >= {"event_loop_lag_s", "spool_bytes", "policy_waiting"}


async def test_leases_and_heartbeats_name_the_instance_of_their_process() -> None:
    for settings in ({}, {"instance": "injected"}):
        async with orchestrating() as stub, working(stub, **settings):
            await stub.until(lambda stub=stub: stub.leases and stub.heartbeats)
            instance = stub.leases[0].instance
            assert instance == stub.heartbeats[0].instance
            assert instance == settings.get("instance", make_id(1000))


async def test_an_attempt_that_is_granted_twice_is_run_once() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1) * 3
        gate = asyncio.Event()

        async def gated(request: Any) -> Any:
            await gate.wait()
            return say("x")

        async with working(stub, policy=Script(gated)):
            await stub.until(lambda: not stub.queue and len(stub.leases) > 5)
            gate.set()
            await stub.until(lambda: stub.records)
            asked = len(stub.leases)
            await stub.until(lambda: len(stub.leases) > asked + 1)
    assert len(stub.records) == 1


async def test_one_heartbeat_lists_all_attempts_including_finished_ones_in_the_spool() -> None:
    async with orchestrating() as stub:
        finished, running = attempts(2)
        running = assignment(episode=running.episode, task=Task(environment="e", seed=0, kwargs={"name": "waits"}))
        stub.takes_records = False
        stub.queue = [finished]
        async with working(stub, lambda name="": Waits() if name else OneTurn()):
            await stub.until(lambda: stub.turned_away)  # so the attempt is in the spool
            stub.queue = [running]
            both = {finished.episode, running.episode}
            await stub.until(lambda: {key.episode for key in stub.heartbeats[-1].holding} == both)


async def test_heartbeats_continue_while_an_episode_blocks_the_event_loop() -> None:
    beats = threading.Event()

    class Computes(OneTurn):
        def step(self, action: str) -> Any:
            assert beats.wait(20)  # blocks the worker's event loop, not the interpreter
            return super().step(action)

    async with orchestrating() as stub:
        # The worker needs a separate loop here, since its episode will block it.
        stub.queue = attempts(1)
        finished = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def elsewhere() -> None:
            async with working(stub, Computes) as started:
                while not stub.records:
                    await asyncio.sleep(0.01)
                started.worker.stop()

        thread = threading.Thread(
            target=lambda: (asyncio.run(elsewhere()), loop.call_soon_threadsafe(finished.set)), daemon=True
        )
        thread.start()
        await stub.until(lambda: any(beat.holding for beat in stub.heartbeats))
        seen = len(stub.heartbeats)
        await stub.until(lambda: len(stub.heartbeats) >= seen + 3)
        assert not stub.records
        assert all(beat.holding for beat in stub.heartbeats[seen:])
        beats.set()
        async with asyncio.timeout(20):
            await finished.wait()
        thread.join()
    assert [record.status for record in stub.records] == ["finished"]


async def test_a_shorter_lease_term_shortens_the_heartbeat_interval() -> None:
    async with orchestrating() as stub:
        stub.interval_s = 600.0
        async with working(stub, Waits):
            await stub.until(lambda: len(stub.heartbeats) == 1)
            stub.queue = attempts(1, term_s=0.06)
            await stub.until(lambda: len(stub.heartbeats) >= 4)
    assert stub.heartbeats[-1].holding


async def test_a_stuck_loop_shows_its_current_lag_to_other_threads_at_once() -> None:
    clock = Clock()
    lag = LoopLag(clock)
    assert lag.take_worst_s() == 0.0
    clock.now += 3.0
    assert lag.current_lag_s() == pytest.approx(3.0, abs=0.2)
    assert lag.take_worst_s() == pytest.approx(3.0, abs=0.2)


async def test_a_cancel_with_a_record_ends_in_a_cancelled_record() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1)
        async with working(stub, Waits):
            await stub.until(lambda: any(beat.holding for beat in stub.heartbeats))
            stub.cancels = [messages.Cancel(episode=make_id(100), attempt=1, reason="stale", record=True)]
            await stub.until(lambda: stub.records)
            await stub.until(lambda: not stub.heartbeats[-1].holding)
    (record,) = stub.records
    assert (record.status, record.failure and record.failure.message) == ("cancelled", "stale")


async def test_a_cancel_without_a_record_frees_the_slot_and_submits_no_record() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1)
        async with working(stub, Waits, slots=1):
            await stub.until(lambda: any(beat.holding for beat in stub.heartbeats))
            asked = len(stub.leases)
            stub.cancels = [messages.Cancel(episode=make_id(100), attempt=1, reason="over", record=False)]
            await stub.until(lambda: not stub.heartbeats[-1].holding)
            await stub.until(lambda: len(stub.leases) > asked)
    assert stub.records == []


async def test_an_outage_does_not_cause_reruns() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(4)
        gate = asyncio.Event()

        async def gated(request: Any) -> Any:
            await gate.wait()
            return say("x")

        policy = Script(gated)
        async with working(stub, policy=policy):
            await stub.until(lambda: len(policy.requests) == 4)
            stub.away = True
            gate.set()
            await stub.until(lambda: stub.turned_away >= 10)
            stub.away = False
            await stub.until(lambda: len(stub.records) == 4)
            await stub.until(lambda: not stub.heartbeats[-1].holding)
    assert len(policy.requests) == 4


async def test_nothing_is_leased_while_the_spool_is_full() -> None:
    async with orchestrating() as stub:
        stub.takes_records = False
        stub.queue = attempts(5)
        async with working(stub, spool_bytes=1, slots=2):
            await stub.until(lambda: stub.heartbeats and len(stub.heartbeats[-1].holding) == 2)
            asked = len(stub.leases)
            beats = len(stub.heartbeats)
            await stub.until(lambda: len(stub.heartbeats) >= beats + 5)
            assert len(stub.leases) == asked
            assert len(stub.queue) == 3
            stub.takes_records = True
            await stub.until(lambda: len(stub.records) == 5)


async def test_an_answer_from_an_older_epoch_is_discarded() -> None:
    async with orchestrating() as stub, working(stub):
        stub.epoch = 5
        await stub.until(lambda: len(stub.leases) > 3)
        stub.epoch = 4
        stub.queue = attempts(1)
        await stub.until(lambda: not stub.queue)
        asked = len(stub.leases)
        await stub.until(lambda: len(stub.leases) > asked + 3)
        assert stub.records == []
        stub.epoch = 6
        stub.queue = attempts(1)
        await stub.until(lambda: len(stub.records) == 1)


async def test_a_refused_record_is_replaced_by_a_failed_one() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(2)
        stub.verdicts = {make_id(100): "refused"}
        async with working(stub):
            await stub.until(lambda: len(stub.records) == 2)
    by_episode = {record.episode: record for record in stub.records}
    assert by_episode[make_id(101)].status == "finished"
    failure = by_episode[make_id(100)].failure
    assert failure is not None
    assert (failure.layer, failure.kind) == ("infrastructure", "record-refused")
    assert "It is not liked." in failure.message


@pytest.mark.parametrize("verdict", ["duplicate", "superseded", "not-yours", "retrying"])
async def test_an_answered_record_leaves_the_spool(verdict: messages.SubmitVerdict) -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1)
        stub.verdicts = {make_id(100): verdict}
        async with working(stub):
            await stub.until(lambda: stub.records)
            await stub.until(lambda: stub.heartbeats and not stub.heartbeats[-1].holding)
    assert len(stub.records) == 1


async def test_the_records_of_a_refused_body_are_sent_again_one_by_one() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(8)
        stub.refused_body = InvalidRequest("too odd")
        async with working(stub):
            await stub.until(lambda: len(stub.records) == 8)
    assert all(record.status == "finished" for record in stub.records)


PAGES = [
    (404, "text/html", b"<html>default backend - 404"),
    (413, "text/html", b"<html>Request Entity Too Large"),
    (429, "application/json", b'{"message":"slow down"}'),
    (502, "application/json", b'{"status":400,"error":"upstream"}'),
    (503, "application/json", b'{"kind":"Status","status":"Failure","code":503}'),
    (503, "application/json", b'{"a":"\xff"}'),
    (200, "text/html", b"<html>Sign in"),
]


@pytest.mark.parametrize("page", PAGES)
async def test_an_error_page_of_a_proxy_does_not_refuse_a_record_or_end_the_worker(
    page: tuple[int, str, bytes],
) -> None:
    gate = asyncio.Event()

    async def gated(request: Any) -> Any:
        await gate.wait()
        return say("x")

    async with orchestrating() as stub:
        stub.queue = attempts(2)
        policy = Script(gated)
        async with working(stub, policy=policy):
            await stub.until(lambda: len(policy.requests) == 2)
            stub.page = page
            gate.set()
            await stub.until(lambda: stub.turned_away >= 10)
            stub.page = None
            await stub.until(lambda: len(stub.records) == 2)
    assert [record.status for record in stub.records] == ["finished", "finished"]


async def test_a_record_that_repeatedly_causes_an_internal_error_does_not_block_others() -> None:
    async with orchestrating() as stub:
        stub.takes_records = False
        stub.queue = attempts(8)
        stub.poison = make_id(100)
        async with working(stub):
            await stub.until(lambda: stub.heartbeats and len(stub.heartbeats[-1].holding) == 8)
            stub.takes_records = True
            await stub.until(lambda: len(stub.records) == 8)
    by_episode = {record.episode: record for record in stub.records}
    failure = by_episode.pop(stub.poison).failure
    assert failure is not None
    assert (failure.layer, failure.kind) == ("infrastructure", "record-refused")
    assert {record.status for record in by_episode.values()} == {"finished"}


async def test_a_heartbeat_that_fails_by_a_defect_ends_the_worker_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: LoopLag) -> float:
        raise ZeroDivisionError("a defect")

    async with orchestrating() as stub:
        stub.queue = attempts(1)
        async with working(stub, Waits, grace_s=600) as started:
            await stub.until(lambda: any(beat.holding for beat in stub.heartbeats))
            monkeypatch.setattr(LoopLag, "current_lag_s", broken)
            async with asyncio.timeout(20):
                assert await started.task is False
    assert [key.episode for key in stub.returned] == [make_id(100)]


async def test_a_lease_request_waits_a_third_of_the_shortest_term() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1, term_s=3.0)
        async with working(stub):
            await stub.until(lambda: stub.records)
            asked = len(stub.leases)
            await stub.until(lambda: len(stub.leases) > asked + 1)
    assert (stub.leases[0].wait_s, stub.leases[-1].wait_s) == (module.LEASE_WAIT_S, 1.0)


async def test_a_lost_lease_answer_times_out_and_the_next_request_lists_the_held_attempts() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1, term_s=0.3)
        async with working(stub):
            await stub.until(lambda: stub.records)
            stub.swallows_leases = True
            await stub.until(lambda: not stub.swallows_leases)
            asked = len(stub.leases)
            await stub.until(lambda: len(stub.leases) > asked)
    assert stub.leases[asked - 1].holding is None
    assert stub.leases[asked].holding is not None


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_with_too_many_hanging_environment_calls_it_drains_and_ends_with_an_error(
    gate: threading.Event,
) -> None:
    class Hangs(OneTurn):
        blocking = True

        def step(self, action: str) -> Any:
            gate.wait(30)
            return super().step(action)

    async with orchestrating() as stub:
        stub.spec = RunSpec(name="r", limits={"environment_timeout_s": 0.05})
        stub.queue = attempts(9)
        async with working(stub, Hangs, slots=4, max_hanging=3) as started, asyncio.timeout(20):
            assert await started.task is False
    assert {record.failure.kind for record in stub.records if record.failure} == {"environment-timeout"}
    assert 3 <= len(stub.records) < 9
    assert stub.returned == []


async def test_a_call_that_returns_late_no_longer_counts_as_hanging(gate: threading.Event) -> None:
    threads = EnvironmentThreads(time.monotonic)
    with pytest.raises(CallAbandonedError):
        await threads.run(lambda: gate.wait(30), 0.01)
    assert (threads.abandoned, threads.hanging) == (1, 1)
    gate.set()
    async with asyncio.timeout(20):
        while threads.hanging:
            await asyncio.sleep(0.001)
    assert threads.abandoned == 1


async def test_attempts_are_renewed_only_while_their_event_loop_runs(gate: threading.Event) -> None:
    class Computes(OneTurn):
        def step(self, action: str) -> Any:
            assert gate.wait(20)  # blocks the worker's event loop, not the interpreter
            return super().step(action)

    async with orchestrating() as stub:
        stub.queue = attempts(1, term_s=0.3)

        async def elsewhere() -> None:
            async with working(stub, Computes):
                while not stub.records:
                    await asyncio.sleep(0.01)

        worker = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
        await stub.until(lambda: any(beat.holding for beat in stub.heartbeats))
        held = len(stub.heartbeats)
        await stub.until(lambda: len(stub.heartbeats) > held and not stub.heartbeats[-1].holding)
        assert not stub.records
        gate.set()
        async with asyncio.timeout(20):
            await worker
    assert [record.status for record in stub.records] == ["finished"]


async def test_an_unknown_run_is_an_infrastructure_failure() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1, run="gone")
        async with working(stub):
            await stub.until(lambda: stub.records)
    failure = stub.records[0].failure
    assert failure is not None
    assert (failure.layer, failure.kind, failure.retryable) == ("infrastructure", "no-run-spec", True)
    validate(stub.records[0])


async def test_an_unknown_renderer_is_a_failure_without_retries() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1)
        stub.spec = RunSpec(name="r", policy={"renderer": "runes", "tokenizer": "none"})
        async with working(stub):
            await stub.until(lambda: stub.records)
    failure = stub.records[0].failure
    assert failure is not None
    assert (failure.kind, failure.retryable) == ("unknown-renderer", False)


async def test_when_stopped_it_finishes_its_attempts_and_leases_nothing_new() -> None:
    gate = asyncio.Event()

    async def gated(request: Any) -> Any:
        await gate.wait()
        return say("x")

    async with orchestrating() as stub:
        stub.queue = attempts(12)
        policy = Script(gated)
        async with working(stub, policy=policy) as started:
            await stub.until(lambda: len(policy.requests) == 8)
            started.worker.stop()
            gate.set()
            assert await started.task is True
    assert len(stub.records) == 8
    assert (len(stub.queue), stub.returned) == (4, [])


async def test_after_the_grace_period_the_remaining_attempts_are_returned() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(3)
        async with working(stub, Waits, grace_s=0.05) as started:
            await stub.until(lambda: any(len(beat.holding) == 3 for beat in stub.heartbeats))
            started.worker.stop()
            assert await started.task is True
    assert {key.nonce for key in stub.returned} == {"n0", "n1", "n2"}
    assert stub.records == []


async def test_when_stopped_again_it_returns_all_attempts_at_once() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1)
        async with working(stub, Waits, grace_s=600) as started:
            await stub.until(lambda: any(beat.holding for beat in stub.heartbeats))
            started.worker.stop()
            started.worker.stop()
            async with asyncio.timeout(20):
                assert await started.task is True
    assert len(stub.returned) == 1


async def test_a_drained_worker_finishes_its_attempts_and_ends() -> None:
    async with orchestrating() as stub:
        stub.drain = True
        stub.queue = attempts(2)
        async with working(stub) as started, asyncio.timeout(20):
            assert await started.task is True
    assert len(stub.records) == 2


async def test_records_that_cannot_be_submitted_are_logged_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHUTDOWN_S", 0.1)
    async with orchestrating() as stub:
        stub.takes_records = False
        stub.queue = attempts(1)
        async with working(stub, grace_s=0.1) as started:
            await stub.until(lambda: stub.turned_away)
            started.worker.stop()
            assert await started.task is False
    assert stub.records == []


async def test_the_failure_of_one_attempt_does_not_affect_the_others() -> None:
    class Breaks(OneTurn):
        def __init__(self, broken: bool = False) -> None:
            self.broken = broken

        def step(self, action: str) -> Any:
            if self.broken:
                raise ValueError("broken")
            return super().step(action)

    async with orchestrating() as stub:
        broken = Task(environment="e", seed=0, kwargs={"broken": True})
        stub.queue = [*attempts(3), assignment(episode=make_id(900), task=broken)]
        async with working(stub, Breaks):
            await stub.until(lambda: len(stub.records) == 4)
    assert sorted(record.status for record in stub.records) == ["failed", "finished", "finished", "finished"]
