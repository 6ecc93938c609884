"""Early writeback: the disk starts on data that will be synced soon, while more data is copied to the kernel.

* A writeback error is raised as an error of the write, because the kernel may report it only once.
* Where the call is not supported, by the kernel or the file system, nothing happens.

Writeback promises nothing: data is durable only after a later sync.
"""

from __future__ import annotations

import ctypes
import errno
import os

_SYNC_FILE_RANGE_WRITE = 2
_UNSUPPORTED = frozenset((errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM, errno.EOPNOTSUPP))
"""Errors with which kernels, sandboxes and file systems answer a call that they do not support."""

_call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _call is not None:
    _call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def begin_writeback(descriptor: int, offset: int, size_bytes: int) -> None:
    """Start to write a range of a file to the disk, without waiting for it. Raises OSError."""
    if _call is None or not _call(descriptor, offset, size_bytes, _SYNC_FILE_RANGE_WRITE):
        return
    reason = ctypes.get_errno()
    if reason not in _UNSUPPORTED:
        raise OSError(reason, os.strerror(reason))
