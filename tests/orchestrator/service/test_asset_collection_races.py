"""G07: an asset comes up for deletion at the moment when a new record comes to refer to it."""

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
from headrace.store.asset_files import read_asset
from headrace.wire import codec, messages
from headrace_orchestrator.buffer.retention_rules import RetentionRules
from headrace_orchestrator.service.storage import retention as retaining
from tests.orchestrator.buffer.test_assets import claim, fetch, send, showing
from tests.orchestrator.forked import RETAIN_EVERY_S, Forked
from tests.orchestrator.serving import Api, orchestrator, record_for, submission

ROUNDS = int(os.environ.get("HEADRACE_G07_ROUNDS", "100"))
"""The case has 500: ``HEADRACE_G07_ROUNDS=500``."""
KILL_EVERY = 10
SAME_FOR = 5
"""Rounds for which an asset is referred to again and again, before the last file that does is deleted."""
ASSET_BYTES = 1 << 20
FILE_BYTES = 1500
"""A record and what is decided around it."""
PROMISES_S = (0.05, 0.3, 1.0)
LATE_EVERY, LATE_S = 20, 0.3
"""Rounds of which one has a worker that submits so late that the shortest promise is over by then."""
GONE = (aiohttp.ClientError, OSError)
"""What a request meets when the orchestrator is killed."""

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
    """Plays them: a round's record refers to what only the record of the round before refers to, and that one goes."""

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
            done = await asyncio.gather(self.hand_in(body, asset, 0), self.kill(), return_exceptions=True)
            assert all(error is None or isinstance(error, GONE) for error in done), done
            await self.start()
        await self.hand_in(body, asset, LATE_S if number % LATE_EVERY == 0 else 0)
        assert await fetch(self.api, asset.name) == asset.data
        await self.check_stored()
        await self.train(attempt)

    async def hand_in(self, body: bytes, asset: AssetData, late_s: float) -> None:
        """As a worker does: ask, send what is missing, submit, and again if that came too late."""
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
        """Whatever record is there has all that it refers to."""
        listing = await self.api.ask("GET", "/v1/runs/run/trajectories")
        for line in msgspec.convert(listing, messages.TrajectoryList).trajectories:
            record = await self.found(f"/v1/trajectories/{line.id}")
            for asset in codec.decode_head(record).assets if record else ():
                if not await self.found(f"/v1/assets/{asset.name}"):
                    assert not await self.found(f"/v1/trajectories/{line.id}"), f"{line.id} was stored with a hole"
            self.seen["checked"] += 1

    async def found(self, path: str) -> bytes:
        """What is there; nothing if it is unknown, or was deleted while it was looked for."""
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


async def test_G07_an_asset_that_a_new_record_comes_to_refer_to_is_never_deleted_under_it(  # noqa: N802
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
        for number in range(8):  # the newest files are kept until there are newer ones
            await rounds.api.create_run(name=f"later-{number}")
        async with asyncio.timeout(20):
            while (await rounds.store_status())["assets"] > 0:
                await asyncio.sleep(0.01)
    finally:
        await rounds.close()
    log.info("%s; at most %d assets", dict(rounds.seen), most)
    assert rounds.seen["killed"] == ROUNDS // KILL_EVERY
    assert min(rounds.seen[what] for what in ("already there", "to be sent", "assets-missing", "checked")) > 0
    assert most <= 16, "what nobody refers to is there for longer than its files, its promise and a look around"
    assert not list((forked.data / "assets").glob("??/*"))


class RetentionSteps:
    """Counts the steps of retention as they end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ended = asyncio.Semaphore(0)
        step = retaining.RetentionLoop.step

        async def counted(retainer: retaining.RetentionLoop) -> list[int]:
            gone = await step(retainer)
            self._ended.release()
            return gone

        monkeypatch.setattr(retaining.RetentionLoop, "step", counted)

    async def more(self, count: int) -> None:
        """Wait until so many more have ended."""
        self._ended = asyncio.Semaphore(0)
        for _ in range(count):
            await self._ended.acquire()


async def test_G07_a_leased_batch_keeps_what_it_refers_to_until_its_last_use(  # noqa: N802
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retaining, "RETAIN_EVERY_S", RETAIN_EVERY_S)
    steps = RetentionSteps(monkeypatch)
    asset = make_asset(random.Random(7).randbytes(ASSET_BYTES), "image/png")
    async with orchestrator(
        data_dir, log_file_bytes=1, asset_promise_s=0.1, retention=RetentionRules(trajectories=0)
    ) as api:
        names = (f"later-{number}" for number in count())

        async def come_up_for_deletion() -> None:
            """Let newer files come, and retention look at the older ones."""
            for name in islice(names, 12):
                await api.create_run(name=name)
                await steps.more(2)  # the first of them may have begun before

        await api.create_run(group_size=1, batch_size=1, max_uses=2)
        (attempt,) = await api.lease(free=1)
        record = codec.encode(record_for(attempt, **showing(asset)))
        for _ in range(100):  # as a worker does: on a busy machine the promise may expire before the record arrives
            await send(api, asset)
            (result,) = await api.submit(submission([(attempt, record)]))
            if result.verdict != "assets-missing":
                break
        assert result.verdict == "accepted"
        for _ in range(2):
            batch = await api.pull(wait_s=10)
            assert isinstance(batch, Batch)
            await come_up_for_deletion()
            assert await fetch(api, asset.name) == asset.data
            assert bytes(batch.records) == record
            await api.ack(batch)
        assert read_asset(data_dir / "assets", asset.name) == asset.data
        await come_up_for_deletion()
        async with asyncio.timeout(10):
            while (await api.ask("GET", "/v1/status"))["store"]["assets"]:
                await asyncio.sleep(0.01)
