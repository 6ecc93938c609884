"""Memory that two processes share."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from headrace_orchestrator.buffer.log.shared_memory import MIN_BYTES, SharedMemory
from headrace_orchestrator.buffer.log.writer_process import SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="this system has no memfd_create")


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory.create()
    yield memory
    memory.close()


def test_one_process_resizes_it_and_writes_and_another_one_maps_it(memory: SharedMemory):
    memory.resize(5)[:5] = b"first"
    other = SharedMemory(os.dup(memory.descriptor))
    assert other.map(memory.size_bytes)[:5] == b"first"
    memory.resize(MIN_BYTES + 6)[MIN_BYTES : MIN_BYTES + 6] = b"second"
    assert other.map(memory.size_bytes)[MIN_BYTES : MIN_BYTES + 6] == b"second"
    other.close()


def test_it_grows_to_the_size_of_its_content_and_shrinks_to_its_minimum_size_at_the_next_use(
    memory: SharedMemory,
):
    for needed, taken in ((1, 1), (MIN_BYTES, 1), (MIN_BYTES + 1, 2), (5 * MIN_BYTES, 5), (0, 1)):
        memory.resize(needed)
        assert os.fstat(memory.descriptor).st_size == memory.size_bytes == taken * MIN_BYTES


def test_untouched_pages_take_no_memory_and_shrinking_releases_touched_ones(memory: SharedMemory):
    def taken_bytes() -> int:
        return os.fstat(memory.descriptor).st_blocks * 512

    mapped = memory.resize(3 * MIN_BYTES)
    assert taken_bytes() == 0
    mapped[2 * MIN_BYTES : 3 * MIN_BYTES] = bytes(MIN_BYTES)
    assert taken_bytes() == MIN_BYTES
    memory.resize(1)
    assert taken_bytes() == 0


def test_after_a_failed_resize_no_old_mapping_is_used(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    memory.resize(2 * MIN_BYTES)
    with monkeypatch.context() as refusing:
        refusing.setattr("headrace_orchestrator.buffer.log.shared_memory.mmap.mmap", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            memory.resize(1)
    mapped = memory.resize(2 * MIN_BYTES)
    mapped[-5:] = b"there"
    assert os.pread(memory.descriptor, 5, 2 * MIN_BYTES - 5) == b"there"


def test_it_is_reused_from_its_beginning(memory: SharedMemory):
    mapped = memory.resize(100)
    assert memory.resize(200) is mapped
    assert memory.map(MIN_BYTES) is mapped


def test_an_old_mapping_stays_readable_until_its_last_reference(memory: SharedMemory):
    view = memoryview(memory.resize(10))
    memory.resize(2 * MIN_BYTES)
    assert bytes(view[:10]) == bytes(10)
