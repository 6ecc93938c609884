"""Memory for large answers, used again once nobody looks at it.

* A buffer of which any view is alive is never written to again.
* Arrays in it are aligned for any dtype.

Reading into memory that is there already takes half the time: fresh pages have to be made, and zeroed, by the kernel.
"""

from __future__ import annotations

import threading

import numpy as np

KEPT = 4
"""BufferPool that are kept: for the batch in hand, one or two that were prefetched, and one to read into."""

SMALL_BYTES = 1 << 20
"""Up to this size fresh memory costs nothing worth saving."""

_ALIGNMENT = 64


class BufferPool:
    """Gives buffers; every thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[bytearray] = []

    def take(self, size: int) -> memoryview:
        """``size`` writable bytes that begin at a multiple of 64. They are not zeroed."""
        if size <= SMALL_BYTES:
            return _aligned(bytearray(size + _ALIGNMENT), size)
        with self._lock:
            for buffer in self._kept:
                if size + _ALIGNMENT <= len(buffer) <= 2 * size + _ALIGNMENT and _unused(buffer):
                    return _aligned(buffer, size)
            # Room for the next batch, which is seldom of the same size.
            buffer = bytearray(size + size // 8 + _ALIGNMENT)
            self._kept = [*self._kept[-KEPT + 1 :], buffer]
            return _aligned(buffer, size)


def _unused(buffer: bytearray) -> bool:
    """Whether no view of it is alive: one that is, forbids any change of size."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True


def _aligned(buffer: bytearray, size: int) -> memoryview:
    start = -np.frombuffer(buffer, np.uint8).ctypes.data % _ALIGNMENT
    return memoryview(buffer)[start : start + size]
