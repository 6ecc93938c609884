"""A program that becomes a command which ends with its parent. It is run as a file, to start in milliseconds.

A fork hook in the parent would do the same, but is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: the signal that this process gets when its parent dies. Kept across exec."""


def main(parent: int, command: list[str]) -> None:
    """Replace this process by the command. Does not return."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:
            raise SystemExit("The parent has already ended.")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
