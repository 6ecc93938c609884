"""A sandbox's scratch folder, as the supervisor sees it from outside.

* It is found through the sandbox's first process before the program starts, and held by a descriptor that outlives them
  both: what the program does cannot show another folder.
* bubblewrap tells when it is there: nobody looks again and again.
* Where this process may not look there is none, and a full folder is not told.
* Its memory is given back when the descriptor is closed.
"""

from __future__ import annotations

import contextlib
import os

from headrace.common.timeouts import timeout
from headrace_sandbox.host.bwrap import SCRATCH
from headrace_sandbox.host.descriptors import is_readable, readable

COME_S = 5.0
"""For the folder to be mounted: some milliseconds on a quiet machine."""

PLACES = (f"newroot{SCRATCH}", SCRATCH[1:])
"""Where it is in what the first process has for a root: before bubblewrap is done with that, and after."""

FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


async def scratch_come(pid: int, pidfd: int, made: int, stack: contextlib.ExitStack) -> int | None:
    """A descriptor of the folder of a sandbox that is being made; None where it cannot be seen. ``pid``: of its first
    process, which has this machine's files before it has its own. ``made``: becomes readable when it has."""
    with contextlib.suppress(TimeoutError):
        async with timeout(COME_S):
            await readable(made)
    for place in PLACES:
        if not is_readable(pidfd):
            with contextlib.suppress(FileNotFoundError):
                return scratch_of(pid, stack, place)
    return None


def scratch_of(pid: int, stack: contextlib.ExitStack, place: str = PLACES[-1]) -> int | None:
    """The same of one that is made. Raises FileNotFoundError if it has none."""
    try:
        descriptor = os.open(f"/proc/{pid}/root/{place}", FLAGS)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    if os.fstat(descriptor).st_dev == _own_device():
        os.close(descriptor)
        raise FileNotFoundError
    stack.callback(os.close, descriptor)
    return descriptor


def _own_device() -> int | None:
    try:
        return os.stat(SCRATCH).st_dev
    except OSError:
        return None
