"""Memory that two processes of one machine share: the orchestrator hands frames to the log writer in it.

* It grows to the size of its content, and shrinks to its minimum size at the next use.
* It is reused from its beginning: memory that was used a moment ago costs a fraction of fresh memory.

Linux only: it needs ``memfd_create``.
"""

from __future__ import annotations

import mmap
import os
from typing import Self

MIN_BYTES = 16 << 20
"""Minimum size. Pages that are never touched take no memory."""


class SharedMemory:
    """Shared memory behind a file descriptor. One process resizes it and writes; the other one maps it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = 0
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Self:
        """New shared memory. Raises OSError."""
        return cls(os.memfd_create("headrace-log", os.MFD_CLOEXEC))

    def resize(self, size_bytes: int) -> mmap.mmap:
        """The memory, with room for ``size_bytes``. Raises OSError."""
        wanted = max(MIN_BYTES, size_bytes + -size_bytes % MIN_BYTES)
        if wanted != self.size_bytes:
            self._map, self.size_bytes = None, 0  # if a call below fails, the old mapping is not valid any more
            os.ftruncate(self.descriptor, wanted)
        return self.map(wanted)

    def map(self, size_bytes: int) -> mmap.mmap:
        """The memory, which was resized to exactly ``size_bytes``. Raises OSError."""
        if self._map is None or size_bytes != self.size_bytes:
            self._map = mmap.mmap(self.descriptor, size_bytes)  # the old mapping ends with its last reference
            self.size_bytes = size_bytes
        return self._map

    def close(self) -> None:
        """Release the memory."""
        self._map, self.size_bytes = None, 0
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)
