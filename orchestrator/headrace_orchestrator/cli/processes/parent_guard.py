"""A program that replaces itself with a command that the kernel kills when the parent dies. It is run as a file, so
that it starts in milliseconds.

A fork hook in the parent would do the same, but is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""The option of prctl (linux/prctl.h) for the signal at the parent's death, which exec keeps."""


def main(parent: int, command: list[str]) -> None:
    """Replace this process with the command. Does not return."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:
            raise SystemExit("The parent has already ended.")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
