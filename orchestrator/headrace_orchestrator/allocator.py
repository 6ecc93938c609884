"""glibc's allocator, told to keep what a service uses again in a moment.

* Buffers of a request's size come from memory that was used before; only very large ones are mapped anew.
* What is free at the end of the heap beyond a bound goes back to the system, whichever thread used it.
* With another C library nothing happens.

By itself glibc begins to give free memory back at 128 KB. Taking it again costs a page fault for each 4 KiB:
microseconds, on a virtual machine up to ten.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20
"""Free memory that is kept at most at the end of the heap. What is free below a block in use is kept too, beyond any
bound."""

MAPPED_BYTES = 4 << 20
"""Blocks from this size on are mapped by themselves, and go back at once."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """For this process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # the bound is for each heap, and by itself each thread would get one
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
