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
def arena() -> Iterator[SharedMemory]:
    made = SharedMemory.create()
    yield made
    made.close()


def test_one_process_fits_it_and_writes_and_another_one_sees_it(arena: SharedMemory):
    arena.resize(5)[:5] = b"first"
    other = SharedMemory(os.dup(arena.descriptor))
    assert other.map(arena.size_bytes)[:5] == b"first"
    arena.resize(MIN_BYTES + 6)[MIN_BYTES : MIN_BYTES + 6] = b"second"
    assert other.map(arena.size_bytes)[MIN_BYTES : MIN_BYTES + 6] == b"second"
    other.close()


def test_it_grows_to_what_its_content_needs_and_shrinks_to_its_minimum_size_at_the_next_use(
    arena: SharedMemory,
):
    for needed, taken in ((1, 1), (MIN_BYTES, 1), (MIN_BYTES + 1, 2), (5 * MIN_BYTES, 5), (0, 1)):
        arena.resize(needed)
        assert os.fstat(arena.descriptor).st_size == arena.size_bytes == taken * MIN_BYTES


def test_of_what_is_never_touched_nothing_is_really_taken_and_what_was_goes_with_its_size(arena: SharedMemory):
    def taken_bytes() -> int:
        return os.fstat(arena.descriptor).st_blocks * 512

    memory = arena.resize(3 * MIN_BYTES)
    assert taken_bytes() == 0
    memory[2 * MIN_BYTES : 3 * MIN_BYTES] = bytes(MIN_BYTES)
    assert taken_bytes() == MIN_BYTES
    arena.resize(1)
    assert taken_bytes() == 0


def test_what_it_could_not_map_it_does_not_show(arena: SharedMemory, monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    arena.resize(2 * MIN_BYTES)
    with monkeypatch.context() as refusing:
        refusing.setattr("headrace_orchestrator.buffer.log.shared_memory.mmap.mmap", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            arena.resize(1)
    memory = arena.resize(2 * MIN_BYTES)
    memory[-5:] = b"there"
    assert os.pread(arena.descriptor, 5, 2 * MIN_BYTES - 5) == b"there"


def test_it_is_reused_from_its_beginning(arena: SharedMemory):
    memory = arena.resize(100)
    assert arena.resize(200) is memory
    assert arena.map(MIN_BYTES) is memory


def test_who_still_looks_at_it_may_until_the_end(arena: SharedMemory):
    look = memoryview(arena.resize(10))
    arena.resize(2 * MIN_BYTES)
    assert bytes(look[:10]) == bytes(10)
