"""Trimming of the page cache: files that leave it, and files that stay."""

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
"""Settings under which a file holds some dozen records."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PageCacheTrimmer]:
    """The trimmers of the services that were started; they step only when a test calls them."""
    made: list[PageCacheTrimmer] = []

    class Still(PageCacheTrimmer):
        def __init__(self, store: Store) -> None:
            super().__init__(store)
            made.append(self)

        async def run(self) -> None: ...

    monkeypatch.setattr(lifecycle, "PageCacheTrimmer", Still)
    return made


def sealed(cache: PageCacheTrimmer) -> list[int]:
    """All files but the current one."""
    return list(range(1, Location.from_position(cache._store.log.tail, 0).file))


async def test_a_sealed_file_without_a_record_in_use_is_dropped_once(
    data_dir: Path, made: list[PageCacheTrimmer]
) -> None:
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run()
        stored = await train(api, 30)
        assert len(sealed(made[0])) > 4
        assert await made[0].step() == sealed(made[0])
        assert await made[0].step() == []
        await api.ask("GET", f"/v1/trajectories/{stored[0]}/advantages")  # it can still be read


async def test_a_file_that_an_open_batch_or_a_group_in_flight_needs_stays(
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


async def test_only_files_on_disk_are_dropped(
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


async def test_files_that_were_sealed_before_the_start_are_left_alone(
    data_dir: Path, made: list[PageCacheTrimmer]
) -> None:
    async with orchestrator(data_dir, **SMALL) as api:
        await api.create_run()
        await train(api, 30)
    async with orchestrator(data_dir, **SMALL) as api:
        assert await made[1].step() == []


async def test_a_check_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, again = 0, asyncio.Event()

    async def step(cache: PageCacheTrimmer) -> list[int]:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise OSError
        again.set()
        return []

    monkeypatch.setattr(PageCacheTrimmer, "step", step)
    monkeypatch.setattr(page_cache, "pause_s", lambda check_s: 0.0)
    store = SimpleNamespace(log=SimpleNamespace(tail=0))
    running = asyncio.create_task(PageCacheTrimmer(cast(Store, store)).run())
    async with asyncio.timeout(10):
        await again.wait()
    running.cancel()


def test_a_group_may_be_relocated_while_its_files_are_listed() -> None:
    group = GroupLocations(2)
    for file in (3, 4):
        group.add(f"{file}", Location(file, 0, 64))
    files = group.files()
    assert next(files) == 3
    group.packed = b""
    assert list(files) == [4]


def test_the_longer_a_check_takes_the_less_often_it_happens() -> None:
    assert pause_s(0.0) == CHECK_EVERY_S
    assert pause_s(1.0) == 1 / CHECK_SHARE
