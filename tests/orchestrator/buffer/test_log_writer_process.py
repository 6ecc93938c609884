"""The log writer in a process of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SetupError, StoreError
from headrace.store.log_format import FrameType
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log import writer_process
from headrace_orchestrator.buffer.log.file_writer import PendingFrame
from headrace_orchestrator.buffer.log.log import Log, LostRange
from headrace_orchestrator.buffer.log.shared_memory import MIN_BYTES
from headrace_orchestrator.buffer.log.writer_process import SUPPORTED, LogWriterProcess
from tests.orchestrator.buffer.test_log import opened_by, payloads, settled
from tests.orchestrator.buffer.test_log_writers import no_file_grows

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the log's writer has no process of its own here")

ENDS_S = 30.0
"""Seconds within which a process must have ended."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# Frames go to it through shared memory ----------------------------------------------------------------------------


async def test_frames_are_copied_to_the_process_through_shared_memory(log_dir: Path):
    payload = bytearray(b"as it was")
    async with beside(log_dir) as log:
        writer, result = of(log), asyncio.get_running_loop().create_future()
        os.kill(writer._process.pid, signal.SIGSTOP)
        frame = PendingFrame(1, log.size_bytes, FrameType.TRAJECTORY, memoryview(payload), 128)
        writer.write([frame], result.set_result)
        payload[:] = b"different"
        os.kill(writer._process.pid, signal.SIGCONT)
        assert (await result).written == 1
    assert await found_in(log_dir) == [b"as it was"]


async def test_a_batch_larger_than_the_shared_memory_is_written_and_the_memory_shrinks_again(log_dir: Path):
    record, state = b"r" * (2 * MIN_BYTES + 1), b"s" * (MIN_BYTES + 1)
    async with beside(log_dir) as log:
        place = log.append(FrameType.TRAJECTORY, record)
        await log.synced()
        log.rotate(state)
        await log.synced()
        log.append(FrameType.CONTROL, b"small")
        await log.synced()
        assert os.fstat(of(log)._memory.descriptor).st_size == MIN_BYTES
        assert log.read(place) == record
    async with beside(log_dir) as log:
        assert log.state == state
    assert await found_in(log_dir) == [record, b"small"]


async def test_shared_memory_that_cannot_grow_is_a_failure_and_the_frames_are_written_later(
    log_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 3600.0)
    large = bytes(MIN_BYTES + 1)
    async with beside(log_dir) as log:
        log.append(FrameType.CONTROL, b"small")
        await log.synced()
        with monkeypatch.context() as refusing:
            refusing.setattr(os, "ftruncate", refuse)  # only in this process, not in the writer's
            log.append(FrameType.TRAJECTORY, large)
            with pytest.raises(StoreError, match="Cannot allocate memory"):
                await log.synced()
            log.retry()
            await settled(log)
            assert not log.stopped
        log.retry()
        await settled(log)
        await log.synced()
    assert await found_in(log_dir) == [b"small", large]


async def test_a_batch_of_many_frames_is_written_in_order_and_control_frames_twice(log_dir: Path):
    kinds = (FrameType.TRAJECTORY, FrameType.CONTROL, FrameType.BATCH)
    payloads_sent = [b"%d" % number * (number % 50) for number in range(3000)]
    async with beside(log_dir) as log:
        for number, payload in enumerate(payloads_sent):
            log.append(kinds[number % 3], payload)
        await log.synced()
        assert log.size_bytes == sum(file.stat().st_size for file in log_dir.iterdir())
    assert await found_in(log_dir) == payloads_sent


async def test_it_writes_one_part_of_a_long_batch_while_the_next_is_copied(
    log_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    parts: list[int] = []
    on_disk: list[int] = []
    send = LogWriterProcess._send

    def watched(self: LogWriterProcess, message: Any) -> None:
        if isinstance(message, writer_process._Part):
            parts.append(message.offset)
            if len(parts) == 6:  # the sixth of seven
                until_it_grows(log_dir / "00000001.log", head_bytes)
                on_disk.append((log_dir / "00000001.log").stat().st_size)
        send(self, message)

    async with beside(log_dir) as log:
        head_bytes = log.size_bytes
        monkeypatch.setattr(LogWriterProcess, "_send", watched)
        for _ in range(30):
            log.append(FrameType.TRAJECTORY, bytes(100_000))
        await log.synced()
    assert len(parts) == 7
    assert parts[0] < 2 * writer_process.FIRST_PART_BYTES
    assert on_disk
    assert len(await found_in(log_dir)) == 30


async def test_a_blocked_event_loop_misses_no_result(log_dir: Path):
    async with beside(log_dir) as log:
        log.append(FrameType.CONTROL, b"one")
        waiting = asyncio.create_task(log.synced())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert readable(of(log))  # blocks the event loop until the result arrives
        log.append(FrameType.CONTROL, b"two")
        await waiting
        await log.synced()
    assert await found_in(log_dir) == [b"one", b"two"]


async def test_the_log_waits_for_a_stopped_writer(log_dir: Path):
    async with beside(log_dir) as log:
        os.kill(of(log)._process.pid, signal.SIGSTOP)
        log.append(FrameType.CONTROL, b"one")
        waiting = asyncio.create_task(log.synced())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        os.kill(of(log)._process.pid, signal.SIGCONT)
        await waiting
    assert await found_in(log_dir) == [b"one"]


# It ends with the orchestrator ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", [True, False], ids=["after its result", "before its result"])
def test_it_prints_nothing_if_the_orchestrator_is_killed_during_a_batch(log_dir: Path, answered: bool):
    code = """
import asyncio, os, select, signal, sys
from pathlib import Path
from headrace.store.log_format import FrameType
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.buffer.log.writer_process import LogWriterProcess

async def run(data, answered):
    writer = LogWriterProcess(DataDirectory.claim(data))
    log = Log(data / "log", file_bytes=1 << 30, writer=writer)
    log.start(lambda: None)
    if not answered:
        os.kill(writer._process.pid, signal.SIGSTOP)
    log.append(FrameType.CONTROL, b"on its way")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if answered:
        select.select([writer._socket], [], [])
    else:
        print(writer._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(run(Path(sys.argv[1]), len(sys.argv) > 2))
"""
    command = [sys.executable, "-c", code, log_dir.parent, *(["answered"] if answered else [])]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert killed.wait(ENDS_S) == -signal.SIGKILL
    if not answered:
        assert killed.stdout is not None
        os.kill(int(killed.stdout.readline()), signal.SIGCONT)
    assert killed.communicate(timeout=ENDS_S)[1] == b""  # stderr closed, so the writer has ended too
    assert asyncio.run(found_in(log_dir)) == [b"on its way"]


@pytest.mark.parametrize("answered", [True, False], ids=["after its result", "before its result"])
async def test_it_prints_nothing_if_it_is_closed_during_a_batch(
    log_dir: Path, answered: bool, capfd: pytest.CaptureFixture[str]
):
    async with beside(log_dir) as log:
        writer = of(log)
        if not answered:
            os.kill(writer._process.pid, signal.SIGSTOP)
        writer.write([PendingFrame(1, log.size_bytes, FrameType.TRAJECTORY, b"on its way", 128)], lambda outcome: None)
        if answered:
            assert readable(writer)
        closed = asyncio.create_task(writer.close())
        await asyncio.sleep(0)
        if not answered:
            os.kill(writer._process.pid, signal.SIGCONT)
        await closed
        assert writer._process.returncode == 0
        log._writer = Closed()
    assert capfd.readouterr().err == ""
    assert await found_in(log_dir) == [b"on its way"]


# It ends unexpectedly ------------------------------------------------------------------------------------------------


async def test_if_it_ends_while_it_has_no_batch_the_log_gets_the_reason_and_stops(log_dir: Path):
    failed = asyncio.Event()
    async with beside(log_dir, on_failure=failed.set) as log:
        log.append(FrameType.CONTROL, b"stored")
        await log.synced()
        of(log)._process.kill()
        async with asyncio.timeout(ENDS_S):
            await failed.wait()
        assert log.stopped
        assert log.failure == "the process that writes the log ended (SIGKILL)"
        with pytest.raises(StoreError, match="SIGKILL"):
            log.append(FrameType.CONTROL, b"more")
    assert await found_in(log_dir) == [b"stored"]


async def test_frames_that_cannot_be_sent_end_all_writing_with_the_reason(
    log_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(self: LogWriterProcess, *args: Any) -> None:
        raise ValueError("out of joint")

    async with beside(log_dir) as log:
        monkeypatch.setattr(LogWriterProcess, "_send_batch", fail)
        log.append(FrameType.CONTROL, b"one")
        with pytest.raises(StoreError, match="out of joint"):
            await log.synced()
        assert log.stopped


async def test_if_it_ended_before_its_first_batch_the_log_gets_the_reason(log_dir: Path):
    async with beside(log_dir) as log:
        of(log)._process.kill()
        log.append(FrameType.CONTROL, b"first")
        with pytest.raises(StoreError, match="SIGKILL"):
            await log.synced()
        assert log.stopped
    assert await found_in(log_dir) == []


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
    ids=["SIGKILL", "SIGSEGV", "a signal without a name"],
)
async def test_if_it_ends_during_a_batch_every_waiter_gets_the_reason(log_dir: Path, number: int, name: str):
    async with beside(log_dir) as log:
        log.append(FrameType.CONTROL, b"stored")
        await log.synced()
        os.kill(of(log)._process.pid, signal.SIGSTOP)
        log.append(FrameType.CONTROL, b"on its way")
        waiting = [asyncio.create_task(log.synced()) for _ in range(3)]
        for _ in range(3):
            await asyncio.sleep(0)
        log.append(FrameType.CONTROL, b"behind it")
        waiting.append(asyncio.create_task(log.synced()))
        os.kill(of(log)._process.pid, number)
        os.kill(of(log)._process.pid, signal.SIGCONT)
        async with asyncio.timeout(ENDS_S):
            errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(each) for each in errors] == [StoreError] * 4
        assert all(f"the process that writes the log ended ({name})" in str(each) for each in errors)
        assert log.stopped
        log.retry()
        with pytest.raises(StoreError):
            await log.synced()
    assert await found_in(log_dir) == [b"stored"]


async def test_if_it_ends_while_the_disk_fails_only_a_new_start_helps(log_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace_orchestrator.buffer.log.log.FIRST_RETRY_S", 3600.0)
    async with beside(log_dir) as log:
        log.append(FrameType.CONTROL, b"stored")
        await log.synced()
        with no_file_grows(of(log)):
            log.append(FrameType.CONTROL, b"kept")
            with pytest.raises(StoreError, match="File too large"):
                await log.synced()
        of(log)._process.kill()
        log.retry()
        await settled(log)
        with pytest.raises(StoreError, match=r"the process that writes the log ended \(SIGKILL\)\. .*started anew"):
            await log.synced()
    assert await found_in(log_dir) == [b"stored"]


async def test_if_it_ends_before_the_start_is_complete_the_start_fails(log_dir: Path):
    with closing(DataDirectory.claim(log_dir.parent)) as directory:
        writer = LogWriterProcess(directory)
        log = Log(log_dir, file_bytes=1 << 20, writer=writer)
        writer._process.kill()
        with pytest.raises(StoreError, match=r"the process that writes the log ended \(SIGKILL\)"):
            log.start(lambda: None)
        await log.close()


# Signals ----------------------------------------------------------------------------------------------------------


async def test_signals_that_end_an_orchestrator_never_end_it(log_dir: Path, capfd: pytest.CaptureFixture[str]):
    with closing(DataDirectory.claim(log_dir.parent)) as directory:
        writer = LogWriterProcess(directory)
        for name in SIGNALS:
            os.kill(writer._process.pid, name)
        log = Log(log_dir, file_bytes=1 << 20, writer=writer)
        try:
            log.start(lambda: None)
            for name in SIGNALS:
                os.kill(writer._process.pid, name)
            log.append(FrameType.CONTROL, b"all the same")
            await log.synced()
        finally:
            await log.close()
    assert await found_in(log_dir) == [b"all the same"]
    assert capfd.readouterr().err == ""


# Descriptors ----------------------------------------------------------------------------------------------


async def test_neither_process_leaks_descriptors(log_dir: Path):
    async with beside(log_dir, file_bytes=100) as log:
        both = os.getpid(), of(log)._process.pid

        async def write(rounds: int) -> list[int]:
            for number in range(rounds):
                log.append(FrameType.TRAJECTORY, bytes(MIN_BYTES if number % 10 == 0 else 200))
                log.rotate(b"state")
                await log.synced()
            return [len(descriptors(pid)) for pid in both]

        before = await write(1)
        assert await write(50) == before


async def test_a_closed_writer_leaves_no_descriptor(log_dir: Path):
    before = descriptors(os.getpid())
    for _ in range(2):
        async with beside(log_dir) as log:
            log.append(FrameType.CONTROL, b"one")
    assert descriptors(os.getpid()) == before


# Failed starts ---------------------------------------------------------------------------------------------


def test_a_failed_start_raises_and_leaves_no_descriptor(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_process, "COMMAND", ("/nonexistent/python",))
    with closing(DataDirectory.claim(data_dir)) as directory:
        before = descriptors(os.getpid())
        with pytest.raises(SetupError, match=r"process that writes the log cannot be started: No such file"):
            LogWriterProcess(directory)
        assert descriptors(os.getpid()) == before


@pytest.mark.parametrize("name", ["da ta", "dätä", os.fsdecode(b"d\xff")], ids=["blank", "umlaut", "not UTF-8"])
async def test_a_data_directory_may_have_any_name(tmp_path: Path, name: str):
    async with beside(tmp_path / name / "log") as log:
        log.append(FrameType.CONTROL, b"one")
    assert await found_in(tmp_path / name / "log") == [b"one"]


# Helpers ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def beside(log_dir: Path, **settings: object) -> AsyncIterator[Log]:
    """A log with a writer process."""
    with closing(DataDirectory.claim(log_dir.parent)) as directory:
        options = {"file_bytes": 1 << 30, **settings}
        log = Log(log_dir, writer=LogWriterProcess(directory), **options)  # type: ignore[arg-type]
        try:
            list(log.scan())
            log.start(lambda: None)
            yield log
        finally:
            if isinstance(log._writer, LogWriterProcess):
                log._writer._process.send_signal(signal.SIGCONT)  # a failed test may have left it stopped
            await log.close()


def of(log: Log) -> LogWriterProcess:
    """The writer of a log."""
    assert isinstance(log._writer, LogWriterProcess)
    return log._writer


class Closed:
    """Takes the place of a writer that was closed already."""

    async def close(self) -> None: ...


async def found_in(log_dir: Path) -> list[bytes]:
    """Payloads that a start finds in a log without damage."""
    async with opened_by(LogWriterProcess, log_dir) as (_, items):
        assert not [item for item in items if isinstance(item, LostRange)]
        return payloads(items)


def readable(writer: LogWriterProcess) -> bool:
    """Wait for a result, blocking the event loop; returns False after ENDS_S."""
    return bool(select.select([writer._socket], [], [], ENDS_S)[0])


def descriptors(pid: int) -> list[str]:
    """Open descriptors of a process, without those of the event loop and of this listing."""
    targets = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets.append(os.readlink(entry))
        except FileNotFoundError:
            continue  # the descriptor of this listing
    return sorted(targets)


class Watched:
    """A process that is not a child of this one."""

    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            self.send(signal.SIGCONT)  # a failed test may have left it stopped
        os.close(self._descriptor)

    def send(self, name: signal.Signals) -> None:
        signal.pidfd_send_signal(self._descriptor, name)

    def wait(self) -> None:
        """Wait until it has ended."""
        assert select.select([self._descriptor], [], [], ENDS_S)[0], "it did not end"


def until_it_grows(file: Path, size_bytes: int) -> None:
    """Wait until a file has more than ``size_bytes`` bytes."""
    deadline = time.monotonic() + ENDS_S
    while file.stat().st_size <= size_bytes:
        assert time.monotonic() < deadline, "nothing of the batch was written"
        time.sleep(0.001)
