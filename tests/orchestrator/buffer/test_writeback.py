"""Early writeback, with and without support by the kernel."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

import pytest

from headrace.store.log_format import FrameType, frame_bytes, pack_frame
from headrace_orchestrator.buffer.log import file_writer, writeback
from headrace_orchestrator.buffer.log.writeback import begin_writeback


def refusing(reason: int) -> object:
    def call(*arguments: object) -> int:
        ctypes.set_errno(reason)
        return -1

    return call


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sync_file_range")
def test_the_kernel_accepts_a_range_of_a_file_and_rejects_an_invalid_descriptor(tmp_path: Path):
    assert writeback._call is not None
    with open(tmp_path / "file", "wb", buffering=0) as file:
        file.write(bytes(100_000))
        begin_writeback(file.fileno(), 0, 50_000)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        begin_writeback(999_999, 0, 1)


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.EPERM, errno.EINVAL])
def test_where_the_call_is_not_supported_nothing_happens(reason: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writeback, "_call", refusing(reason))
    begin_writeback(0, 0, 1)
    monkeypatch.setattr(writeback, "_call", None)
    begin_writeback(0, 0, 1)


def test_a_writeback_error_is_raised_as_an_error_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writeback, "_call", refusing(errno.EIO))
    opened = file_writer.LogFileWriter(tmp_path)
    with pytest.raises(file_writer.PartialWrite, match=os.strerror(errno.EIO)):
        opened.write(frames([bytes(file_writer.PIECE_BYTES), b"more"]))
    opened.close()


def test_in_a_long_append_the_disk_stores_one_piece_while_the_next_is_packed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Everything is durable after the sync."""
    calls: list[object] = []
    pack, sync = file_writer.pack_frame, file_writer.sync
    monkeypatch.setattr(file_writer, "begin_writeback", lambda descriptor, start, size: calls.append((start, size)))
    monkeypatch.setattr(file_writer, "pack_frame", lambda kind, payload: (calls.append("pack"), pack(kind, payload))[1])
    monkeypatch.setattr(file_writer, "sync", lambda descriptor: (calls.append("sync"), sync(descriptor)))
    short, *long = frames([b"short", *(os.urandom(file_writer.PIECE_BYTES // 2) for _ in range(5))])
    opened = file_writer.LogFileWriter(tmp_path)
    opened.write([short])
    opened.write(long)
    opened.close()
    at, size = short.size_bytes, long[0].size_bytes
    assert calls[:2] == ["pack", "sync"]
    assert calls[2:] == ["pack", "pack", (at, 2 * size), "pack", "pack", (at + 2 * size, 2 * size), "pack", "sync"]
    assert (tmp_path / "00000001.log").read_bytes() == content([short, *long])
    assert opened.durable_bytes == opened.total_bytes == at + 5 * size


def test_no_piece_has_more_buffers_than_one_call_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counts: list[int] = []
    write = file_writer._write_all
    monkeypatch.setattr(
        file_writer, "_write_all", lambda file, buffers: (counts.append(len(buffers)), write(file, buffers))[1]
    )
    batch = frames([b"%d" % number for number in range(800)])
    opened = file_writer.LogFileWriter(tmp_path)
    opened.write(batch)
    opened.close()
    assert sum(counts) == 3 * len(batch)
    assert max(counts) <= 1024
    assert (tmp_path / "00000001.log").read_bytes() == content(batch)


@pytest.mark.parametrize("trajectories", [8, 9, 10, 11])
def test_a_frame_that_exceeds_the_buffer_limit_starts_the_next_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trajectories: int
):
    counts: list[int] = []
    write = file_writer._write_all
    monkeypatch.setattr(file_writer, "_MAX_BUFFERS", 20)
    monkeypatch.setattr(
        file_writer, "_write_all", lambda file, buffers: (counts.append(len(buffers)), write(file, buffers))[1]
    )
    batch = frames([bytes(64)] * trajectories)
    at = sum(frame.size_bytes for frame in batch)
    batch.append(file_writer.PendingFrame(1, at, FrameType.CONTROL, b"facts", frame_bytes(FrameType.CONTROL, 5)))
    opened = file_writer.LogFileWriter(tmp_path)
    opened.write(batch)
    opened.close()
    assert max(counts) <= 20
    assert (tmp_path / "00000001.log").read_bytes() == content(batch)


def frames(payloads: list[bytes]) -> list[file_writer.PendingFrame]:
    """Consecutive trajectory frames of the first file."""
    kind, at, placed = FrameType.TRAJECTORY, 0, list[file_writer.PendingFrame]()
    for payload in payloads:
        placed.append(file_writer.PendingFrame(1, at, kind, payload, frame_bytes(kind, len(payload))))
        at += placed[-1].size_bytes
    return placed


def content(batch: list[file_writer.PendingFrame]) -> bytes:
    return b"".join(buffer for frame in batch for buffer in pack_frame(frame.kind, frame.payload))
