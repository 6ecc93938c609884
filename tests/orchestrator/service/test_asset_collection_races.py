"""Case G07: an asset is about to be deleted at the moment when a new record refers to it."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import aiohttp
import msgspec
import pytest

from headrace.assets import AssetData, make_asset
from headrace.batch.batch import Batch
from headrace.wire import codec, messages
from headrace_orchestrator.buffer.retention_rules import RetentionRules
from headrace_orchestrator.service.storage import retention as retaining
from tests.orchestrator.buffer.test_assets import claim, fetch, send, showing
from tests.orchestrator.forked import RETAIN_EVERY_S, Forked
from tests.orchestrator.serving import Api, orchestrator, record_for, submission

ROUNDS = int(os.environ.get("HEADRACE_G07_ROUNDS", "100"))
"""Rounds of the short form; the case has 500: ``HEADRACE_G07_ROUNDS=500``."""
KILL_EVERY = 10
SAME_FOR = 5
"""Rounds in which records refer to an asset, before the last file with a reference is deleted."""
ASSET_BYTES = 1 << 20
FILE_BYTES = 1500
"""Size of a file: a record and the events around it."""
PROMISES_S = (0.05, 0.3, 1.0)
LATE_EVERY, LATE_S = 20, 0.3
"""One in this many rounds has a worker that submits after the shortest promise has expired."""
GONE = (aiohttp.ClientError, OSError)
"""Errors of a request when the orchestrator is killed."""

log = logging.getLogger(__name__)


@pytest.fixture
def forked(data_dir: Path) -> Iterator[Forked]:
    data_dir.mkdir()
    orchestrators = Forked(data_dir)
    try:
        yield orchestrators
    finally:
        orchestrators.end()


class Rounds:
    """Rounds in which a record refers to an asset of the previous round's record, which is deleted meanwhile."""

    def __init__(self, forked: Forked, seed: int) -> None:
        self.forked = forked
        self.draw = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.promise_s = PROMISES_S[0]
        self._session: aiohttp.ClientSession | None = None
        self.api: Api

    async def start(self) -> None:
        await self.close()
        started = self.forked.start(log_file_bytes=FILE_BYTES, asset_promise_s=self.promise_s)
        self.promise_s = self.draw.choice(PROMISES_S)
        self._session = aiohttp.ClientSession(started.url)
        self.api = Api(self._session)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def play(self, number: int) -> None:
        asset = make_asset(random.Random(number // SAME_FOR).randbytes(ASSET_BYTES), "image/png")
        (attempt,) = await self.api.lease(free=1)
        body = submission([(attempt, record_for(attempt, **showing(asset)))])
        if number % KILL_EVERY == KILL_EVERY - 1:
            done = await asyncio.gather(self.submit_with(body, asset, 0), self.kill(), return_exceptions=True)
            assert all(error is None or isinstance(error, GONE) for error in done), done
            await self.start()
        await self.submit_with(body, asset, LATE_S if number % LATE_EVERY == 0 else 0)
        assert await fetch(self.api, asset.name) == asset.data
        await self.check_stored()
        await self.train(attempt)

    async def submit_with(self, body: bytes, asset: AssetData, late_s: float) -> None:
        """Do as a worker does: claim, send missing assets, submit; repeat if the promise has expired."""
        await self.pause()
        while True:
            missing = await claim(self.api, asset)
            self.seen["to be sent" if missing else "already there"] += 1
            if missing:
                await send(self.api, asset)
            await self.pause()
            await asyncio.sleep(late_s)
            late_s = 0
            (result,) = await self.api.submit(body)
            self.seen[result.verdict] += 1
            if result.verdict != "assets-missing":
                assert result.verdict in ("accepted", "duplicate"), result
                return

    async def kill(self) -> None:
        await asyncio.sleep(self.draw.uniform(0, 0.05))
        self.forked.kill()
        self.seen["killed"] += 1

    async def pause(self) -> None:
        await asyncio.sleep(self.draw.uniform(0, 0.01))

    async def check_stored(self) -> None:
        """Every stored record has all its assets."""
        listing = await self.api.ask("GET", "/v1/runs/run/trajectories")
        for line in msgspec.convert(listing, messages.TrajectoryList).trajectories:
            record = await self.found(f"/v1/trajectories/{line.id}")
            for asset in codec.decode_head(record).assets if record else ():
                if not await self.found(f"/v1/assets/{asset.name}"):
                    assert not await self.found(f"/v1/trajectories/{line.id}"), f"{line.id} was stored with a hole"
            self.seen["checked"] += 1

    async def found(self, path: str) -> bytes:
        """The body of a response; empty if the resource is unknown, or was deleted meanwhile."""
        async with self.api.session.get(path) as answer:
            return await answer.read() if answer.status == 200 else b""

    async def train(self, attempt: messages.Assignment) -> None:
        batch = await self.api.pull(wait_s=10)
        assert isinstance(batch, Batch)
        assert [trajectory.episode for trajectory in batch.trajectories] == [attempt.episode]
        await self.api.ack(batch)

    async def store_status(self) -> dict[str, float]:
        status: dict[str, float] = (await self.api.ask("GET", "/v1/status"))["store"]
        return status


async def test_G07_an_asset_is_never_deleted_while_a_new_record_comes_to_refer_to_it(  # noqa: N802
    forked: Forked,
) -> None:
    rounds = Rounds(forked, seed=7)
    most = 0.0
    await rounds.start()
    try:
        await rounds.api.create_run(group_size=1, batch_size=1)
        for number in range(ROUNDS):
            await rounds.play(number)
            most = max(most, (await rounds.store_status())["assets"])
        await rounds.api.ask("POST", "/v1/runs/run/close")
        for number in range(8):  # the newest files stay until newer ones exist
            await rounds.api.create_run(name=f"later-{number}")
        async with asyncio.timeout(20):
            while (await rounds.store_status())["assets"] > 0:
                await asyncio.sleep(0.01)
    finally:
        await rounds.close()
    log.info("%s; at most %d assets", dict(rounds.seen), most)
    assert rounds.seen["killed"] == ROUNDS // KILL_EVERY
    assert min(rounds.seen[what] for what in ("already there", "to be sent", "assets-missing", "checked")) > 0
    assert most <= 16, "unreferenced assets stay longer than their files, their promise and one collection"
    assert not list((forked.data / "assets").glob("??/*"))


class RetentionSteps:
    """Counts completed steps of retention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ended = asyncio.Semaphore(0)
        step = retaining.RetentionLoop.step

        async def counted(loop: retaining.RetentionLoop) -> list[int]:
            deleted = await step(loop)
            self._ended.release()
            return deleted

        monkeypatch.setattr(retaining.RetentionLoop, "step", counted)

    async def more(self, count: int) -> None:
        """Wait until ``count`` more steps have completed."""
        self._ended = asyncio.Semaphore(0)
        for _ in range(count):
            await self._ended.acquire()


async def test_G07_a_leased_batch_keeps_its_assets_until_its_last_use(  # noqa: N802
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retaining, "RETAIN_EVERY_S", RETAIN_EVERY_S)
    steps = RetentionSteps(monkeypatch)
    asset = make_asset(random.Random(7).randbytes(ASSET_BYTES), "image/png")
    async with orchestrator(
        data_dir, log_file_bytes=1, asset_promise_s=0.1, retention=RetentionRules(trajectories=0)
    ) as api:
        names = (f"later-{number}" for number in count())

        async def make_newer_files() -> None:
            """Make newer files, and wait until retention has checked the older ones."""
            for name in islice(names, 12):
                await api.create_run(name=name)
                await steps.more(2)  # the first step may have begun before

        await api.create_run(group_size=1, batch_size=1, max_uses=2)
        (attempt,) = await api.lease(free=1)
        record = codec.encode(record_for(attempt, **showing(asset)))
        for _ in range(100):  # like a worker: the promise may expire before the record arrives
            await send(api, asset)
            (result,) = await api.submit(submission([(attempt, record)]))
            if result.verdict != "assets-missing":
                break
        assert result.verdict == "accepted"
        for _ in range(2):
            batch = await api.pull(wait_s=10)
            assert isinstance(batch, Batch)
            await make_newer_files()
            assert await fetch(api, asset.name) == asset.data
            assert bytes(batch.records) == record
            await api.ack(batch)
        await make_newer_files()
        async with asyncio.timeout(10):
            while (await api.ask("GET", "/v1/status"))["store"]["assets"]:
                await asyncio.sleep(0.01)
