"""Log writers: the same contract in a thread and in a process."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest

from headrace.errors import StoreError
from headrace.store.log_files import path_of
from headrace.store.log_format import FrameType, frame_bytes, pack_frame
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log.file_writer import PendingFrame
from headrace_orchestrator.buffer.log.log import Log, LostRange, Relocations
from headrace_orchestrator.buffer.log.writer import DiskFailure, LogWriter, WriteResult
from headrace_orchestrator.buffer.log.writer_process import LogWriterProcess
from headrace_orchestrator.service.lifecycle import StartLogWriter
from tests.orchestrator.buffer.test_log import opened_by, payloads, settled
from tests.orchestrator.small_disk import small_disk


async def test_the_writer_has_one_batch_at_a_time_and_its_result_is_delivered_on_the_event_loop(
    log_dir: Path, start_log_writer: StartLogWriter
):
    async with started(start_log_writer, log_dir) as writer:
        threads: list[threading.Thread] = []
        for number, batch in enumerate(([b"one"], [b"two", b"three" * 100], [b"four"])):
            outcome = await written(writer, frames(1, log_dir, *batch), threads)
            assert (outcome.written, outcome.failure, outcome.fatal) == (len(batch), None, "")
            assert (outcome.number, outcome.durable_bytes) == (1, path_of(log_dir, 1).stat().st_size)
            assert len(threads) == number + 1
        assert outcome.total_bytes == outcome.durable_bytes
        assert set(threads) == {threading.current_thread()}
    assert path_of(log_dir, 1).read_bytes() == packed(b"one", b"two", b"three" * 100, b"four")


async def test_every_failure_is_part_of_a_result_and_nothing_is_raised(log_dir: Path, start_log_writer: StartLogWriter):
    async with started(start_log_writer, log_dir) as writer:
        assert (await written(writer, frames(1, log_dir, b"one"))).written == 1
        safe_bytes = path_of(log_dir, 1).stat().st_size
        with no_file_grows(writer):
            refused = await written(writer, [*frames(1, log_dir, b"two"), queued(2, 0, b"three")])
            again = await written(writer, [queued(2, 0, b"two")], new_file=True)
        too_large = DiskFailure(errno.EFBIG, os.strerror(errno.EFBIG), file_missing=False)
        assert refused == WriteResult(0, 0, refused.took_s, 1, safe_bytes, safe_bytes, too_large)
        assert again.failure == too_large
        assert path_of(log_dir, 1).stat().st_size == safe_bytes
        outcome = await written(writer, [queued(2, 0, b"two")], new_file=True)
        assert (outcome.written, outcome.number, outcome.failure) == (1, 2, None)
        nonsense = await written(writer, [queued(2, 128, b"no footer", FrameType.FOOTER)])
        assert nonsense.written == 0
        assert nonsense.fatal.startswith("its writer failed (")


async def test_blocking_calls_return_their_result(log_dir: Path, start_log_writer: StartLogWriter):
    async with started(start_log_writer, log_dir) as writer:
        nothing = await asyncio.to_thread(writer.reopen, 7, 0, b"")
        assert nothing.failure == DiskFailure(errno.ENOENT, os.strerror(errno.ENOENT), file_missing=False)
        with no_file_grows(writer):
            refused = await asyncio.to_thread(writer.write_blocking, [queued(1, 0, b"one")])
        assert refused.failure is not None
        assert (refused.written, refused.failure.errno) == (0, errno.EFBIG)


async def test_a_closed_writer_has_written_its_batch(log_dir: Path, start_log_writer: StartLogWriter):
    async with started(start_log_writer, log_dir) as writer:
        writer.write(frames(1, log_dir, *(b"%d" % number for number in range(100))), lambda outcome: None)
    assert path_of(log_dir, 1).read_bytes() == packed(*(b"%d" % number for number in range(100)))


# The log on a failing disk --------------------------------------------------------------------------------


async def test_a_failing_disk_is_reported_and_the_frames_are_written_when_it_works_again(
    log_dir: Path, start_log_writer: StartLogWriter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 3600.0)
    moved: list[Relocations] = []
    async with opened_by(start_log_writer, log_dir) as (log, _):
        log.on_relocated = moved.append
        log.append(FrameType.CONTROL, b"safe")
        await log.synced()
        with no_file_grows(log._writer):
            place = log.append(FrameType.TRAJECTORY, b"kept")
            waiters = await asyncio.gather(*(log.synced() for _ in range(3)), return_exceptions=True)
            assert [type(waiter) for waiter in waiters] == [StoreError] * 3
            assert os.strerror(errno.EFBIG) in str(waiters[0])
            log.retry()
            await settled(log)
            assert not log.stopped
            assert log.failure == os.strerror(errno.EFBIG)
        log.retry()
        await settled(log)
        await log.synced()
        assert log.read(moved[0][place.position]) == b"kept"
    await assert_holds(start_log_writer, log_dir, b"safe", b"kept")


async def test_a_failed_rotation_loses_nothing(
    log_dir: Path, start_log_writer: StartLogWriter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 3600.0)
    async with opened_by(start_log_writer, log_dir) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        await log.synced()
        with no_file_grows(log._writer):
            log.rotate(b"state")
            log.append(FrameType.CONTROL, b"two")
            with pytest.raises(StoreError):
                await log.synced()
        log.retry()
        await settled(log)
        log.append(FrameType.CONTROL, b"three")
    await assert_holds(start_log_writer, log_dir, b"one", b"two", b"three")


async def test_a_start_on_a_failing_disk_raises(log_dir: Path, start_log_writer: StartLogWriter):
    with closing(DataDirectory.claim(log_dir.parent)) as directory:
        writer = start_log_writer(directory)
        log = Log(log_dir, file_bytes=1 << 20, writer=writer)
        with no_file_grows(writer), pytest.raises(StoreError, match="File too large"):
            log.start(lambda: None)
        await log.close()
    await assert_holds(start_log_writer, log_dir)


async def test_a_full_disk_is_reported_and_everything_is_written_once_there_is_space(
    tmp_path: Path, start_log_writer: StartLogWriter, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 3600.0)
    with small_disk(tmp_path / "disk", mib=4) as disk:
        log_dir = disk / "data" / "log"
        async with opened_by(start_log_writer, log_dir) as (log, _):
            (disk / "ballast").write_bytes(bytes(2 << 20))
            log.append(FrameType.TRAJECTORY, b"a" * (1 << 20))
            await log.synced()
            log.append(FrameType.TRAJECTORY, b"b" * (1 << 20))
            with pytest.raises(StoreError, match="No space left on device"):
                await log.synced()
            assert log.phase == "disk full"
            (disk / "ballast").unlink()
            log.retry()
            await settled(log)
            await log.synced()
        await assert_holds(start_log_writer, log_dir, b"a" * (1 << 20), b"b" * (1 << 20))


async def test_a_start_on_a_read_only_disk_raises(tmp_path: Path, start_log_writer: StartLogWriter):
    with small_disk(tmp_path / "disk", mib=4) as disk:
        log_dir = disk / "data" / "log"
        async with opened_by(start_log_writer, log_dir) as (log, _):
            log.append(FrameType.CONTROL, b"one")
        with closing(DataDirectory.claim(log_dir.parent)) as directory:
            writer = start_log_writer(directory)
            log = Log(log_dir, file_bytes=1 << 20, writer=writer)
            assert payloads(list(log.scan())) == [b"one"]
            # The lock file is open for writing, so the whole disk cannot be remounted read-only.
            subprocess.run(["mount", "--bind", log_dir, log_dir], check=True)
            try:
                subprocess.run(["mount", "-o", "remount,bind,ro", log_dir], check=True)
                with pytest.raises(StoreError, match="Read-only file system"):
                    log.start(lambda: None)
            finally:
                subprocess.run(["umount", log_dir], check=True)
            await log.close()
        await assert_holds(start_log_writer, log_dir, b"one")


@pytest.mark.parametrize("away", ["deleted", "renamed"])
async def test_a_deleted_or_renamed_file_is_reported_and_the_log_continues_in_a_new_one(
    log_dir: Path, start_log_writer: StartLogWriter, away: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 3600.0)
    async with opened_by(start_log_writer, log_dir) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        await log.synced()
        file = path_of(log_dir, 1)
        file.unlink() if away == "deleted" else file.rename(log_dir.parent / "elsewhere")
        log.append(FrameType.CONTROL, b"two")
        with pytest.raises(StoreError, match=r"its current file 00000001\.log was deleted or renamed"):
            await log.synced()
        assert log.needs_state
        log.retry()
        await settled(log)
        log.rotate(b"state behind two")
        await log.synced()
        assert not log.needs_state
    async with opened_by(start_log_writer, log_dir) as (log, _):
        assert log.state == b"state behind two"


@pytest.mark.parametrize("next_write", ["a record", "a change of files"])
async def test_a_directory_that_another_process_took_stops_the_log(
    log_dir: Path, start_log_writer: StartLogWriter, next_write: str
):
    async with opened_by(start_log_writer, log_dir) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        await log.synced()
        (log_dir.parent / "owner").unlink()
        with closing(DataDirectory.claim(log_dir.parent)):
            size_bytes = path_of(log_dir, 1).stat().st_size
            if next_write == "a record":
                log.append(FrameType.CONTROL, b"two")
            else:
                log.rotate(b"state")
            with pytest.raises(StoreError, match="was taken by another orchestrator, of epoch 2; this one is of epoch"):
                await log.synced()
            assert log.stopped
            with pytest.raises(StoreError):
                log.append(FrameType.CONTROL, b"three")
            assert [file.stat().st_size for file in log_dir.iterdir()] == [size_bytes]


# Helpers ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def started(start_log_writer: StartLogWriter, log_dir: Path) -> AsyncIterator[LogWriter]:
    """A writer without a log, closed at the end."""
    with closing(DataDirectory.claim(log_dir.parent)) as directory:
        log_dir.mkdir()
        writer = start_log_writer(directory)
        try:
            yield writer
        finally:
            await writer.close()


async def written(
    writer: LogWriter,
    batch: list[PendingFrame],
    threads: list[threading.Thread] | None = None,
    *,
    new_file: bool = False,
) -> WriteResult:
    """The result of a batch; it is delivered once, in one of these threads."""
    outcome: asyncio.Future[WriteResult] = asyncio.get_running_loop().create_future()

    def on_result(result: WriteResult) -> None:
        if threads is not None:
            threads.append(threading.current_thread())
        outcome.set_result(result)

    writer.write(batch, on_result, new_file=new_file)
    return await outcome


def queued(file: int, offset: int, payload: bytes, kind: FrameType = FrameType.TRAJECTORY) -> PendingFrame:
    return PendingFrame(file, offset, kind, payload, frame_bytes(kind, len(payload)))


def frames(file: int, log_dir: Path, *payloads: bytes) -> list[PendingFrame]:
    """Frames behind the current content of a file."""
    path = path_of(log_dir, file)
    offset = path.stat().st_size if path.exists() else 0
    frames = []
    for payload in payloads:
        frames.append(queued(file, offset, payload))
        offset += frames[-1].size_bytes
    return frames


def packed(*payloads: bytes) -> bytes:
    return b"".join(buffer for payload in payloads for buffer in pack_frame(FrameType.TRAJECTORY, payload))


@contextmanager
def no_file_grows(writer: LogWriter) -> Iterator[None]:
    """Set a resource limit that fails every append of the writer's process."""
    pid = writer._process.pid if isinstance(writer, LogWriterProcess) else 0
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


async def assert_holds(start_log_writer: StartLogWriter, log_dir: Path, *expected: bytes) -> None:
    """Assert that a start finds exactly these payloads, and no damage."""
    async with opened_by(start_log_writer, log_dir) as (_, items):
        assert payloads(items) == list(expected)
        assert not [item for item in items if isinstance(item, LostRange)]
