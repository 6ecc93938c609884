"""Early writeback: the disk begins with what will be synced soon, while more is copied to the kernel.

* Nothing is promised: what is durable is what is synced afterwards.
* An error that comes up is the write's: nobody else may be told of it.
* Where the kernel or the file system has no such call, nothing happens.
"""

from __future__ import annotations

import ctypes
import errno
import os

_SYNC_FILE_RANGE_WRITE = 2
_NOT_THERE = frozenset((errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM, errno.EOPNOTSUPP))
"""What kernels, sandboxes and file systems say to a call that they do not know."""

_call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _call is not None:
    _call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def begin_writeback(descriptor: int, offset: int, size_bytes: int) -> None:
    """Have these bytes of a file on their way to the disk; does not wait for them. Raises OSError."""
    if _call is None or not _call(descriptor, offset, size_bytes, _SYNC_FILE_RANGE_WRITE):
        return
    reason = ctypes.get_errno()
    if reason not in _NOT_THERE:
        raise OSError(reason, os.strerror(reason))
