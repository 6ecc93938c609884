"""What of the log leaves the kernel's memory, and what stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.batch.batch import Batch
from headrace.errors import StoreError
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.service import lifecycle
from headrace_orchestrator.service.storage import page_cache
from headrace_orchestrator.service.storage.group_locations import GroupLocations
from headrace_orchestrator.service.storage.page_cache import CHECK_EVERY_S, CHECK_SHARE, PageCacheTrimmer, pause_s
from headrace_orchestrator.service.storage.store import Store
from tests.orchestrator.service.test_retention import train
from tests.orchestrator.serving import orchestrator

SMALL = {"log_file_bytes": 40_000}
"""A file holds some dozen records."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PageCacheTrimmer]:
    """The page cache of each service that was started; it steps when it is told to."""
    made: list[PageCacheTrimmer] = []

    class Still(PageCacheTrimmer):
        def __init__(self, store: Store) -> None:
            super().__init__(store)
            made.append(self)

        async def run(self) -> None: ...

    monkeypatch.setattr(lifecycle, "PageCacheTrimmer", Still)
    return made


def sealed(cache: PageCacheTrimmer) -> list[int]:
    """All files but the one that is written."""
    return list(range(1, Location.from_position(cache._store.log.tail, 0).file))


async def test_a_sealed_file_that_no_group_and_no_batch_needs_is_let_go_once(
    data_dir: Path, made: list[PageCacheTrimmer]
) -> None:
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run()
        stored = await train(api, 30)
        assert len(sealed(made[0])) > 4
        assert await made[0].step() == sealed(made[0])
        assert await made[0].step() == []
        await api.ask("GET", f"/v1/trajectories/{stored[0]}/advantages")  # it is read all the same


async def test_what_an_open_batch_or_a_group_in_flight_needs_stays(
    data_dir: Path, made: list[PageCacheTrimmer]
) -> None:
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run(max_staleness=3)
        await api.play(free=4)
        held = await api.pull(request="held")
        assert isinstance(held, Batch)
        await train(api, 30)
        assert 1 not in await made[0].step()
        await api.ack(held)
        assert 1 in await made[0].step()


async def test_nothing_is_let_go_that_is_not_on_the_disk(
    data_dir: Path, made: list[PageCacheTrimmer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run()
        await train(api, 30)

        async def refuse() -> None:
            raise StoreError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(made[0]._store.log, "synced", refuse)
            assert await made[0].step() == []
        assert await made[0].step() == sealed(made[0])


async def test_files_of_before_the_start_are_left_to_the_kernel(data_dir: Path, made: list[PageCacheTrimmer]) -> None:
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run()
        await train(api, 30)
    async with orchestrator(data_dir, **SMALL) as api:
        assert await made[1].step() == []


async def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, again = 0, asyncio.Event()

    async def step(cache: PageCacheTrimmer) -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError
        again.set()
        return []

    monkeypatch.setattr(PageCacheTrimmer, "step", step)
    monkeypatch.setattr(page_cache, "pause_s", lambda looked_s: 0.0)
    store = SimpleNamespace(log=SimpleNamespace(tail=0))
    running = asyncio.create_task(PageCacheTrimmer(cast(Store, store)).run())
    async with asyncio.timeout(10):
        await again.wait()
    running.cancel()


def test_a_group_may_be_moved_while_its_files_are_listed() -> None:
    group = GroupLocations(2)
    for file in (3, 4):
        group.add(f"{file}", Location(file, 0, 64))
    files = group.files()
    assert next(files) == 3
    group.packed = b""
    assert list(files) == [4]


def test_the_longer_a_look_takes_the_less_often_it_happens() -> None:
    assert pause_s(0.0) == CHECK_EVERY_S
    assert pause_s(1.0) == 1 / CHECK_SHARE
