"""Pulls of data-parallel learners and of restarted learners, through a real service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from headrace.batch.batch import Batch, Row
from headrace.batch.manifest import MomentSet
from headrace.client.async_client import AsyncClient
from headrace.common.ids import new_id
from headrace.errors import BatchAlreadyAcked, BatchSuperseded, NothingToServe, SessionSuperseded, ShardsNotFetched
from headrace.layouts import FillerRow, filled, packed
from headrace.moments import Moments, merge_all
from headrace.trajectory import Trajectory, Version
from headrace.wire import messages
from headrace_orchestrator.service.batches import bodies
from tests.builders import make_segment, make_trajectory
from tests.orchestrator.service.test_restart import flip_record
from tests.orchestrator.serving import Api, Process, orchestrator, record_for, submission


@asynccontextmanager
async def client(api: Api, session: str = "start-1") -> AsyncIterator[AsyncClient]:
    async with AsyncClient(str(api.session._base_url), session=session, retry_for_s=5) as made:
        yield made


@asynccontextmanager
async def ranks(api: Api, shards: int, session: str = "start-1") -> AsyncIterator[list[AsyncClient]]:
    """The processes of a data-parallel learner, each with a client of its own."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client(api, session)) for _ in range(shards)]


async def pull_all(clients: list[AsyncClient], **options: Any) -> list[Batch]:
    """Each rank's next pull, all at once."""
    pulls = (
        client.pull("run", shard=shard, shards=len(clients), timeout_s=20, **options)
        for shard, client in enumerate(clients)
    )
    return list(await asyncio.gather(*pulls))


def row_bytes(row: Row) -> tuple[object, ...]:
    arrays = (row.returns, row.advantages, row.rewards, row.weights, row.token_ids, row.logprobs)
    return (row.trajectory.id, row.group, *(array.tobytes() for array in arrays))


async def test_every_rank_gets_its_shard_of_the_same_batch_under_one_lease(data_dir: Path):
    async with orchestrator(data_dir) as api, ranks(api, 3) as learner:
        await api.create_run()
        await api.play(free=4)
        shards = await pull_all(learner)
        assert len({(shard.id, shard.generation) for shard in shards}) == 1
        for shard in shards:
            shard.verify()
        rows = {row.index: row for shard in shards for row in shard.rows}
        assert sorted(rows) == list(range(shards[0].manifest.counts.rows)) == [0, 1, 2, 3]
        await learner[1].ack(shards[1], 1)
        with pytest.raises(BatchAlreadyAcked):
            await learner[0].ack(shards[0], 2)
        assert (await learner[2].run("run")).batches_acked == 1
        await api.play(free=4)
        following = await pull_all(learner)
        assert {shard.id for shard in following} == {following[0].id} != {shards[0].id}


async def test_an_ack_before_every_shard_was_fetched_is_refused_across_a_restart(data_dir: Path):
    async with orchestrator(data_dir) as api, client(api) as learner:
        await api.create_run()
        await api.play(free=4)
        first = await learner.pull("run", shard=0, shards=2)
        with pytest.raises(ShardsNotFetched, match="shard 1 of 2 was not fetched"):
            await learner.ack(first)
    async with orchestrator(data_dir) as api, client(api) as learner:
        with pytest.raises(ShardsNotFetched):
            await learner.ack(first)
        second = await learner.pull("run", shard=1, shards=2)
        assert (second.id, second.generation) == (first.id, first.generation)
        await learner.ack(first)


async def test_shards_of_a_body_too_long_to_be_held_are_the_same(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    async with orchestrator(data_dir) as api, ranks(api, 2) as learner:
        await api.create_run()
        await api.play(free=4)
        held = await pull_all(learner)
        monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 0)
    async with orchestrator(data_dir) as api, ranks(api, 2, "start-2") as learner:
        streamed = await pull_all(learner)
    assert [shard.generation for shard in streamed] == [2, 2]
    for one, other in zip(held, streamed, strict=True):
        assert bytes(one.records) == bytes(other.records)
        assert [row_bytes(row) for row in one.rows] == [row_bytes(row) for row in other.rows]


async def test_the_reasons_of_a_waiting_rank_name_the_missing_one(data_dir: Path):
    async with orchestrator(data_dir) as api, client(api) as learner:
        await api.create_run(max_staleness=0)
        await api.play(free=4)
        await learner.pull("run", shard=0, shards=2)
        with pytest.raises(NothingToServe, match="shard 1 of 2 was not fetched"):
            await learner.pull("run", shard=0, shards=2, timeout_s=0)


async def test_submitted_groups_are_awaited_by_id_in_shards(data_dir: Path):
    async with orchestrator(data_dir) as api, ranks(api, 2) as learner:
        await api.create_run()
        ids = await learner[0].submit_groups("run", [{"environment": "test:Echo", "seed": seed} for seed in (1, 2)])
        pulling = asyncio.create_task(pull_all(learner, groups=ids))
        await api.play(free=16)
        shards = await pulling
        assert {group.id for group in shards[0].manifest.groups} == set(ids)
        assert shards[0].id == shards[1].id
        await learner[0].ack(shards[0])


async def test_two_learners_under_one_name_get_a_clear_message(data_dir: Path):
    async with orchestrator(data_dir) as api, client(api, "") as one, client(api, "") as other:
        await api.create_run()
        await api.play(free=8)
        held = await one.pull("run")
        await other.pull("run")
        with pytest.raises(SessionSuperseded, match="two learners run under one name: give each its own"):
            await one.pull("run", timeout_s=0)
        with pytest.raises(BatchSuperseded):
            await one.ack(held)


async def test_a_learner_that_was_killed_resumes_with_the_same_bytes(tmp_path: Path):
    """The service is killed too: what a learner held is an event of the log."""
    process = Process(tmp_path / "data")
    try:
        url = process.start()
        async with AsyncClient(url, retry_for_s=5) as learner:
            await learner.create_run(
                {"name": "run", "environments": [{"id": "test:Echo"}], "group_size": 2, "batch_size": 4}
                | {"max_staleness": 2}
            )
            async with learner_api(url) as api:
                await api.play(free=12)
            held = [await learner.pull("run") for _ in range(3)]
            await learner.ack(held[0], 1)
        process.kill()
        url = process.start()
        async with AsyncClient(url, retry_for_s=5) as learner:
            batches, lost = await learner.resume("run")
            assert [batch.id for batch in batches] == [batch.id for batch in held[1:]]
            assert lost == {}
            for again, before in zip(batches, held[1:], strict=True):
                assert again.manifest == before.manifest
                assert bytes(again.records) == bytes(before.records)
            await learner.announce("run", 4)
            await learner.nack(batches[0], "out of memory")
            with pytest.raises(BatchSuperseded, match=r"dissolved \(stale\)"):
                await learner.ack(batches[0])
        async with AsyncClient(url, retry_for_s=5) as learner:
            assert await learner.resume("run") == ([], {held[2].id: "stale"})
    finally:
        process.end()


@asynccontextmanager
async def learner_api(url: str) -> AsyncIterator[Api]:
    async with aiohttp.ClientSession(url) as session:
        yield Api(session)


# G06: episodes have different numbers of rows, and the shards do not divide evenly


async def play_rows(api: Api, attempts: list[messages.Assignment]) -> None:
    groups = list(dict.fromkeys(attempt.group for attempt in attempts))
    records = [(item, rows_of(item, groups.index(item.group) * 8 + item.member)) for item in attempts]
    for start in range(0, len(records), 16):
        results = await api.submit(submission(records[start : start + 16]))
        assert {result.verdict for result in results} == {"accepted"}, results[0]


def rows_of(attempt: messages.Assignment, number: int) -> Trajectory:
    """Two rows, or three for the first member of the first eight groups; lengths from a seeded draw."""
    generator = np.random.default_rng(number)
    count = 3 if number % 8 == 0 and number < 64 else 2
    rewards, lengths = generator.normal(size=count), generator.integers(10, 4001, count).tolist()
    segments = [
        make_segment(
            spans=[(length - 5, length)],
            rewards=[float(reward)],
            indices=[index],
            terminated=index == count - 1,
            salt=number,
        )
        for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    ]
    names = ("run", "group", "member", "episode", "attempt", "task")
    return make_trajectory(**{name: getattr(attempt, name) for name in names}, id=new_id(), segments=segments)


async def test_shards_of_episodes_with_different_numbers_of_rows(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=8, batch_size=512, estimator={"name": "grpo"}, max_staleness=0)
        await play_rows(api, await api.lease(free=512))
        cuts: dict[int, list[Batch]] = {}
        for shards in (8, 7):
            async with ranks(api, shards, session=f"in {shards}") as learner:
                cuts[shards] = await pull_all(learner)
        async with client(api, session="whole") as learner:
            whole = await learner.pull("run")
            whole.verify()
            await learner.ack(whole)
    assert whole.manifest.counts.rows == 1032
    wanted = {row.index: row_bytes(row) for row in whole.rows}
    for shards, cut in cuts.items():
        assert {batch.id for batch in cut} == {whole.id}
        found = [(row.index, row_bytes(row)) for batch in cut for row in batch.rows]
        assert len(found) == 1032, "no row twice"
        assert dict(found) == wanted, "returns, advantages and the group's entry are those of the whole, bit for bit"
        loads = np.array([sum(len(row.token_ids) for row in batch.rows) for batch in cut])
        assert loads.max() <= 1.1 * loads.mean()
        parts = [batch.shard.part for batch in cut if batch.shard]
        assert len(parts) == shards
        assert all(batch.manifest == whole.manifest for batch in cut), "global counts and moments on every shard"
        for name in MomentSet.__struct_fields__:
            merged = merge_all(getattr(part.moments, name) for part in parts)
            assert merged.agrees(getattr(whole.manifest.moments, name), 1e-12)
        split = [row.trajectory.id for batch in cut for row in {r.trajectory.id: r for r in batch.rows}.values()]
        assert len(split) > len(set(split)), "rows of one episode may be in several shards"


async def test_shards_without_rows_are_empty_and_valid(data_dir: Path):
    async with orchestrator(data_dir) as api, ranks(api, 8) as learner:
        await api.create_run(group_size=3, batch_size=3)
        await api.play(free=3)
        cut = await pull_all(learner)
        await learner[0].ack(cut[7])
    empty = [batch for batch in cut if not batch.rows]
    assert len(empty) == 5
    nothing = MomentSet(returns_by_turn=Moments(), returns_by_token=Moments(), rewards=Moments())
    for batch in empty:
        batch.verify()
        assert batch.shard is not None
        assert (batch.manifest.counts.rows, batch.shard.part.moments) == (3, nothing)


async def test_filler_rows_count_nowhere_and_copy_no_other_row(data_dir: Path):
    async with orchestrator(data_dir) as api, ranks(api, 2) as learner:
        await api.create_run(group_size=3, batch_size=3)
        await api.play(free=3)
        cut = await pull_all(learner)
    assert sorted(len(batch.rows) for batch in cut) == [1, 2]
    layouts = []
    for batch in cut:
        assert batch.shard is not None
        rows = filled(batch.rows, batch.shard.most_rows)
        assert len(rows) == 2
        layouts.append(packed(rows))
        assert all(isinstance(row, FillerRow) == (row not in batch.rows) for row in rows)
    sampled = sum(int(layout.mask.sum()) for layout in layouts)
    assert sampled == cut[0].manifest.counts.sampled_tokens, "the loss denominator is that of the real rows"


# A batch that is damaged, and pulling ahead


@pytest.mark.parametrize("restart", [False, True])
async def test_ranks_get_the_next_batch_together_where_one_is_damaged(data_dir: Path, restart: bool):
    async with orchestrator(data_dir) as api, client(api, "before") as learner:
        await api.create_run(group_size=1, batch_size=2, max_staleness=3)
        await api.play(free=4)
        before = await learner.pull("run")
        flip_record(data_dir, before.trajectories[1].episode)
        if not restart:
            await learner.pull("run")  # the body that is kept in memory is another one now
            await api.play(free=4)
            async with ranks(api, 2, "after") as after:
                shards = [*await pull_all(after), *await pull_all(after)]
    if restart:
        async with orchestrator(data_dir) as api, ranks(api, 2, "after") as after:
            await api.play(free=4)
            shards = await pull_all(after)
    first, second = shards[:2]
    assert first.id == second.id
    assert all(shard.id != before.id for shard in shards)
    for shard in shards:
        shard.verify()


async def test_a_loop_that_pulls_ahead_trains_on_every_batch_once_with_its_own_version(data_dir: Path):
    async with orchestrator(data_dir) as api, client(api, "one") as learner:
        await api.create_run(max_staleness=1)
        working = asyncio.create_task(play_on(api))
        trained: list[str] = []
        async with aclosing(learner.batches("run", prefetch=1)) as batches:
            async for batch in batches:
                assert batch.id not in trained
                trained.append(batch.id)
                reply = await learner.ack(batch, len(trained))
                assert reply.version == f"0.{len(trained)}"
                if len(trained) == 6:
                    break
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        status = await learner.run("run")
        assert (status.batches_acked, status.version) == (6, "0.6")
        async with client(api, "two") as other:
            left, lost = await other.resume("run")
            assert not lost
            assert not {found.id for found in left} & set(trained), "at most what was on its way when the loop ended"


async def play_on(api: Api) -> None:
    while True:
        attempts = await api.lease(free=8, wait_s=1)
        version = Version.parse((await api.ask("GET", "/v1/runs/run"))["version"])
        await api.submit(submission((attempt, record_for(attempt, version=version)) for attempt in attempts))
