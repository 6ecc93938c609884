"""Memory that two processes of one machine share: what the log's writer is given lies in it.

* It is as large as what is put in it needs, and goes back to its least size with the next use.
* It is reused from its beginning: memory that was used a moment ago costs a fraction of fresh one.

Linux only: it rests on ``memfd_create``.
"""

from __future__ import annotations

import mmap
import os
from typing import Self

MIN_BYTES = 16 << 20
"""Of what is never touched nothing is really taken."""


class SharedMemory:
    """Shared memory behind a descriptor. One process fits it and writes, another one sees it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = 0
        self._map: mmap.mmap | None = None

    @classmethod
    def make(cls) -> Self:
        """A new one. Raises OSError."""
        return cls(os.memfd_create("headrace-log", os.MFD_CLOEXEC))

    def fit(self, size_bytes: int) -> mmap.mmap:
        """The memory, for so many bytes. Raises OSError."""
        wanted = max(MIN_BYTES, size_bytes + -size_bytes % MIN_BYTES)
        if wanted != self.size_bytes:
            self._map, self.size_bytes = None, 0  # if one of these fails, what was seen is not there any more
            os.ftruncate(self.descriptor, wanted)
        return self.see(wanted)

    def see(self, size_bytes: int) -> mmap.mmap:
        """The memory, which was fitted to so many bytes. Raises OSError."""
        if self._map is None or size_bytes != self.size_bytes:
            self._map = mmap.mmap(self.descriptor, size_bytes)  # the one before goes with who still looks at it
            self.size_bytes = size_bytes
        return self._map

    def close(self) -> None:
        """Give it up."""
        self._map, self.size_bytes = None, 0
        descriptor, self.descriptor = self.descriptor, -1
        os.close(descriptor)
