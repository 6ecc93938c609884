"""Opens a sandbox's scratch folder from outside.

* It is found through the sandbox's first process before the program starts, and held by a descriptor that outlives
  them both, so a program cannot substitute another folder.
* bubblewrap signals when the folder is mounted; nothing polls for it.
* Where this process may not open it, the result is None, and a full folder is not reported.
* Its memory is freed when the descriptor is closed.
"""

from __future__ import annotations

import contextlib
import os

from headrace.common.timeouts import timeout
from headrace_sandbox.host.descriptors import is_readable, wait_readable
from headrace_sandbox.host.layout import SCRATCH

MOUNT_S = 5.0
"""Deadline for the folder to be mounted: some milliseconds on a quiet machine."""

PLACES = (f"newroot{SCRATCH}", SCRATCH[1:])
"""Paths of the folder below the first process's root: before bubblewrap has changed that root, and after."""

FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


async def wait_scratch_folder(pid: int, pidfd: int, mounted: int, stack: contextlib.ExitStack) -> int | None:
    """A descriptor of the scratch folder of a sandbox that is being made; None where it cannot be opened. ``pid``: its
    first process, which sees this machine's files before its own. ``mounted``: becomes readable when it sees its
    own."""
    with contextlib.suppress(TimeoutError):
        async with timeout(MOUNT_S):
            await wait_readable(mounted)
    for place in PLACES:
        if not is_readable(pidfd):
            with contextlib.suppress(FileNotFoundError):
                return open_scratch_folder(pid, stack, place)
    return None


def open_scratch_folder(pid: int, stack: contextlib.ExitStack, place: str = PLACES[-1]) -> int | None:
    """A descriptor of the scratch folder of a sandbox that is ready; None where it cannot be opened. Raises
    FileNotFoundError if it has none."""
    try:
        descriptor = os.open(f"/proc/{pid}/root/{place}", FLAGS)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    if os.fstat(descriptor).st_dev == _host_device():
        os.close(descriptor)
        raise FileNotFoundError
    stack.callback(os.close, descriptor)
    return descriptor


def _host_device() -> int | None:
    try:
        return os.stat(SCRATCH).st_dev
    except OSError:
        return None
