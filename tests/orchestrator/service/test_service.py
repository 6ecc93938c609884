"""Order, durability and time in the service."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from headrace.batch.batch import Batch
from headrace.common.ids import new_id
from headrace.errors import StoreError
from headrace.store.log_format import FrameType
from headrace.wire import codec, messages
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log import log as log_module
from headrace_orchestrator.buffer.log.log import LocatedFrame, Log
from headrace_orchestrator.buffer.projection.sqlite import SqliteProjection
from headrace_orchestrator.scheduler.commands import leases, runs
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import AnyEvent, GroupRetired, RunCreated, WorkerDraining
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.batches import bodies
from headrace_orchestrator.service.storage.frames import EVENTS_PER_FRAME, Write, events_of
from headrace_orchestrator.service.storage.record_events import event_of, record_for_event
from headrace_orchestrator.service.storage.replay import replay
from headrace_orchestrator.service.storage.store import Store
from headrace_orchestrator.settings import Settings
from tests.builders import make_failed, make_id, make_multi_agent, make_multi_segment, make_trajectory, make_truncated
from tests.orchestrator.scheduler.durable_values import durable_values
from tests.orchestrator.serving import Api, orchestrator, record_for, refusing_disk, submission, until


class SlowDisk:
    """A disk that holds every sync until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go = threading.Event()
        self._go.set()
        self.waiting = 0
        real = os.fdatasync

        def sync(descriptor: int) -> None:
            self.waiting += 1
            assert self._go.wait(60)
            self.waiting -= 1
            real(descriptor)

        monkeypatch.setattr(os, "fdatasync", sync)

    def hold(self) -> None:
        self._go.clear()

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    found = SlowDisk(monkeypatch)
    yield found
    found.let_go()


WAITS = {"worker": "waits", "slots": 1, "free": 1, "wait_s": 30, "pool": "without-runs"}
"""A lease request that waits until the service fails."""


async def test_no_response_ends_before_everything_that_it_rests_on_is_on_disk(api: Api, disk: SlowDisk):
    await api.create_run()
    await api.play(free=4)
    batch = await api.pull()
    assert isinstance(batch, Batch)
    attempt = (await api.lease(free=1))[0]
    disk.hold()
    answers = [
        asyncio.create_task(api.submit(submission([(attempt, record_for(attempt))]))),
        asyncio.create_task(api.ack(batch, "0.1")),
        # The error rests on the ack before it, so it waits as well.
        asyncio.create_task(api.ack(batch, "0.2", status=409)),
    ]
    await until(lambda: is_held(disk))
    # The loop is free meanwhile: what rests on nothing is answered.
    await api.ask("GET", "/healthz")
    assert not any(answer.done() for answer in answers)
    disk.let_go()
    results = await asyncio.gather(*answers)
    assert results[0][0].verdict == "accepted"
    assert results[2]["code"] == "batch-already-acked"


@pytest.mark.parametrize("held", [True, False], ids=["held", "streamed"])
async def test_a_batch_is_sent_while_its_lease_is_written_and_its_end_when_that_is_on_disk(
    api: Api, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, held: bool
):
    if not held:
        monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 0)
    await api.create_run()
    await api.play(free=4)
    disk.hold()
    request = {"learner": "learner", "session": "one", "request": new_id()}
    async with api.session.post("/v1/runs/run/pull", data=msgspec.json.encode(request)) as answer:
        size = answer.content_length or 0
        begun = await answer.content.readexactly(size - codec.ALIGNMENT)
        await until(lambda: is_held(disk))
        await api.ask("GET", "/healthz")
        assert answer.content.total_bytes == len(begun)
        disk.let_go()
        body = begun + await answer.content.read()
    assert len(body) == size
    Batch.parse(body).verify()


@pytest.mark.parametrize("held", [True, False], ids=["held", "streamed"])
async def test_a_batch_whose_lease_cannot_be_written_is_cut_off_and_served_again(
    api: Api, monkeypatch: pytest.MonkeyPatch, held: bool
):
    if not held:
        monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 0)
    await api.create_run()
    await api.play(free=4)
    with refusing_disk(monkeypatch), pytest.raises(aiohttp.ClientPayloadError):
        await api.pull_raw(request="same")

    async def pulled() -> Any:
        with contextlib.suppress(AssertionError):  # the disk is not known to be well yet
            return await api.pull(request="same")

    batch = await until(pulled)
    assert isinstance(batch, Batch)
    batch.verify()


async def test_a_body_is_streamed_on_when_a_disk_that_refused_takes_its_records_in_another_file(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 0)
    monkeypatch.setattr(log_module, "FIRST_RETRY_S", 0.01)
    await api.create_run()
    attempts = await api.lease(free=4)
    begun, refused, moved = threading.Event(), threading.Event(), threading.Event()
    sync, read = os.fdatasync, bodies.BatchBodies._read

    def refuse_once(descriptor: int) -> None:
        if not refused.is_set():
            assert refused.wait(10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    def read_late(*arguments: Any) -> Any:
        begun.set()
        assert moved.wait(10)
        return read(*arguments)

    monkeypatch.setattr(os, "fdatasync", refuse_once)
    monkeypatch.setattr(bodies.BatchBodies, "_read", read_late)
    submitting = asyncio.create_task(api.submit(submission((a, record_for(a)) for a in attempts)))
    await api.ask("GET", "/healthz")
    pulling = asyncio.create_task(api.pull(wait_s=10))
    await asyncio.to_thread(begun.wait, 10)
    refused.set()
    with pytest.raises(AssertionError, match="cannot be written"):
        await submitting

    async def ready() -> bool:
        async with api.session.get("/readyz") as answer:
            return answer.status == 200

    await until(ready)
    moved.set()
    batch = await pulling
    assert isinstance(batch, Batch)
    batch.verify()


async def test_a_batch_may_hold_records_that_are_not_on_disk_yet(api: Api, disk: SlowDisk):
    await api.create_run()
    attempts = await api.lease(free=4)
    disk.hold()
    submitting = asyncio.create_task(api.submit(submission((a, record_for(a)) for a in attempts)))
    await until(lambda: is_held(disk))
    pulling = asyncio.create_task(api.pull())
    await api.ask("GET", "/healthz")
    disk.let_go()
    await submitting
    batch = await pulling
    assert isinstance(batch, Batch)
    batch.verify()


async def test_a_command_is_decided_and_its_events_are_appended_in_one_turn_of_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    await api.create_run()
    steps: list[str] = []
    create, append = runs.create_run, Store.append

    def created(state: SchedulerState, prepared: runs.PreparedRun, now: float) -> None:
        steps.append(f"decide {prepared.name}")
        create(state, prepared, now)

    def appended(store: Store, writes: Sequence[Write]) -> None:
        steps.extend(f"append {write.run}" for write in writes if isinstance(write, RunCreated))
        append(store, writes)

    monkeypatch.setattr(runs, "create_run", created)
    monkeypatch.setattr(Store, "append", appended)
    await asyncio.gather(*(api.create_run(name=name) for name in ("one", "two", "three")))
    assert len(steps) == 6
    for decided, stored in zip(steps[::2], steps[1::2], strict=True):
        assert (decided, stored) == (f"decide {decided[7:]}", f"append {decided[7:]}")


async def test_a_timer_for_the_schedulers_next_deadline_lets_time_pass(api: Api):
    await api.create_run(attempt_lease_s=0.2, batch_lease_s=0.2)
    first = (await api.lease(free=1))[0]
    others = await api.lease("worker-2", free=8, wait_s=0)
    assert first.episode not in {a.episode for a in others}
    regranted = await api.lease("worker-3", free=1, wait_s=30)
    assert regranted[0].attempt == 2


async def test_no_time_passes_while_the_disk_refuses_writes(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    directory = DataDirectory.claim(data_dir)
    service = Service(Settings(data=data_dir), directory)
    await service.start()
    try:
        shell = service.require_stored().shell
        await service.create_run(b'{"name": "run", "environments": [{"id": "test:Echo"}]}')
        lease = messages.LeaseRequest(worker="w", slots=1, free=1)
        await service.execute(lambda state, now: leases.lease(state, lease, now))
        assert shell._timer is not None
        with refusing_disk(monkeypatch):
            with pytest.raises(StoreError):
                await service.close_run("run")
            shell.set_timer()
            assert shell._timer is None

        async def time_passes() -> bool:
            return shell._timer is not None

        assert await until(time_passes)
    finally:
        await service.close()
        directory.close()


async def test_gauges_are_read_from_the_state_when_they_are_scraped(api: Api):
    await api.create_run()
    async with api.session.get("/metrics") as answer:
        assert 'headrace_run_episodes_leased{run="run"} 0.0' in await answer.text()
    await api.lease(free=3)
    async with api.session.get("/metrics") as answer:
        assert 'headrace_run_episodes_leased{run="run"} 3.0' in await answer.text()


async def test_roles_are_checked_before_the_body_is_read(data_dir: Path, tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[tokens]]\nname = "w"\nroles = ["worker"]\ntoken = "0123456789abcdef"\n')
    async with orchestrator(data_dir, tokens=tokens, max_body_bytes=10) as api:
        await api.ask("POST", "/v1/worker/submit?worker=w", bytes(100), status=401)
        await api.ask("POST", "/v1/worker/submit?worker=w", bytes(100), status=413, token="0123456789abcdef")


async def test_a_larger_body_is_streamed_and_is_the_same(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    async with orchestrator(data_dir) as api:
        await api.create_run(batch_size=16)
        for _ in range(4):
            await api.play(free=4)
        whole, _ = await api.pull_raw(request="same")
        monkeypatch.setattr(bodies, "SMALL_BODY_BYTES", 0)
        monkeypatch.setattr(bodies, "CHUNK_BYTES", 2000)
    async with orchestrator(data_dir) as api:
        streamed, headers = await api.pull_raw(request="same")
        assert streamed == whole
        assert int(headers["Content-Length"]) == len(whole)


async def test_a_restart_reads_a_frozen_batch_from_the_log(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await api.play(free=4)
        whole, _ = await api.pull_raw(request="same")
    async with orchestrator(data_dir) as api:
        assert (await api.pull_raw(request="same"))[0] == whole


RECORDS = [
    make_trajectory(rewards=[0.5, -1.0, 2.0]),
    make_truncated(),
    make_failed(),
    make_multi_segment(),
    make_multi_agent(),
    make_multi_agent(opponent_trains=True),
]


@pytest.mark.parametrize("trajectory", RECORDS)
def test_a_record_gives_the_same_event_when_it_is_submitted_and_when_it_is_read_back(trajectory: Any):
    record = codec.encode(trajectory)
    assert event_of(trajectory, len(record)) == event_of(codec.decode_head(record), len(record))


def test_rewards_are_summed_for_agents_that_train_and_never_for_failures():
    assert event_of(make_multi_agent(), 64).rewards == {"player": 1.0}
    assert event_of(make_multi_agent(opponent_trains=True), 64).rewards == {"opponent": -1.0, "player": 1.0}
    assert event_of(make_failed(), 64).rewards == {}
    outcome = event_of(make_multi_segment(), 64)
    assert (str(outcome.low), str(outcome.high), outcome.rows, outcome.turns) == ("0.1", "0.2", 2, 3)


def test_a_record_that_the_scheduler_wrote_itself_has_no_worker_in_its_provenance():
    outcome = msgspec.structs.replace(event_of(make_failed(), 64), by_worker=False, trajectory="")
    trajectory = record_for_event(outcome, new_id=lambda: make_id(7), headrace_version="1")
    assert (trajectory.id, trajectory.segments, trajectory.provenance.worker) == (make_id(7), [], "")
    again = event_of(trajectory, 64)
    assert not again.by_worker
    assert again.failure == outcome.failure


async def replayed(data: Path) -> tuple[Scheduler, Store, int]:
    """Replay the log of a data directory; also the number of records that were skipped."""
    log = Log(data / "log", file_bytes=1 << 30)
    store = Store(log, SqliteProjection(data / "projection.sqlite", log.id))
    core = Scheduler(epoch=9, new_id=lambda: "id", new_nonce=lambda: "nonce")
    passed_over: list[None] = []
    replay(core, store, 0.0, damaged=lambda: passed_over.append(None), stopping=lambda: False)
    return core, store, len(passed_over)


async def test_the_index_is_the_same_whether_events_come_from_commands_or_from_the_log(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    stores: list[Store] = []
    real = Store.__init__

    def spy(self: Store, *args: Any) -> None:
        real(self, *args)
        stores.append(self)

    monkeypatch.setattr(Store, "__init__", spy)
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await api.play(free=8)
        await api.ack(await api.pull(), "0.1")
        await api.pull()
        await api.play(free=2)
    live = stores[0]
    _, store, passed_over = await replayed(data_dir)
    assert passed_over == 0
    assert store.index.groups == live.index.groups
    assert store.index.batches == live.index.batches
    assert store.index.trajectories == live.index.trajectories
    await store.close()


async def test_events_of_one_commit_share_frames_in_their_order(
    data_dir: Path,
):
    log = Log(data_dir / "log", file_bytes=1 << 30)
    assert list(log.scan()) == []
    log.start(lambda: None)
    store = Store(log, SqliteProjection(data_dir / "projection.sqlite", log.id))
    events: list[AnyEvent] = [WorkerDraining(worker=f"worker-{number}") for number in range(2 * EVENTS_PER_FRAME + 1)]
    store.append(events)
    await store.close()

    log = Log(data_dir / "log", file_bytes=1 << 30)
    frames = [item.frame for item in log.scan() if isinstance(item, LocatedFrame)]
    read = [events_of(frame)[0] for frame in frames if frame.type is FrameType.CONTROL]
    await log.close()
    assert [len(share) for share in read] == [EVENTS_PER_FRAME, EVENTS_PER_FRAME, 1]
    assert [event for share in read for event in share] == events


async def test_an_event_that_does_not_fit_costs_no_other_event_of_its_frame(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
    log = Log(data_dir / "log", file_bytes=1 << 30)
    list(log.scan())
    log.start(lambda: None)
    unfit = GroupRetired(run="run", group="never admitted", reason="stale")
    events = [WorkerDraining(worker="one"), unfit, WorkerDraining(worker="two")]
    log.append(FrameType.CONTROL, msgspec.msgpack.encode(events))
    await log.close()
    core, store, passed_over = await replayed(data_dir)
    assert durable_values(core.state)["draining"] == ["one", "two"]
    assert passed_over == 1
    await store.close()


async def test_the_first_terminal_record_of_an_episode_wins(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        attempts = await api.play(free=4)
    log = Log(data_dir / "log", file_bytes=1 << 30)
    found = [item for item in log.scan() if isinstance(item, LocatedFrame)]
    log.start(lambda: None)
    stored = next(item.frame.payload for item in found if item.frame.type is FrameType.TRAJECTORY)
    second = msgspec.structs.replace(codec.decode(stored), id=make_id(99))
    log.append(FrameType.TRAJECTORY, codec.encode(second))
    await log.close()

    async with orchestrator(data_dir) as api:
        assert (await api.ask("GET", "/v1/runs/run"))["episodes"] == {"finished": 4}
        batch = await api.pull()
        assert isinstance(batch, Batch)
        assert make_id(99) not in batch.manifest.trajectories
        assert {t.episode for t in batch.trajectories} == {a.episode for a in attempts}


async def test_events_that_build_on_a_lost_one_are_skipped(data_dir: Path):
    async with orchestrator(data_dir) as api:
        await api.create_run()
        await api.play(free=4)
        await api.pull()
    # Without its first frames the log has records of a run that it does not know.
    file = data_dir / "log" / "00000001.log"
    raw = bytearray(file.read_bytes())
    raw[:4096] = b"\xff" * 4096
    file.write_bytes(raw)
    core, store, passed_over = await replayed(data_dir)
    assert core.state.runs == {}
    assert passed_over > 5
    await store.close()


async def test_heartbeats_renew_leases_and_list_attempts_that_are_over(api: Api):
    await api.create_run()
    attempts = await api.lease(free=2)
    keys = [messages.AttemptKey(a.episode, a.attempt, a.nonce) for a in attempts]
    forged = messages.AttemptKey(attempts[0].episode, 9, "x")
    request = messages.HeartbeatRequest(worker="worker-1", slots=4, holding=[*keys, forged])
    reply = msgspec.convert(await api.ask("POST", "/v1/worker/heartbeat", request), messages.HeartbeatReply)
    assert reply.interval_s == 10.0
    assert [(cancel.attempt, cancel.reason) for cancel in reply.cancels] == [(9, "superseded")]


async def is_held(disk: SlowDisk) -> bool:
    return disk.waiting > 0


class Unstorable(WorkerDraining, frozen=True, kw_only=True, tag="WorkerDraining"):
    """An event that does not fit a frame."""

    number: int


async def test_the_state_in_memory_never_gets_ahead_of_the_log(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    real = Scheduler.drain

    def drain(core: Scheduler) -> list[AnyEvent]:
        return [*real(core), *([Unstorable(worker="w", number=1 << 70)] if core.state.runs else [])]

    async def fail() -> None:
        async with orchestrator(data_dir) as api:
            await api.create_run(name="before")
            waiting = asyncio.create_task(api.ask("POST", "/v1/worker/lease", WAITS, status=503))
            monkeypatch.setattr(Scheduler, "drain", drain)
            problem = await api.ask("POST", "/v1/runs", {"name": "lost"}, status=500)
            assert "memory and log differ" in problem["detail"]
            told = await waiting
            assert told["phase"] == "failed"
            assert "memory and log differ" in told["detail"]

    with pytest.raises(StoreError, match="memory and log differ"):
        await fail()
    monkeypatch.undo()
    async with orchestrator(data_dir) as api:
        assert [run["name"] for run in await api.ask("GET", "/v1/runs")] == ["before"]


async def test_all_events_of_a_commit_are_encoded_before_any_is_stored(data_dir: Path):
    log = Log(data_dir / "log", file_bytes=1 << 30)
    assert list(log.scan()) == []
    log.start(lambda: None)
    store = Store(log, SqliteProjection(data_dir / "projection.sqlite", log.id))
    size_bytes = log.size_bytes
    with pytest.raises(OverflowError):
        store.append([*[WorkerDraining(worker="w")] * EVENTS_PER_FRAME, Unstorable(worker="w", number=1 << 70)])
    assert log.size_bytes == size_bytes
    await store.close()


async def test_a_timer_that_fails_ends_the_service(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    def tick(core: Scheduler, now: float) -> None:
        raise RuntimeError("time is out of joint")

    async def fail() -> None:
        async with orchestrator(data_dir) as api:
            await api.create_run(attempt_lease_s=2)  # its response is sent before the timer runs
            monkeypatch.setattr(Scheduler, "tick", tick)
            await api.lease(free=1)
            waiting = {**WAITS, "worker": "other", "pool": "another"}
            assert "out of joint" in (await api.ask("POST", "/v1/worker/lease", waiting, status=503))["detail"]

    with pytest.raises(StoreError, match="out of joint"):
        await fail()


async def test_groups_of_one_id_in_two_runs_are_two_groups(data_dir: Path):
    async with orchestrator(data_dir) as api:
        for run in ("run", "other"):
            await api.create_run(name=run, environments=[], group_size=1, batch_size=1)
            group = {"id": "g", "task": {"environment": "test:Echo"}}
            await api.ask("POST", f"/v1/runs/{run}/groups", {"groups": [group]}, status=201)
        await api.play(free=4)
        first = {run: await api.pull_raw(run, groups=["g"], request="r") for run in ("run", "other")}
        batch = await api.pull("run", groups=["g"], request="r")
        assert isinstance(batch, Batch)
        await api.ack(batch)
    async with orchestrator(data_dir) as api:
        assert (await api.pull_raw("other", groups=["g"], request="r"))[0] == first["other"][0]


async def test_records_that_share_an_id_are_served_again_as_the_same_bytes(data_dir: Path):
    """An older log may hold such records; submissions of them are refused now."""
    async with orchestrator(data_dir) as api:
        await api.create_run(group_size=1, batch_size=2)
        one, two = await api.lease(free=2)
        name = make_id(7)
        assert [r.verdict for r in await api.submit(submission([(one, record_for(one, id=name))]))] == ["accepted"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "episodes_of", lambda store, trajectories: {})
            record = record_for(two, id=name, rewards=[0.25, 0.5])
            assert [r.verdict for r in await api.submit(submission([(two, record)]))] == ["accepted"]
        before, _ = await api.pull_raw(request="r")
    async with orchestrator(data_dir) as api:
        again, _ = await api.pull_raw(request="r")
        assert again == before
        assert len((await api.ask("GET", "/v1/runs/run/trajectories"))["trajectories"]) == 2
