"""Memory for large responses, reused once no view of it is alive.

* A buffer is never written to again while a view of it is alive.
* Arrays in it are aligned for any dtype.

Reading into existing memory takes half the time: the kernel has to allocate and zero fresh pages.
"""

from __future__ import annotations

import threading

import numpy as np

from headrace.wire.alignment import ALIGNMENT

KEPT = 4
"""Buffers kept: for the current batch, one or two prefetched ones, and one to read into."""

SMALL_BYTES = 1 << 20
"""Size up to which the cost of fresh memory does not matter."""


class BufferPool:
    """A pool of buffers. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        """``size`` writable bytes that begin at a multiple of ``ALIGNMENT``. They are not zeroed."""
        if size <= SMALL_BYTES:
            return _aligned(bytearray(size + ALIGNMENT), size)
        with self._lock:
            for buffer in self._buffers:
                if size + ALIGNMENT <= len(buffer) <= 2 * size + ALIGNMENT and _is_unused(buffer):
                    return _aligned(buffer, size)
            # Some room to spare: the next batch rarely has the same size.
            buffer = bytearray(size + size // 8 + ALIGNMENT)
            self._buffers = [*self._buffers[-KEPT + 1 :], buffer]
            return _aligned(buffer, size)


def _is_unused(buffer: bytearray) -> bool:
    """True if no view of the buffer is alive: Python refuses to resize a bytearray that has one."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True


def _aligned(buffer: bytearray, size: int) -> memoryview:
    start = -np.frombuffer(buffer, np.uint8).ctypes.data % ALIGNMENT
    return memoryview(buffer)[start : start + size]
