"""Random histories of the real buffer and of its model: store, log, projection and scheduler on a real disk.

* After every command the buffer agrees with the model; after every restart its state is unchanged.
* A restart is graceful, or uses a copy of the directory as a crash would leave it, with an older projection or none.
* A projection rebuilt from the log alone equals the one that the service wrote, row by row.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from headrace.batch import batch as batches
from headrace.common.ids import new_id
from headrace.errors import BatchAlreadyAcked, BatchSuperseded, UnknownBatch
from headrace.trajectory import Provenance, Version
from headrace.wire import codec, messages
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.scheduler.commands import versions
from headrace_orchestrator.scheduler.commands.batches import ack
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.batches.bodies import ServedBatch
from headrace_orchestrator.settings import Settings
from tests.builders import make_segment
from tests.chaos.model import Batch, Model
from tests.orchestrator.scheduler.durable_values import durable_values
from tests.orchestrator.serving import record_for, submission, whole

T = TypeVar("T")

FILE_BYTES = 8 << 10
"""A file of the log holds a few records only: histories cross many of them."""

EXAMPLES = int(os.environ.get("CHAOS_EXAMPLES", "60"))
"""Number of histories; `make chaos` runs more."""

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Folder in memory: no power is cut here, and syncs would take most of the time."""

GONE = (BatchSuperseded, BatchAlreadyAcked, UnknownBatch)


class Buffer:
    """The real service on a data directory, without HTTP, with a clock that only tests move."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lives = 0
        self.now = 1000.0
        self.loop = asyncio.new_event_loop()
        self._never = self.loop.create_task(asyncio.Event().wait())
        self.data = root / "0"
        self._start()

    def _start(self) -> None:
        self.directory = DataDirectory.claim(self.data)
        made = Settings(data=self.data, log_file_bytes=FILE_BYTES)
        self.service = Service(made, self.directory, clock=lambda: self.now)
        self.do(self.service.start())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def left(self) -> Any:
        return self._never

    @property
    def core(self) -> Any:
        return self.service.require_stored().shell.core

    def stop(self) -> None:
        self.service.drain()
        self.do(self.service.close())
        self.directory.close()

    def restart(self) -> None:
        self.stop()
        self._start()

    def crash(self, projection: str) -> None:
        """Go on with a copy of the directory as it is now. ``projection``: the one of now, an older one, or none."""
        store = self.service.require_stored().shell.store
        if projection == "now":
            self.do(store.project())
        self.lives += 1
        copy = self.root / str(self.lives)
        shutil.copytree(self.data, copy, ignore=None if projection == "now" else shutil.ignore_patterns("projection*"))
        if projection == "older" and (self.root / "older").exists():
            for file in (self.root / "older").iterdir():
                shutil.copy(file, copy)
        if projection == "now":
            shutil.rmtree(self.root / "older", ignore_errors=True)
            (self.root / "older").mkdir()
            for file in copy.glob("projection*"):
                shutil.copy(file, self.root / "older")
        self.stop()
        shutil.rmtree(self.data)
        self.data = copy
        self._start()

    def end(self) -> None:
        self.stop()
        self._never.cancel()
        self.do(self.loop.shutdown_default_executor())
        self.loop.run_until_complete(asyncio.gather(self._never, return_exceptions=True))
        self.loop.close()

    def rows(self) -> dict[str, list[Any]]:
        """The rows of all tables except the cursor."""
        with sqlite3.connect(self.data / "projection.sqlite") as connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            rows = {
                name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall(), key=repr)
                for name in tables
                if name not in ("cursor",) and not name.startswith("sqlite_")
            }
        connection.close()
        return rows


def _ack(batch: str, request: messages.AckRequest, state: SchedulerState, now: float) -> messages.AckReply:
    return ack(state, state.run("run"), batch, request, now)


class Histories(RuleBasedStateMachine):
    """Workers, learners, time and restarts, in any order."""

    @initialize(
        groups=st.integers(1, 3), size=st.integers(1, 3), staleness=st.integers(0, 2), uses=st.sampled_from([1, 1, 2])
    )
    def begin(self, groups: int, size: int, staleness: int, uses: int) -> None:
        self.scratch = tempfile.TemporaryDirectory(prefix="headrace-model-", dir=MEMORY)
        self.buffer = Buffer(Path(self.scratch.name))
        self.model = Model(groups_per_batch=groups, group_size=size, max_staleness=staleness, max_uses=uses)
        self.attempts: list[messages.Assignment] = []
        self.session = 0
        self.holder: dict[str, int] = {}
        self.submitted: list[tuple[messages.Assignment, bytes]] = []
        spec = {
            "name": "run",
            "environments": [{"id": "test:Echo"}],
            "group_size": size,
            "batch_size": groups * size,
            "max_staleness": staleness,
            "max_uses": uses,
            "attempt_lease_s": 1e6,
            "batch_lease_s": 30.0,
        }
        self.buffer.do(self.buffer.service.create_run(msgspec.json.encode(spec)))

    # Workers

    @rule(free=st.integers(1, 6))
    def lease(self, free: int) -> None:
        request = messages.LeaseRequest(worker="w", slots=64, free=free)
        reply = self.buffer.do(self.buffer.service.lease(request, self.buffer.left))
        for attempt in reply.attempts:
            self.model.dispatch(attempt.group, attempt.episode)
        self.attempts += reply.attempts

    @precondition(lambda self: self.attempts)
    @rule(count=st.integers(1, 6), behind=st.sampled_from([0, 0, 0, 1]), length=st.sampled_from([8, 8, 400]))
    def submit(self, count: int, behind: int, length: int) -> None:
        now, self.attempts = self.attempts[:count], self.attempts[count:]
        version = max(0, self.model.version - behind)
        records = [(attempt, record_of(attempt, version, length)) for attempt in now]
        reply = self.buffer.do(self.buffer.service.require_stored().submissions.submit("w", submission(records)))
        for (attempt, record), result in zip(records, reply.results, strict=True):
            if result.verdict == "accepted":
                self.model.accept(attempt.group, attempt.episode, version, record)
                self.submitted.append((attempt, record))
            else:  # its lease ran out meanwhile, or its group was retired
                assert result.verdict in ("superseded", "not-yours"), result

    @rule(count=st.integers(2, 8))
    def work(self, count: int) -> None:
        """Lease and submit without a failure."""
        self.lease(count)
        if self.attempts:
            self.submit(len(self.attempts), 0, 8)

    @rule(count=st.integers(4, 16))
    def work_and_pull(self, count: int) -> None:
        """Lease, submit and pull."""
        self.work(count)
        self.pull(False)

    @rule(count=st.integers(4, 16))
    def work_and_train(self, count: int) -> None:
        """Lease, submit, pull and ack."""
        self.work_and_pull(count)
        if self.model.batches:
            self.ack(0, 1, 0)

    @precondition(lambda self: self.submitted)
    @rule(index=st.integers(0, 1000))
    def submit_again(self, index: int) -> None:
        attempt, record = self.submitted[index % len(self.submitted)]
        (result,) = self.buffer.do(
            self.buffer.service.require_stored().submissions.submit("w", submission([(attempt, record)]))
        ).results
        assert result.verdict == "duplicate", result

    # Learners

    @rule(restarts=st.sampled_from([False, False, False, True]))
    def pull(self, restarts: bool) -> None:
        """Pull a batch. ``restarts``: as a new process of the learner."""
        self.session += restarts
        request = messages.PullRequest(learner="learner", session=str(self.session), request=new_id())
        reply = self.buffer.do(self.buffer.service.require_stored().pulls.pull("run", request, self.buffer.left))
        if isinstance(reply, messages.EmptyReply):
            open_batches = [batch for batch in self.model.batches.values() if not batch.acked]
            assert self.model.next_batch() is None or open_batches, (reply, self.model)
            return
        self.check_served(reply)

    def check_served(self, served: ServedBatch) -> None:
        """Compare a served batch with the model."""
        self.holder[served.batch] = self.session
        body = self.buffer.do(whole(served))
        known = self.model.batches.get(served.batch)
        if known is not None:
            assert not known.acked
            assert body == known.body
            assert served.generation > known.generation
            known.generation = served.generation
            return
        manifest = batches.Batch.parse(body, generation=served.generation).manifest
        groups = [group.id for group in manifest.groups]
        for other in {self.model.groups[id].batch for id in groups} - {""}:
            self.check_dissolved(other)
        assert groups == self.model.next_batch(), (groups, self.model.groups, self.model.version)
        assert manifest.staleness_max <= self.model.max_staleness
        records = [record for id in groups for record in self.model.groups[id].members]
        assert sorted(manifest.trajectories) == sorted(codec.decode_head(self.model.records[e]).id for e in records)
        self.model.form(Batch(served.batch, groups, body, served.generation))

    def check_dissolved(self, batch: str) -> None:
        """Check that an open batch cannot be acked once one of its groups was served in another batch."""
        with pytest.raises(GONE):
            self.ack_of(batch, self.model.batches[batch].generation, "")
        self.model.dissolve(batch)

    def ack_of(self, batch: str, generation: int, version: str) -> messages.AckReply:
        """Ack as the learner's newest process, or as the one that the batch was leased to."""
        for session in dict.fromkeys((self.session, self.holder.get(batch, 0))):
            request = messages.AckRequest(
                learner="learner", session=str(session), generation=generation, version=version
            )
            command = functools.partial(_ack, batch, request)
            try:
                return self.buffer.do(self.buffer.service.execute(command))
            except BatchSuperseded as error:
                superseded = error
        raise superseded

    @precondition(lambda self: self.model.batches)
    @rule(index=st.integers(0, 1000), step=st.sampled_from([0, 1, 1]), back=st.sampled_from([0, 0, 0, 1]))
    def ack(self, index: int, step: int, back: int) -> None:
        batch = list(self.model.batches.values())[-1 - index % min(3, len(self.model.batches))]
        now = self.model.version + step
        try:
            reply = self.ack_of(batch.id, batch.generation - back, f"0.{now}" if step else "")
        except GONE:
            # An ack is accepted unless its generation is old, or the batch was acked, dissolved or released before.
            released = self.holder[batch.id] != self.session
            assert back or batch.acked or released or not self.is_open(batch)
            return
        if batch.acked:  # a repeated ack changes nothing
            return
        assert not back
        assert reply.version == f"0.{now}"
        self.model.ack(batch.id, now)

    def is_open(self, batch: Batch) -> bool:
        return batch.id in durable_values(self.buffer.core.state)["runs"]["run"]["batches"]

    @rule(step=st.sampled_from([1, 1, 2]))
    def announce(self, step: int) -> None:
        version = self.model.version + step
        request = messages.VersionRequest(version=f"0.{version}")
        self.buffer.do(
            self.buffer.service.execute(lambda state, now: versions.announce(state, state.run("run"), request, now))
        )
        self.model.announce(version)

    # Time and restarts

    @rule(seconds=st.sampled_from([1.0, 20.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.buffer.now += seconds
        shell = self.buffer.service.require_stored().shell

        async def tick() -> None:
            shell._tick()
            await shell.store.log.synced()

        self.buffer.do(tick())

    @rule(how=st.sampled_from(["graceful", "now", "older", "none"]))
    def restart(self, how: str) -> None:
        """Restart gracefully, or as after a crash with this projection."""
        before = durable_values(self.buffer.core.state)
        if how == "graceful":
            self.buffer.restart()
        else:
            self.buffer.crash(how)
        assert durable_values(self.buffer.core.state) == before

    # The end

    def teardown(self) -> None:
        if not hasattr(self, "buffer"):
            return
        try:
            self.check_stored_records()
            self.buffer.restart()
            self.buffer.stop()
            written = self.buffer.rows()
            for file in self.buffer.data.glob("projection*"):
                file.unlink()
            self.buffer._start()
            self.buffer.stop()
            assert self.buffer.rows() == written
            self.buffer._start()
        finally:
            self.buffer.end()
            self.scratch.cleanup()

    def check_stored_records(self) -> None:
        store = self.buffer.service.require_stored().shell.store
        self.buffer.do(store.project())
        for episode, record in self.model.records.items():
            stored = store.projection.find_episode(episode)
            assert stored is not None
            assert store.log.read(stored.location) == record


def record_of(attempt: messages.Assignment, version: int, length: int) -> bytes:
    """A valid record of the attempt, with all rows of this version."""
    number = Version(0, version)
    segment = make_segment(spans=((length - 4, length),), version=number)
    return codec.encode(record_for(attempt, segments=[segment], provenance=Provenance(worker="w")))


@pytest.mark.timeout(600)
def test_after_every_history_the_buffer_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
