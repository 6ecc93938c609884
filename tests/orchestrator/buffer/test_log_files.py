"""Files of a log on a local disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

import pytest

from headrace.errors import CorruptRecord, StoreError
from headrace.store.log_files import path_of
from headrace.store.log_format import FrameType, pack_frame
from headrace_orchestrator.buffer.log.files import MAX_OPEN, LocalLogFiles
from tests.e2e.processes import wait_for
from tests.orchestrator.buffer.test_log import flip


def make_file(folder: Path, number: int, payload: bytes) -> None:
    path_of(folder, number).write_bytes(b"".join(pack_frame(FrameType.TRAJECTORY, payload)))


def open_files(folder: Path) -> list[str]:
    """Files of a folder that this process has open. All else that is open may be what other tests left to the garbage
    collector."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing
            path = Path(os.readlink(descriptor))
            names += [path.name] if path.parent == folder else []
    return names


def test_every_read_is_checked_against_its_checksum(tmp_path: Path) -> None:
    make_file(tmp_path, 1, b"payload")
    files = LocalLogFiles(tmp_path)
    assert files.read(1, 0, 7) == b"payload"
    flip(path_of(tmp_path, 1), 64)
    with pytest.raises(CorruptRecord, match=r"offset 0 of 00000001\.log"):
        files.read(1, 0, 7)
    with pytest.raises(CorruptRecord, match=r"00000002\.log cannot be read: No such file"):
        files.read(2, 0, 7)


def test_a_file_may_be_deleted_while_a_thread_reads_from_it(tmp_path: Path) -> None:
    make_file(tmp_path, 1, b"payload")
    files = LocalLogFiles(tmp_path)
    files.read(1, 0, 7)
    reader = files._open_files[1]
    assert files.remove(1) == 128
    assert files.sizes() == {}
    assert os.pread(reader.descriptor, 7, 64) == b"payload"
    assert open_files(tmp_path) == ["00000001.log (deleted)"]
    del reader
    assert open_files(tmp_path) == []


def test_a_file_whose_number_is_reused_is_read_anew(tmp_path: Path) -> None:
    make_file(tmp_path, 1, b"before")
    files = LocalLogFiles(tmp_path)
    files.read(1, 0, 6)
    path_of(tmp_path, 1).unlink()
    make_file(tmp_path, 1, b"behind")
    files.forget(1)
    assert files.read(1, 0, 6) == b"behind"
    files.close()


def test_few_files_are_held_open_however_many_there_are(tmp_path: Path) -> None:
    files = LocalLogFiles(tmp_path)
    numbers = range(1, 2 * MAX_OPEN)
    for number in numbers:
        make_file(tmp_path, number, b"%04d" % number)
    for number in (*numbers, *reversed(numbers)):
        assert files.read(number, 0, 4) == b"%04d" % number
        assert 1 <= len(open_files(tmp_path)) <= MAX_OPEN
    files.close()
    assert open_files(tmp_path) == []


def test_a_process_that_runs_out_of_a_resource_does_not_call_a_record_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out(path: Path, flags: int, mode: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    make_file(tmp_path, 1, b"payload")
    files = LocalLogFiles(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", out)
        with pytest.raises(StoreError, match="Too many open files"):
            files.read(1, 0, 7)
    assert files.read(1, 0, 7) == b"payload"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can drop files from the page cache")
def test_the_content_of_a_file_can_be_dropped_from_the_page_cache_and_can_still_be_read(tmp_path: Path) -> None:
    payload = os.urandom(1 << 20)
    make_file(tmp_path, 1, payload)
    with open(path_of(tmp_path, 1), "rb") as stream:
        os.fsync(stream.fileno())
        stream.read()  # if memory is short, the kernel may have dropped it already
    assert _in_memory(path_of(tmp_path, 1))
    files = LocalLogFiles(tmp_path)
    files.release_memory(2)  # the file does not exist

    def is_dropped() -> bool:
        files.release_memory(1)  # pages that the kernel itself uses at that moment stay
        return not _in_memory(path_of(tmp_path, 1))

    if not _keeps_files_in_memory(tmp_path):
        wait_for("it is let go", is_dropped)
    assert files.read(1, 0, len(payload)) == payload


def _in_memory(path: Path) -> bool:
    """True if the second page of a file is in the page cache."""
    second, is_in = mmap.PAGESIZE, ctypes.c_ubyte()
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 2 * second, access=mmap.ACCESS_COPY) as pages:
        page = ctypes.c_char.from_buffer(pages, second)
        assert ctypes.CDLL(None).mincore(ctypes.byref(page), mmap.PAGESIZE, ctypes.byref(is_in)) == 0
        del page  # otherwise the mapping cannot be closed
    return bool(is_in.value & 1)


def _keeps_files_in_memory(folder: Path) -> bool:
    """True if the file system is tmpfs, which has no disk."""
    folders = {Path(line.split()[1]): line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    return folders[next(place for place in (folder, *folder.parents) if place in folders)] == "tmpfs"
