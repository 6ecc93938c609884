"""Work for bounded calls, measured in CPU time."""

from __future__ import annotations

import time


def compute(cpu_s: float) -> float:
    """Use a CPU for this long."""
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass
    return cpu_s
