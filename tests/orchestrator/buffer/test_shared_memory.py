"""Memory that two processes share."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from headrace_orchestrator.buffer.log.shared_memory import LEAST_BYTES, Arena
from headrace_orchestrator.buffer.log.writer_process import SUPPORTED

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="this system has no memfd_create")


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.make()
    yield made
    made.close()


def test_one_process_fits_it_and_writes_and_another_one_sees_it(arena: Arena):
    arena.fit(5)[:5] = b"first"
    other = Arena(os.dup(arena.descriptor))
    assert other.see(arena.size_bytes)[:5] == b"first"
    arena.fit(LEAST_BYTES + 6)[LEAST_BYTES : LEAST_BYTES + 6] = b"second"
    assert other.see(arena.size_bytes)[LEAST_BYTES : LEAST_BYTES + 6] == b"second"
    other.close()


def test_it_is_as_large_as_what_is_put_in_it_needs_and_goes_back_to_its_least_size_with_the_next_use(arena: Arena):
    for needed, taken in ((1, 1), (LEAST_BYTES, 1), (LEAST_BYTES + 1, 2), (5 * LEAST_BYTES, 5), (0, 1)):
        arena.fit(needed)
        assert os.fstat(arena.descriptor).st_size == arena.size_bytes == taken * LEAST_BYTES


def test_of_what_is_never_touched_nothing_is_really_taken_and_what_was_goes_with_its_size(arena: Arena):
    def taken_bytes() -> int:
        return os.fstat(arena.descriptor).st_blocks * 512

    memory = arena.fit(3 * LEAST_BYTES)
    assert taken_bytes() == 0
    memory[2 * LEAST_BYTES : 3 * LEAST_BYTES] = bytes(LEAST_BYTES)
    assert taken_bytes() == LEAST_BYTES
    arena.fit(1)
    assert taken_bytes() == 0


def test_what_it_could_not_map_it_does_not_show(arena: Arena, monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    arena.fit(2 * LEAST_BYTES)
    with monkeypatch.context() as refusing:
        refusing.setattr("headrace_orchestrator.buffer.log.shared_memory.mmap.mmap", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            arena.fit(1)
    memory = arena.fit(2 * LEAST_BYTES)
    memory[-5:] = b"there"
    assert os.pread(arena.descriptor, 5, 2 * LEAST_BYTES - 5) == b"there"


def test_it_is_reused_from_its_beginning(arena: Arena):
    memory = arena.fit(100)
    assert arena.fit(200) is memory
    assert arena.see(LEAST_BYTES) is memory


def test_who_still_looks_at_it_may_until_the_end(arena: Arena):
    look = memoryview(arena.fit(10))
    arena.fit(2 * LEAST_BYTES)
    assert bytes(look[:10]) == bytes(10)
