"""Early writeback: what it does to a file, and what it does where the kernel does not know it."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

import pytest

from headrace_orchestrator.buffer import writeback, writer
from headrace_orchestrator.buffer.writeback import begin_writeback


def refusing(reason: int) -> object:
    def call(*arguments: object) -> int:
        ctypes.set_errno(reason)
        return -1

    return call


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sync_file_range")
def test_the_kernel_takes_a_part_of_a_file_and_knows_what_is_no_file(tmp_path: Path):
    assert writeback._call is not None
    with open(tmp_path / "file", "wb", buffering=0) as file:
        file.write(bytes(100_000))
        begin_writeback(file.fileno(), 0, 50_000)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        begin_writeback(999_999, 0, 1)


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.EPERM, errno.EINVAL])
def test_where_there_is_no_such_call_nothing_happens(reason: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writeback, "_call", refusing(reason))
    begin_writeback(0, 0, 1)
    monkeypatch.setattr(writeback, "_call", None)
    begin_writeback(0, 0, 1)


def test_an_error_that_comes_up_is_the_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writeback, "_call", refusing(errno.EIO))
    opened = writer.Writer(tmp_path)
    with pytest.raises(writer.Failed, match=os.strerror(errno.EIO)):
        opened.write([frame(bytes(writer.PIECE_BYTES)), frame(b"more")])
    opened.close()


def test_of_a_long_append_the_disk_stores_one_piece_while_the_next_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is durable is what is synced afterwards: all of it."""
    calls: list[tuple[int, int] | str] = []
    monkeypatch.setattr(writer, "begin_writeback", lambda descriptor, start, size: calls.append((start, size)))
    sync = writer.sync
    monkeypatch.setattr(writer, "sync", lambda descriptor: (calls.append("sync"), sync(descriptor)))
    payloads = [os.urandom(writer.PIECE_BYTES // 2 + 1) for _ in range(5)]
    opened = writer.Writer(tmp_path)
    opened.write([frame(b"short")])
    opened.write([frame(payload) for payload in payloads])
    opened.close()
    piece = 2 * (writer.PIECE_BYTES // 2 + 1)
    assert calls == ["sync", (5, piece), (5 + piece, piece), "sync"]
    assert (tmp_path / "00000001.log").read_bytes() == b"short" + b"".join(payloads)
    assert opened.durable_bytes == opened.total_bytes == 5 + sum(map(len, payloads))


def frame(payload: bytes) -> writer.Queued:
    return writer.Queued(1, 0, writer.FrameType.TRAJECTORY, payload, [payload])
