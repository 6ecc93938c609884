"""A machine whose CPUs other processes use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_machine() -> Iterator[None]:
    """Let four processes for each CPU compute, at the priority of bounded calls and environment processes."""
    program = "import os\nos.nice(5)\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4 * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()
