"""Submission of images from a worker's environments to the orchestrator."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from headrace.assets import Image, decode_array
from headrace.client.async_client import AsyncClient
from headrace.environment import Step
from headrace.trajectory import Task, Trajectory
from headrace_workers.worker.spool import Spool, SpoolEntry
from tests.orchestrator.serving import orchestrator as service
from tests.workers.fakes import OneTurn, assignment
from tests.workers.orchestrator import Orchestrator, orchestrating
from tests.workers.worker.test_worker import attempts, quick, working

__all__ = ["quick"]


def pixels(value: int) -> Any:
    return np.full((4, 6, 3), value, np.uint8)


class Draws(OneTurn):
    """Environment that draws into one buffer and returns it each turn, with pixels of 1, 2, 3."""

    def __init__(self) -> None:
        self.buffer = pixels(0)

    def reset(self, seed: int | None = None) -> Any:
        self.buffer[:] = 0
        return "Look.", {}

    def step(self, action: str) -> Any:
        self.buffer += 1
        drawn = int(self.buffer[0, 0, 0])
        return Step([Image(data=self.buffer, text="<image>")], 1.0, drawn == 3, False, {})


NAMES = [Image(data=pixels(value)).encoded().name for value in (1, 2, 3)]


def shown(record: Trajectory) -> list[str]:
    return [message.content[0].asset for message in record.messages if isinstance(message.content, list)]


async def test_missing_images_are_sent_once_before_the_records_that_refer_to_them() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(4)
        async with working(stub, Draws):
            await stub.until(lambda: len(stub.records) == 4)
    assert all(shown(record) == NAMES for record in stub.records)
    assert sorted(stub.sent_assets) == sorted(NAMES)


async def test_images_that_the_orchestrator_has_dropped_are_sent_again() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1)
        stub.assets = dict.fromkeys(NAMES, b"there")
        stub.forgets = set(NAMES[:1])
        async with working(stub, Draws):
            await stub.until(lambda: stub.records)
    assert stub.submissions == [1, 1]
    assert stub.sent_assets == NAMES[:1]


async def test_an_outage_between_images_and_record_loses_no_record() -> None:
    async with orchestrating() as stub:
        stub.queue = attempts(1)
        stub.takes_records = False
        async with working(stub, Draws):
            await stub.until(lambda: stub.turned_away > 2)
            stub.takes_records = True
            await stub.until(lambda: stub.records)
    assert shown(stub.records[0]) == NAMES
    assert sorted(stub.sent_assets) == sorted(NAMES)


async def test_a_refused_image_affects_only_its_own_record() -> None:
    class Shows(OneTurn):
        def reset(self, seed: int | None = None) -> Any:
            return [Image(data=pixels(seed or 0), text="<image>")], {}

    async with orchestrating() as stub:
        tasks = [Task(environment="test:env", seed=seed) for seed in range(4)]
        stub.queue = [replace(asked, task=task) for asked, task in zip(attempts(4), tasks, strict=True)]
        stub.refused_assets = {Image(data=pixels(2)).encoded().name}
        async with working(stub, Shows):
            await stub.until(lambda: len(stub.records) == 4)
    by_status = {record.task.seed: record.status for record in stub.records}
    assert by_status == {0: "finished", 1: "finished", 2: "failed", 3: "finished"}
    (failed,) = (record for record in stub.records if record.status == "failed")
    assert failed.failure is not None
    assert failed.failure.kind == "record-refused"
    assert not failed.assets


def test_the_spool_counts_the_bytes_of_images() -> None:
    image = Image(data=pixels(1)).encoded()
    spool = Spool(max_bytes=200)
    spool.add(SpoolEntry(assignment(), b"x" * 64, {image.name: image}))
    assert spool.size_bytes == 64 + len(image.data)
    assert spool.is_full
    spool.remove((assignment().episode, 1))
    assert spool.size_bytes == 0


async def test_G19_a_worker_stores_three_images_of_one_buffer_under_three_hashes(tmp_path: Path) -> None:  # noqa: N802
    async with service(tmp_path / "data") as api:
        await api.create_run(group_size=1, batch_size=1)
        stub = Orchestrator()
        stub.url = str(api.session._base_url)
        async with working(stub, Draws), AsyncClient(stub.url) as client:
            batch = await client.pull("run", timeout_s=20, fields=["assets"])
            assert shown(batch.trajectories[0]) == NAMES
            for value, name in enumerate(NAMES, start=1):
                assert hashlib.sha256(batch.asset(name)).hexdigest() == name
                assert np.array_equal(decode_array(batch.asset(name)), pixels(value))
                assert await client.asset(name) == batch.asset(name)
