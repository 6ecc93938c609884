"""The log: durability, damage, and the disk that refuses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CorruptRecord, SetupError, StoreError
from headrace.logformat import FrameType
from headrace_orchestrator.buffer.log import Location, Log, Lost, Placed

FILE_BYTES = 1 << 30


@asynccontextmanager
async def opened(path: Path, *, file_bytes: int = FILE_BYTES) -> AsyncIterator[tuple[Log, list[Placed | Lost]]]:
    """A log that was read through, and what was in it."""
    log = Log(path, file_bytes=file_bytes)
    try:
        yield log, list(log.scan())
    finally:
        if log.failure:
            with pytest.raises(StoreError):
                await log.synced()
        await log.close()


def payloads(found: list[Placed | Lost]) -> list[bytes]:
    return [item.frame.payload for item in found if isinstance(item, Placed)]


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


async def test_one_sync_covers_all_frames_that_are_waiting(tmp_path: Path):
    rounds: list[int] = []
    log = Log(tmp_path, file_bytes=FILE_BYTES, on_sync=lambda duration_s, size: rounds.append(size))
    list(log.scan())
    for number in range(100):
        log.append(FrameType.TRAJECTORY, b"%d" % number)
    await asyncio.gather(*(log.synced() for _ in range(50)))
    assert len(rounds) == 1
    assert rounds[0] == log.size_bytes
    await log.close()


async def test_what_was_appended_comes_back_in_order_after_a_restart(tmp_path: Path):
    async with opened(tmp_path) as (log, _):
        log.append(FrameType.CONTROL, b"one")
        log.append(FrameType.TRAJECTORY, b"two" * 100)
    async with opened(tmp_path) as (log, found):
        assert payloads(found) == [b"one", b"two" * 100]
        log.append(FrameType.BATCH, b"three")
    async with opened(tmp_path) as (_, found):
        assert payloads(found) == [b"one", b"two" * 100, b"three"]


async def test_a_record_is_readable_before_and_after_it_is_written(tmp_path: Path):
    async with opened(tmp_path) as (log, _):
        location = log.append(FrameType.TRAJECTORY, b"record")
        assert log.read(location) == b"record"
        await log.synced()
        assert log.read(location) == b"record"


async def test_the_log_goes_on_in_a_new_file_when_one_is_full(tmp_path: Path):
    async with opened(tmp_path, file_bytes=1000) as (log, _):
        places = [log.append(FrameType.TRAJECTORY, bytes([number]) * 100) for number in range(20)]
        await log.synced()
        assert [log.read(place)[0] for place in places] == list(range(20))
        assert sorted(place.position for place in places) == [place.position for place in places]
        total = log.size_bytes
    files = sorted(tmp_path.glob("*.log"))
    assert len(files) > 1
    assert sum(file.stat().st_size for file in files) == total
    async with opened(tmp_path, file_bytes=1000) as (log, found):
        assert [payload[0] for payload in payloads(found)] == list(range(20))
        assert log.size_bytes == total


async def test_a_failed_write_or_sync_seals_the_file_and_every_waiter_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    attempts = []

    def refuse(descriptor: int) -> None:
        attempts.append(descriptor)
        raise OSError(5, "Input/output error")

    async with opened(tmp_path) as (log, _):
        log.append(FrameType.CONTROL, b"safe")
        await log.synced()
        monkeypatch.setattr(os, "fdatasync", refuse)
        log.append(FrameType.CONTROL, b"lost")
        waiters = await asyncio.gather(*(log.synced() for _ in range(3)), return_exceptions=True)
        assert [type(waiter) for waiter in waiters] == [StoreError] * 3
        assert all("Input/output error" in str(waiter) for waiter in waiters)
        with pytest.raises(StoreError):
            log.append(FrameType.CONTROL, b"never")
        assert len(attempts) == 1
        monkeypatch.undo()

    # What was never acknowledged is gone, also where the page cache still shows it; a new file goes on.
    async with opened(tmp_path) as (log, found):
        assert payloads(found) == [b"safe"]
        log.append(FrameType.CONTROL, b"after")
    assert [file.name for file in sorted(tmp_path.glob("*.log"))] == ["00000001.log", "00000002.log"]
    async with opened(tmp_path) as (_, found):
        assert payloads(found) == [b"safe", b"after"]


async def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    async with opened(tmp_path) as (log, _):
        monkeypatch.setattr(os, "write", full)
        log.append(FrameType.CONTROL, b"x")
        with pytest.raises(StoreError, match="No space left on device"):
            await log.synced()
        monkeypatch.undo()


async def test_damage_in_the_middle_is_reported_and_costs_that_record_only(tmp_path: Path):
    async with opened(tmp_path) as (log, _):
        places = [log.append(FrameType.TRAJECTORY, bytes([65 + number]) * 100) for number in range(3)]
    file = tmp_path / "00000001.log"
    flip(file, places[1].offset + 100)
    async with opened(tmp_path) as (log, found):
        assert payloads(found) == [b"A" * 100, b"C" * 100]
        lost = [item for item in found if isinstance(item, Lost)]
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

    async def story() -> None:
        ends = []
        async with opened(path) as (log, _):
            for size in sizes:
                log.append(FrameType.TRAJECTORY, b"x" * size)
                ends.append(log.size_bytes)
        file = path / "00000001.log"
        length = cut % (ends[-1] + 1)
        os.truncate(file, length)
        whole = sum(end <= length for end in ends)
        async with opened(path) as (log, found):
            assert not [item for item in found if isinstance(item, Lost)]
            assert payloads(found) == [b"x" * size for size in sizes[:whole]]
            assert log.size_bytes == file.stat().st_size
            log.append(FrameType.TRAJECTORY, b"after")
        async with opened(path) as (_, found):
            assert payloads(found) == [*(b"x" * size for size in sizes[:whole]), b"after"]

    asyncio.run(story())


def flip(file: Path, offset: int) -> None:
    """Change one bit of a file."""
    with open(file, "r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def test_a_directory_that_holds_something_else_than_a_log_is_refused_and_the_file_is_named(tmp_path: Path):
    (tmp_path / "notes.log").write_text("mine")
    with pytest.raises(SetupError, match=r"notes\.log"):
        Log(tmp_path, file_bytes=1 << 20)


async def test_a_seal_that_holds_no_number_is_named(tmp_path: Path):
    (tmp_path / "00000001.log").write_bytes(b"")
    (tmp_path / "00000001.sealed").write_bytes(b"")
    log = Log(tmp_path, file_bytes=1 << 20)
    with pytest.raises(SetupError, match=r"00000001\.sealed"):
        list(log.scan())
    await log.close()
