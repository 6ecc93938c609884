"""Long polls: which waiting requests an event wakes."""

from __future__ import annotations

import asyncio

import pytest

from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler.events import Dispatched, GroupRetired, WorkerDraining
from headrace_orchestrator.service.waiters import ClientDisconnected, WaitQueue, WaitQueues


class Client:
    """The other end of a long poll."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def disconnected(self) -> asyncio.Task[None]:
        if self._task is None:
            self._task = asyncio.create_task(self._wait())
        return self._task

    async def _wait(self) -> None:
        await self._gone.wait()

    async def disconnect(self) -> None:
        self._gone.set()
        await self.disconnected()

    async def close(self) -> None:
        self.disconnected().cancel()
        await asyncio.gather(self.disconnected(), return_exceptions=True)


def waiter(queue: WaitQueue, client: Client, timeout_s: float = 60.0) -> asyncio.Task[None]:
    return asyncio.create_task(queue.wait(timeout_s, client.disconnected))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_change_wakes_the_first_waiter():
    queue, client = WaitQueue(), Client()
    first, second = waiter(queue, client), waiter(queue, client)
    await settle()
    queue.wake_first()
    await first
    assert not second.done()
    queue.wake_first()
    await second
    await client.close()


async def test_a_wake_up_is_never_lost_when_a_waiter_leaves():
    queue, leaving, staying = WaitQueue(), Client(), Client()
    first, second = waiter(queue, leaving), waiter(queue, staying)
    await settle()
    queue.wake_first()
    await leaving.disconnect()
    with pytest.raises(ClientDisconnected):
        await first
    await second
    assert len(queue) == 0
    await staying.close()


async def test_a_wake_up_is_never_lost_when_a_waiter_is_cancelled():
    queue, client = WaitQueue(), Client()
    first, second = waiter(queue, client), waiter(queue, client)
    await settle()
    queue.wake_first()
    first.cancel()
    await second
    await asyncio.gather(first, return_exceptions=True)
    await client.close()


async def test_a_client_that_disconnects_ends_its_wait_at_once():
    queue, client = WaitQueue(), Client()
    waiting = waiter(queue, client)
    await settle()
    await client.disconnect()
    with pytest.raises(ClientDisconnected):
        await waiting
    assert len(queue) == 0


async def test_a_wait_ends_with_its_time():
    queue, client = WaitQueue(), Client()
    await queue.wait(0.0, client.disconnected)
    assert len(queue) == 0
    await client.close()


async def test_events_wake_the_waiters_that_they_concern():
    queues, client = WaitQueues(), Client()
    request = messages.LeaseRequest(worker="w", slots=1, free=1)
    run, pull = waiter(queues.for_run("r"), client), waiter(queues.for_pulls("r"), client)
    other = waiter(queues.for_pulls("s"), client)
    workers = [waiter(queues.for_worker(request), client) for _ in range(2)]
    await settle()

    queues.notify([Dispatched(run="r", worker="w", pool="default", version=Version(0, 0), grants=[])])
    await settle()
    assert not any(task.done() for task in (run, pull, other, *workers))

    queues.notify([GroupRetired(run="r", group="g", reason="acked")])
    await settle()
    assert run.done()
    assert pull.done()
    assert not other.done()
    assert [task.done() for task in workers] == [True, False]

    queues.notify([WorkerDraining(worker="w")])
    await settle()
    assert workers[1].done()
    assert not other.done()
    queues.wake_all()
    await other
    await client.close()
