"""A process that outlives a killed supervisor and removes the sandboxes it left.

* It waits for the end of a pipe, which the kernel closes when the supervisor dies, and holds nothing else.
* It has a session of its own, so a signal to the supervisor's process group does not kill it.
* A supervisor that stops in order ends it; then nothing is left to remove.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from typing import Self

from headrace_sandbox.host.reaper import reap
from headrace_sandbox.host.supervisor import is_dead, parse_supervisor, this_supervisor

log = logging.getLogger("headrace.sandbox")

END_S = 30.0
"""Deadline for the end of a supervisor whose descriptors are closed: its memory is freed before it disappears."""

POLL_S = 0.01
"""Interval of the checks for that end."""


class CleanupProcess:
    """The clean-up process of this supervisor, as a context."""

    def __enter__(self) -> Self:
        read, self._write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(this_supervisor())],
                stdin=read,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(read)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)


def main() -> None:
    """Wait for the end of the supervisor in the first argument, and remove what it left."""
    supervisor = parse_supervisor(sys.argv[1])
    assert supervisor is not None
    os.read(0, 1)
    deadline = time.monotonic() + END_S
    while not is_dead(supervisor) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for line in reap().left:
        log.warning("left by a supervisor that was killed: %s", line)


if __name__ == "__main__":
    main()
