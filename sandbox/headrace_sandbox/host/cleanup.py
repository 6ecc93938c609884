"""A process that outlives a supervisor that is killed, and removes what it left.

* It waits for the end of a pipe, which the kernel closes with the supervisor, and holds nothing else.
* It is no child of the supervisor's session: what kills that as a group does not kill it.
* A supervisor that stops in order ends it; then there is nothing to remove.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from typing import Self

from headrace_sandbox.host.owner import is_dead, me, named
from headrace_sandbox.host.reaper import reap

log = logging.getLogger("headrace.sandbox")

END_S = 30.0
"""For a supervisor whose descriptors are closed to be gone: its memory is given back first."""

LOOK_S = 0.01
"""Between looks whether it is."""


class Heir:
    """The heir of this process, as a context: outside it there is none."""

    def __enter__(self) -> Self:
        read, self._write = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(me())],
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
    """Wait for the end of the supervisor that is named, and remove what it left."""
    supervisor = named(sys.argv[1])
    assert supervisor is not None
    os.read(0, 1)
    deadline = time.monotonic() + END_S
    while not is_dead(supervisor) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    for line in reap().left:
        log.warning("left by a supervisor that was killed: %s", line)


if __name__ == "__main__":
    main()
