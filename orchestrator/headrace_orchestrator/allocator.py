"""Settings of glibc's allocator that keep freed memory for reuse.

* Request-sized buffers reuse freed memory; only very large buffers are mapped anew.
* Free memory at the end of the heap beyond a bound is returned to the system, whichever thread used it.
* With another C library nothing changes.

By default glibc returns free memory from 128 KB on. Getting it back costs a page fault for each 4 KiB: microseconds
each, up to ten on a virtual machine.
"""

from __future__ import annotations

import ctypes

KEPT_BYTES = 64 << 20
"""Maximum of free memory kept at the end of the heap. Free memory below a used block is kept as well, without a
bound."""

MAPPED_BYTES = 4 << 20
"""Smallest size of a block with its own mapping, which is returned to the system when the block is freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Apply the settings to this process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # the bound applies to each heap; by default each thread has its own
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
