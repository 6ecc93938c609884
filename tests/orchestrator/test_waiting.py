"""Long polls: who is woken, and who is not."""

from __future__ import annotations

import asyncio

import pytest

from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler.events import Dispatched, GroupRetired, WorkerDraining
from headrace_orchestrator.service.waiters import Bell, Bells, ClientDisconnected


class Client:
    """The other end of a long poll."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def left(self) -> asyncio.Task[None]:
        if self._task is None:
            self._task = asyncio.create_task(self._wait())
        return self._task

    async def _wait(self) -> None:
        await self._gone.wait()

    async def leave(self) -> None:
        self._gone.set()
        await self.left()

    async def close(self) -> None:
        self.left().cancel()
        await asyncio.gather(self.left(), return_exceptions=True)


def waiter(bell: Bell, client: Client, timeout_s: float = 60.0) -> asyncio.Task[None]:
    return asyncio.create_task(bell.wait(timeout_s, client.left))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_change_wakes_the_first_in_line():
    bell, client = Bell(), Client()
    first, second = waiter(bell, client), waiter(bell, client)
    await settle()
    bell.ring()
    await first
    assert not second.done()
    bell.ring()
    await second
    await client.close()


async def test_a_wake_up_is_never_lost_when_a_waiter_leaves():
    bell, leaving, staying = Bell(), Client(), Client()
    first, second = waiter(bell, leaving), waiter(bell, staying)
    await settle()
    bell.ring()
    await leaving.leave()
    with pytest.raises(ClientDisconnected):
        await first
    await second
    assert len(bell) == 0
    await staying.close()


async def test_a_wake_up_is_never_lost_when_a_waiter_is_cancelled():
    bell, client = Bell(), Client()
    first, second = waiter(bell, client), waiter(bell, client)
    await settle()
    bell.ring()
    first.cancel()
    await second
    await asyncio.gather(first, return_exceptions=True)
    await client.close()


async def test_a_client_that_leaves_ends_its_wait_at_once():
    bell, client = Bell(), Client()
    waiting = waiter(bell, client)
    await settle()
    await client.leave()
    with pytest.raises(ClientDisconnected):
        await waiting
    assert len(bell) == 0


async def test_a_wait_ends_with_its_time():
    bell, client = Bell(), Client()
    await bell.wait(0.0, client.left)
    assert len(bell) == 0
    await client.close()


async def test_events_wake_those_whom_they_concern():
    bells, client = Bells(), Client()
    request = messages.LeaseRequest(worker="w", slots=1, free=1)
    run, other = waiter(bells.of_run("r"), client), waiter(bells.of_run("s"), client)
    workers = [waiter(bells.of_worker(request), client) for _ in range(2)]
    await settle()

    bells.tell([Dispatched(run="r", worker="w", pool="default", version=Version(0, 0), grants=[])])
    await settle()
    assert not any(task.done() for task in (run, other, *workers))

    bells.tell([GroupRetired(run="r", group="g", reason="acked")])
    await settle()
    assert run.done()
    assert not other.done()
    assert [task.done() for task in workers] == [True, False]

    bells.tell([WorkerDraining(worker="w")])
    await settle()
    assert workers[1].done()
    assert not other.done()
    bells.ring_all()
    await other
    await client.close()
