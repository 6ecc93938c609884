"""Limits the descriptors of the test's process."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

MOST_NEEDED = 24
"""More descriptors than any call of a runtime needs at a time."""


@contextlib.contextmanager
def only_descriptors(more: int) -> Iterator[None]:
    """Allow only this many more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    filled = [os.open("/dev/null", os.O_RDONLY)]
    while filled[-1] < most:
        filled.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filled:
            os.close(descriptor)
