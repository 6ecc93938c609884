"""Memory for responses, reused once no view of it is alive."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from headrace.client.buffer_pool import KEPT, SMALL_BYTES, BufferPool

LARGE = 4 * SMALL_BYTES


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.mark.parametrize("size", [0, 1, 1000, SMALL_BYTES, LARGE, LARGE + 7])
def test_arrays_in_it_are_aligned_for_any_dtype(size: int) -> None:
    view = BufferPool().take(size)
    assert (len(view), view.readonly) == (size, False)
    assert not size or address(view) % 64 == 0


@pytest.mark.parametrize("look", ["view", "array", "slice of a slice"])
def test_a_buffer_is_never_written_to_again_while_a_view_of_it_is_alive(look: str) -> None:
    buffers = BufferPool()
    first = buffers.take(LARGE)
    first[:3] = b"abc"
    live_view = {"view": first, "array": np.frombuffer(first, np.uint8), "slice of a slice": first[:9][1:]}[look]
    del first
    for _ in range(2 * KEPT):
        buffers.take(LARGE)[:] = bytes(LARGE)
    assert bytes(live_view[:2]) in (b"ab", b"bc")


def test_a_buffer_is_reused_once_no_view_is_alive() -> None:
    buffers = BufferPool()
    first = address(buffers.take(LARGE))
    view = buffers.take(LARGE - 1000)
    assert address(view) == first
    other = buffers.take(LARGE)
    assert address(other) != first
    del view
    gc.collect()
    assert address(buffers.take(LARGE + SMALL_BYTES // 8)) == first, "a batch that is somewhat larger fits too"


def test_the_number_of_kept_buffers_is_bounded() -> None:
    buffers = BufferPool()
    views = [buffers.take(LARGE) for _ in range(KEPT + 3)]
    assert len({address(view) for view in views}) == KEPT + 3
    assert len(buffers._buffers) == KEPT
    tiny = buffers.take(SMALL_BYTES + 1)
    assert address(tiny) not in {address(view) for view in views}
