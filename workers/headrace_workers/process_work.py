"""Working time of another process: the time that it computes or sleeps, without the time that it waits for a CPU.

* It does not depend on how many other processes compute at the same time.
* A process that sleeps works: it may wait for a disk, or never wake up.

Sampling is enough for deadlines, and unlike the kernel's own account it includes a wait that goes on.
"""

from __future__ import annotations

import os

SAMPLE_S = 0.1
"""Interval at which a process should be sampled."""

TICKS = os.sysconf("SC_CLK_TCK")


class WorkMeter:
    """The work of process ``pid`` from ``now`` on, in seconds by a monotonic clock."""

    def __init__(self, pid: int, now: float) -> None:
        self._pid = pid
        self._sampled_at = now
        self._cpu_s, _ = _cpu_and_state(pid)
        self.work_s = 0.0

    def sample(self, now: float) -> float:
        """Add the work since the last sample, and return all work so far. The process must not have been reaped."""
        cpu_s, state = _cpu_and_state(self._pid)
        passed_s, used_s = now - self._sampled_at, cpu_s - self._cpu_s
        # A late sampler does not know when the process fell asleep.
        slept_s = 0.0 if state == "R" else min(passed_s, 2 * SAMPLE_S)
        self._sampled_at, self._cpu_s = now, cpu_s
        self.work_s += min(passed_s, max(used_s, slept_s))
        return self.work_s


def _cpu_and_state(pid: int) -> tuple[float, str]:
    """CPU time so far, and the kernel's letter for the state; R is running or waiting for a CPU."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / TICKS, fields[0]
