"""The log: durability, damage, and failing disks."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CorruptRecord, SetupError, StoreError, UnknownLogFormat
from headrace.store import log_files, log_format
from headrace.store.log_format import FileHead, FooterBuilder, Frame, FrameType
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log.files import LocalLogFiles
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import LocatedFrame, Log, LostRange, Relocations
from headrace_orchestrator.buffer.log.writer import LogWriter
from headrace_orchestrator.buffer.log.writer_thread import LogWriterThread
from headrace_orchestrator.service.lifecycle import StartLogWriter

FILE_BYTES = 1 << 30


@asynccontextmanager
async def opened(
    path: Path, *, file_bytes: int = FILE_BYTES, writer: LogWriter | None = None
) -> AsyncIterator[tuple[Log, list[LocatedFrame | LostRange]]]:
    """A log that was read to its end, and its content."""
    log = Log(path, file_bytes=file_bytes, writer=writer)
    try:
        items = list(log.scan())
        log.start(lambda: None)
        yield log, items
    finally:
        if log.failure:
            with pytest.raises(StoreError):
                await log.synced()
        await log.close()


@asynccontextmanager
async def opened_by(
    start_log_writer: StartLogWriter, log_dir: Path, *, file_bytes: int = FILE_BYTES
) -> AsyncIterator[tuple[Log, list[LocatedFrame | LostRange]]]:
    """The log of a data directory, with a log writer of its own."""
    with closing(DataDirectory.claim(log_dir.parent)) as directory:
        async with opened(log_dir, file_bytes=file_bytes, writer=start_log_writer(directory)) as log_and_found:
            yield log_and_found


def payloads(items: list[LocatedFrame | LostRange]) -> list[bytes]:
    """Payloads of the frames that were appended."""
    placed = [item for item in items if isinstance(item, LocatedFrame)]
    return [item.frame.payload for item in placed if item.frame.type not in (FrameType.FILE_HEAD, FrameType.FOOTER)]


async def test_acknowledged_means_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        real(descriptor)
        synced.append(os.fstat(descriptor).st_size)

    async with opened(tmp_path) as (log, _):
        monkeypatch.setattr(os, "fdatasync", sync)
        log.append(FrameType.CONTROL, b"one")
        await log.synced()
        assert synced
        assert synced[-1] == log.size_bytes


async def test_one_sync_covers_all_waiting_frames(tmp_path: Path):
    rounds: list[int] = []
    log = Log(tmp_path, file_bytes=FILE_BYTES, on_sync=lambda duration_s, size: rounds.append(size))
    list(log.scan())
    log.start(lambda: None)
    head_bytes = log.size_bytes
    for number in range(100):
        log.append(FrameType.TRAJECTORY, b"%d" % number)
    await asyncio.gather(*(log.synced() for _ in range(50)))
    assert len(rounds) == 1
    assert rounds[0] == log.size_bytes - head_bytes
    await log.close()


async def test_appended_frames_come_back_in_order_after_a_restart(log_dir: Path, start_log_writer: StartLogWriter):
    async with opened_by(start_log_writer, log_dir) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        log.append(FrameType.TRAJECTORY, b"two" * 100)
    async with opened_by(start_log_writer, log_dir) as (log, items):
        assert payloads(items) == [b"one", b"two" * 100]
        log.append(FrameType.BATCH, b"three")
    async with opened_by(start_log_writer, log_dir) as (_, items):
        assert payloads(items) == [b"one", b"two" * 100, b"three"]


async def test_a_record_is_readable_before_and_after_it_is_written(log_dir: Path, start_log_writer: StartLogWriter):
    async with opened_by(start_log_writer, log_dir) as (log, _):
        location = log.append(FrameType.TRAJECTORY, b"record")
        assert log.read(location) == b"record"
        await log.synced()
        assert log.read(location) == b"record"


async def test_a_full_file_is_sealed_with_a_footer_and_never_changed_again(
    log_dir: Path, start_log_writer: StartLogWriter
):
    def sealed() -> dict[str, tuple[bytes, int]]:
        files = sorted(log_dir.glob("*.log"))[:-1]
        return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    before: dict[str, tuple[bytes, int]] = {}
    places: list[Location] = []
    for _ in range(3):
        async with opened_by(start_log_writer, log_dir, file_bytes=1000) as (log, _):
            for _ in range(20):
                places.append(log.append(FrameType.TRAJECTORY, bytes([len(places)]) * 100))
                if log.full:
                    log.rotate(b"state behind %d" % len(places))
            await log.synced()
            assert [log.read(place)[0] for place in places] == list(range(len(places)))
            assert log.size_bytes == sum(file.stat().st_size for file in log_dir.glob("*.log"))
            after = sealed()
            assert {name: after[name] for name in before} == before
            before = after
    assert len(before) == 10
    assert sorted(place.position for place in places) == [place.position for place in places]
    for file in log_files.newest_first(log_dir, list(range(1, 11))):
        assert file.head is not None
        assert file.head.state == (b"state behind %d" % (6 * (file.number - 1)) if file.number > 1 else None)
        *frames, last = file.scan()
        assert isinstance(last, Frame)
        assert last.type is FrameType.FOOTER
        footer, tally = log_format.parse_footer(last.payload), FooterBuilder(0)
        places = {kind: array("I", footer.places.get(kind, b"")) for kind in FrameType}
        assert [len(places[kind]) for kind in FrameType] == [1, 0, 6, 0, 0]
        for frame in frames:
            assert isinstance(frame, Frame)
            tally.add_read(frame)
            assert frame.offset // 64 in places[frame.type]
        assert tally.matches(footer)


async def test_the_next_file_opens_with_the_current_control_state(log_dir: Path, start_log_writer: StartLogWriter):
    async with opened_by(start_log_writer, log_dir) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        log.rotate(b"state behind one")
        log.append(FrameType.CONTROL, b"two")
    async with opened_by(start_log_writer, log_dir) as (log, items):
        assert payloads(items) == [b"one", b"two"]
        assert log.state == b"state behind one"
        assert [
            item.frame.payload for item in items if isinstance(item, LocatedFrame) and item.location.position > log.base
        ]
        log.append(FrameType.CONTROL, b"three")
    log = Log(log_dir, file_bytes=FILE_BYTES)
    assert payloads(list(log.scan(log.base))) == [b"two", b"three"]
    await log.close()


async def test_a_damaged_head_leaves_the_previous_state(tmp_path: Path):
    async with opened(tmp_path) as (log, _):
        for number in range(3):
            log.append(FrameType.CONTROL, b"%d" % number)
            log.rotate(b"state behind %d" % number)
    file = tmp_path / "00000004.log"
    for offset in (64, 64 + file.stat().st_size // 2):
        flip(file, offset)
    async with opened(tmp_path) as (log, items):
        assert log.state == b"state behind 1"
        assert [item.file for item in items if isinstance(item, LostRange)] == ["00000004.log"]
        assert payloads(items) == [b"0", b"1", b"2"]
        log.append(FrameType.CONTROL, b"after")
    # A file that cannot be appended to is left as it is.
    assert len(list(tmp_path.glob("*.log"))) == 5
    async with opened(tmp_path) as (_, items):
        assert payloads(items) == [b"0", b"1", b"2", b"after"]


async def test_a_damaged_footer_costs_no_record(tmp_path: Path):
    async with opened(tmp_path) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        end = log.size_bytes
        log.rotate(None)
        log.append(FrameType.CONTROL, b"two")
    file = tmp_path / "00000001.log"
    for offset in (end + 64, file.stat().st_size - 1):
        flip(file, offset)
    async with opened(tmp_path) as (_, items):
        assert payloads(items) == [b"one", b"two"]


@pytest.mark.parametrize("left", [b"", bytes(100), b"HRLOGFRM"])
async def test_a_last_file_without_a_whole_frame_counts_as_missing(tmp_path: Path, left: bytes):
    async with opened(tmp_path) as (log, _):
        log.append(FrameType.CONTROL, b"one")
    (tmp_path / "00000002.log").write_bytes(left)
    async with opened(tmp_path) as (log, items):
        assert payloads(items) == [b"one"]
        log.append(FrameType.CONTROL, b"two")
    async with opened(tmp_path) as (_, items):
        assert payloads(items) == [b"one", b"two"]
        assert not [item for item in items if isinstance(item, LostRange)]


async def test_a_file_of_another_log_is_refused_and_named(tmp_path: Path):
    for name in ("one", "two"):
        async with opened(tmp_path / name):
            pass
    os.rename(tmp_path / "two" / "00000001.log", tmp_path / "one" / "00000002.log")
    with pytest.raises(SetupError, match=r"00000002\.log"):
        Log(tmp_path / "one", file_bytes=FILE_BYTES)


def test_a_file_of_an_unknown_format_is_refused(tmp_path: Path):
    head = FileHead(format=7, log="log", number=1, epoch=1, before_bytes=0, state=None)
    frame = log_format.pack_frame(FrameType.FILE_HEAD, msgspec.msgpack.encode(head))
    (tmp_path / "00000001.log").write_bytes(b"".join(frame))
    with pytest.raises(UnknownLogFormat, match="format 7"):
        Log(tmp_path, file_bytes=FILE_BYTES)


class Disk:
    """A disk that fails writes or syncs while ``refuses`` is an errno."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.refuses = 0
        self.refused: list[int] = []
        self.after = 0
        real: Callable[..., Any] = getattr(os, call)

        def wrapped(descriptor: int, *args: Any) -> Any:
            if self.refuses and self.after <= 0:
                self.refused.append(os.fstat(descriptor).st_ino)
                raise OSError(self.refuses, os.strerror(self.refuses))
            self.after -= 1
            return real(descriptor, *args)

        monkeypatch.setattr(os, call, wrapped)


@pytest.fixture(params=["writev", "fdatasync"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 3600.0)
    return Disk(monkeypatch, request.param)


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_after_a_failed_write_or_sync_the_file_is_cut_and_every_waiter_gets_the_error(
    tmp_path: Path, disk: Disk, reason: int
):
    async with opened(tmp_path) as (log, _):
        log.append(FrameType.CONTROL, b"safe")
        await log.synced()
        size = log.size_bytes
        disk.refuses = reason
        log.append(FrameType.CONTROL, b"lost")
        waiters = await asyncio.gather(*(log.synced() for _ in range(3)), return_exceptions=True)
        assert [type(waiter) for waiter in waiters] == [StoreError] * 3
        assert all(os.strerror(reason) in str(waiter) for waiter in waiters)
        with pytest.raises(StoreError):
            await log.synced()
        assert len(disk.refused) == 1
        assert (tmp_path / "00000001.log").stat().st_size == size
    # Unacknowledged frames are gone, even if the page cache still showed them.
    disk.refuses = 0
    async with opened(tmp_path) as (log, items):
        assert payloads(items) == [b"safe"]


async def test_frames_that_were_not_stored_go_to_a_new_file_as_soon_as_the_disk_accepts_one(tmp_path: Path, disk: Disk):
    moved: list[Relocations] = []
    calls: list[str] = []
    log = Log(
        tmp_path,
        file_bytes=FILE_BYTES,
        on_failure=lambda: calls.append(log.phase),
        on_recovery=lambda: calls.append("recovered"),
    )
    list(log.scan())
    log.start(lambda: None)
    log.on_relocated = moved.append
    log.append(FrameType.CONTROL, b"safe")
    await log.synced()
    disk.refuses = errno.ENOSPC
    places = [log.append(FrameType.CONTROL, b"one")]
    with pytest.raises(StoreError):
        await log.synced()
    places.append(log.append(FrameType.CONTROL, b"two"))  # appended before the failure was known
    for _ in range(3):
        log.retry()
        await settled(log)
        assert log.failure
        assert [log.read(place) for place in places] == [b"one", b"two"]
    assert len(disk.refused) == 4  # each in a file of its own, and no file is left
    assert [file.name for file in tmp_path.iterdir()] == ["00000001.log"]
    disk.refuses = 0
    log.retry()
    places.append(log.append(FrameType.CONTROL, b"three"))  # before it is known that the disk works again
    await settled(log)
    await log.synced()
    assert calls == ["disk full", "recovered"]
    places = [moved[0][place.position] for place in places]
    assert [log.read(place) for place in places] == [b"one", b"two", b"three"]
    log.append(FrameType.CONTROL, b"four")
    await log.synced()
    assert log.size_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.log"))
    await log.close()
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["00000001.log", "00000002.log"]
    async with opened(tmp_path) as (_, items):
        assert payloads(items) == [b"safe", b"one", b"two", b"three", b"four"]


async def test_a_disk_that_fails_during_a_rotation_loses_nothing(tmp_path: Path, disk: Disk):
    for after in range(3):
        path = tmp_path / str(after)
        async with opened(path) as (log, _):
            log.append(FrameType.CONTROL, b"one")
            log.rotate(b"state")
            places = [log.append(FrameType.CONTROL, b"two")]
            moved: list[Relocations] = []
            log.on_relocated = moved.append
            disk.refuses, disk.after = errno.ENOSPC, after
            if after < 2:  # two files are written and synced
                with pytest.raises(StoreError):
                    await log.synced()
                disk.refuses = 0
                log.retry()
                await settled(log)
                places = [moved[0].get(place.position, place) for place in places]
            await log.synced()
            disk.refuses = 0
            assert [log.read(place) for place in places] == [b"two"]
            log.append(FrameType.CONTROL, b"three")
        async with opened(path) as (_, items):
            assert payloads(items) == [b"one", b"two", b"three"]
            assert not [item for item in items if isinstance(item, LostRange)]


async def test_a_log_that_is_closed_during_a_retry_stays_failed(tmp_path: Path, disk: Disk):
    calls: list[str] = []
    log = Log(tmp_path, file_bytes=FILE_BYTES, on_recovery=lambda: calls.append("recovered"))
    list(log.scan())
    log.start(lambda: None)
    disk.refuses = errno.ENOSPC
    log.append(FrameType.CONTROL, b"one")
    with pytest.raises(StoreError):
        await log.synced()
    disk.refuses = 0
    log.retry()
    await log.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert calls == []
    async with opened(tmp_path) as (_, items):
        assert payloads(items) == [b"one"]


async def test_a_recovery_counts_deleted_files(tmp_path: Path, disk: Disk):
    async with opened(tmp_path) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        log.rotate(b"state")
        log.append(FrameType.CONTROL, b"two")
        await log.synced()
        await log.remove(1)
        disk.refuses = errno.ENOSPC
        log.append(FrameType.CONTROL, b"three")
        with pytest.raises(StoreError):
            await log.synced()
        disk.refuses = 0
        log.retry()
        await settled(log)
        assert log.size_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.log"))


async def test_frames_that_a_failed_file_still_shows_do_not_count_twice(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
):
    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", refuse)
    async with opened(tmp_path) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        await log.synced()
        disk.refuses = errno.EIO
        log.append(FrameType.CONTROL, b"two")
        with pytest.raises(StoreError):
            await log.synced()
        disk.refuses = 0
        log.retry()
        await settled(log)
        await log.synced()
    async with opened(tmp_path) as (_, items):
        assert payloads(items) == [b"one", b"two"]


async def test_a_writer_that_raises_stops_the_log_and_fails_all_waiters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(descriptor: int, buffers: object) -> int:
        raise RuntimeError("out of joint")

    async with opened(tmp_path) as (log, _):
        monkeypatch.setattr(os, "writev", fail)
        log.append(FrameType.CONTROL, b"one")
        with pytest.raises(StoreError, match="out of joint"):
            await log.synced()
        assert log.stopped


class Owner:
    """A check of the directory's owner, which fails on request."""

    def __init__(self) -> None:
        self.checks = 0
        self.fails_at: set[int] = set()

    def __call__(self) -> None:
        self.checks += 1
        if self.checks in self.fails_at:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


async def test_nothing_is_acknowledged_or_stored_twice_if_the_owner_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 3600.0)
    owner = Owner()
    async with opened(tmp_path, writer=LogWriterThread(tmp_path, owner)) as (log, _):
        log.append(FrameType.CONTROL, b"safe")
        await log.synced()
        owner.fails_at = {owner.checks + 2, owner.checks + 3}  # after the sync, and when the file would be cut back
        log.append(FrameType.CONTROL, b"one")
        with pytest.raises(StoreError, match="Stale file handle"):
            await log.synced()
        log.append(FrameType.CONTROL, b"two")
        owner.fails_at = {owner.checks + 2, owner.checks + 3}
        log.retry()
        await settled(log)
        assert log.failure
        log.retry()
        await settled(log)
        await log.synced()
    async with opened(tmp_path) as (_, items):
        assert payloads(items) == [b"safe", b"one", b"two"]


async def test_an_old_owner_that_cannot_read_the_epoch_cuts_nothing_of_its_successor(tmp_path: Path):
    owner = Owner()
    async with opened(tmp_path, writer=LogWriterThread(tmp_path, owner)) as (old, _):
        old.append(FrameType.CONTROL, b"one")
        await old.synced()
        async with opened(tmp_path) as (new, _):  # it appends to the same file
            new.append(FrameType.CONTROL, b"two")
            await new.synced()
        owner.fails_at = set(range(owner.checks, owner.checks + 100))
        old.append(FrameType.CONTROL, b"late")
        with pytest.raises(StoreError, match="Stale file handle"):
            await old.synced()
    async with opened(tmp_path) as (_, items):
        assert payloads(items) == [b"one", b"two"]


async def test_a_disk_that_fails_while_the_log_closes_is_not_retried(tmp_path: Path, disk: Disk):
    log = Log(tmp_path, file_bytes=FILE_BYTES)
    list(log.scan())
    log.start(lambda: None)
    disk.refuses = errno.ENOSPC
    log.append(FrameType.CONTROL, b"one")
    with pytest.raises(StoreError):
        await log.close()
    assert log._retry_timer is None


async def test_no_file_is_deleted_after_the_log_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started, may_end = threading.Event(), threading.Event()
    remove = LocalLogFiles.remove

    def slow(self: LocalLogFiles, number: int) -> int:
        started.set()
        assert may_end.wait(30)
        return remove(self, number)

    monkeypatch.setattr(LocalLogFiles, "remove", slow)
    log = Log(tmp_path, file_bytes=FILE_BYTES)
    list(log.scan())
    log.start(lambda: None)
    log.append(FrameType.CONTROL, b"old")
    log.rotate(b"state")
    await log.synced()
    removing = asyncio.create_task(log.remove(1))
    await asyncio.to_thread(started.wait, 30)
    removing.cancel()
    closing = asyncio.create_task(log.close())
    await asyncio.wait({closing}, timeout=0.5)  # longer than a close takes that does not wait
    assert not closing.done()
    may_end.set()
    await closing
    assert [file.name for file in tmp_path.glob("*.log")] == ["00000002.log"]


async def settled(log: Log) -> None:
    """Wait until the log has the result of its last batch."""
    async with asyncio.timeout(30):
        while log._writing:
            await asyncio.sleep(0.001)


async def test_damage_in_the_middle_is_reported_and_costs_that_record_only(tmp_path: Path):
    async with opened(tmp_path) as (log, _):
        places = [log.append(FrameType.TRAJECTORY, bytes([65 + number]) * 100) for number in range(3)]
    file = tmp_path / "00000001.log"
    flip(file, places[1].offset + 100)
    async with opened(tmp_path) as (log, items):
        assert payloads(items) == [b"A" * 100, b"C" * 100]
        lost = [item for item in items if isinstance(item, LostRange)]
        assert [(item.file, item.offset) for item in lost] == [("00000001.log", places[1].offset)]
        assert log.read(places[2]) == b"C" * 100


async def test_every_read_is_checked_against_its_checksum(tmp_path: Path):
    async with opened(tmp_path) as (log, _):
        location = log.append(FrameType.TRAJECTORY, b"record" * 20)
        await log.synced()
        flip(tmp_path / "00000001.log", location.offset + 70)
        with pytest.raises(CorruptRecord) as caught:
            log.read(location)
        assert caught.value.extra == {"file": "00000001.log", "offset": location.offset}
        with pytest.raises(CorruptRecord):
            log.read(Location(7, 0, 10))


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 1 << 20), sizes=st.lists(st.integers(1, 300), min_size=1, max_size=5))
def test_a_torn_tail_is_cut_when_the_log_is_opened(
    tmp_path_factory: pytest.TempPathFactory, cut: int, sizes: list[int]
):
    path = tmp_path_factory.mktemp("log")

    async def append_frames() -> None:
        ends = []
        async with opened(path) as (log, _):
            for size in sizes:
                log.append(FrameType.TRAJECTORY, b"x" * size)
                ends.append(log.size_bytes)
        file = path / "00000001.log"
        length = cut % (ends[-1] + 1)
        os.truncate(file, length)
        whole = sum(end <= length for end in ends)
        async with opened(path) as (log, items):
            assert not [item for item in items if isinstance(item, LostRange)]
            assert payloads(items) == [b"x" * size for size in sizes[:whole]]
            assert log.size_bytes == file.stat().st_size
            log.append(FrameType.TRAJECTORY, b"after")
        async with opened(path) as (_, items):
            assert payloads(items) == [*(b"x" * size for size in sizes[:whole]), b"after"]

    asyncio.run(append_frames())


def flip(file: Path, offset: int) -> None:
    """Change one bit of a file."""
    with open(file, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def test_a_directory_that_holds_something_other_than_a_log_is_refused_and_the_file_is_named(tmp_path: Path):
    (tmp_path / "notes.log").write_text("mine")
    with pytest.raises(SetupError, match=r"notes\.log"):
        Log(tmp_path, file_bytes=1 << 20)
