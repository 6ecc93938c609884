"""Files of a log on a local disk."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from headrace.errors import CorruptRecord, StoreError
from headrace.logfiles import path_of
from headrace.logformat import FrameType, pack_frame
from headrace_orchestrator.buffer.files import MAX_OPEN, LocalFiles
from tests.orchestrator.test_log import flip


def made(folder: Path, number: int, payload: bytes) -> None:
    path_of(folder, number).write_bytes(b"".join(pack_frame(FrameType.TRAJECTORY, payload)))


def test_every_read_is_checked_against_its_checksum(tmp_path: Path) -> None:
    made(tmp_path, 1, b"payload")
    files = LocalFiles(tmp_path)
    assert files.read(1, 0, 7) == b"payload"
    flip(path_of(tmp_path, 1), 64)
    with pytest.raises(CorruptRecord, match=r"offset 0 of 00000001\.log"):
        files.read(1, 0, 7)
    with pytest.raises(CorruptRecord, match=r"00000002\.log cannot be read: No such file"):
        files.read(2, 0, 7)


def test_a_file_may_be_deleted_while_a_thread_reads_from_it(tmp_path: Path) -> None:
    made(tmp_path, 1, b"payload")
    files = LocalFiles(tmp_path)
    files.read(1, 0, 7)
    reader = files._opened[1]
    assert files.remove(1) == 128
    assert files.sizes() == {}
    assert os.pread(reader.descriptor, 7, 64) == b"payload"
    descriptor = reader.descriptor
    del reader
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_number_that_was_given_away_anew_is_read_anew(tmp_path: Path) -> None:
    made(tmp_path, 1, b"before")
    files = LocalFiles(tmp_path)
    files.read(1, 0, 6)
    path_of(tmp_path, 1).unlink()
    made(tmp_path, 1, b"behind")
    files.forget(1)
    assert files.read(1, 0, 6) == b"behind"
    files.close()


def test_few_files_are_held_open_however_many_there_are(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    numbers = range(1, 2 * MAX_OPEN)
    for number in numbers:
        made(tmp_path, number, b"%04d" % number)
    before = len(os.listdir("/proc/self/fd"))
    for number in (*numbers, *reversed(numbers)):
        assert files.read(number, 0, 4) == b"%04d" % number
    assert len(os.listdir("/proc/self/fd")) - before <= MAX_OPEN
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_out_of_something_does_not_call_a_record_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out(path: Path, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    made(tmp_path, 1, b"payload")
    files = LocalFiles(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", out)
        with pytest.raises(StoreError, match="Too many open files"):
            files.read(1, 0, 7)
    assert files.read(1, 0, 7) == b"payload"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is told what to forget")
def test_what_is_in_a_file_can_be_taken_from_the_kernels_memory_and_is_read_all_the_same(tmp_path: Path) -> None:
    payload = os.urandom(1 << 20)
    made(tmp_path, 1, payload)
    with open(path_of(tmp_path, 1), "rb", buffering=0) as stream:
        os.fsync(stream.fileno())
        assert _in_memory(stream.fileno())
        files = LocalFiles(tmp_path)
        files.let_go(1)
        files.let_go(2)  # there is none
        if not _keeps_files_in_memory(tmp_path):
            assert not _in_memory(stream.fileno())
        assert files.read(1, 0, len(payload)) == payload


def _in_memory(descriptor: int) -> bool:
    """Whether the second page of a file could be read without waiting for a disk."""
    try:
        return os.preadv(descriptor, [bytearray(4096)], 4096, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def _keeps_files_in_memory(folder: Path) -> bool:
    """Whether the file system is tmpfs, which has no disk."""
    folders = {Path(line.split()[1]): line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    return folders[next(place for place in (folder, *folder.parents) if place in folders)] == "tmpfs"
