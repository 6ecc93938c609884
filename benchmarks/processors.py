"""CPU time that other processes of this machine use during a benchmark.

* The benchmark's own processes are this one and its living descendants; all others count, including kernel threads.
* Time that the host took from this machine counts as others' time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE, _WAITING_FOR_DISK, _GUESTS = 3, 4, slice(8, None)


def others_s() -> float:
    """Return the CPU seconds of all other processes since the machine started; use the difference of two calls."""
    return _machine_s() - sum(_own_s())


def _machine_s() -> float:
    with Path("/proc/stat").open() as file:
        ticks = [int(field) for field in file.readline().split()[1:]]
    ticks[_IDLE] = ticks[_WAITING_FOR_DISK] = 0
    del ticks[_GUESTS]  # already included in user time
    return sum(ticks) / _TICKS_A_SECOND


def _own_s() -> list[float]:
    parents, used_s = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pid = int(folder.name)
            # Includes the time of children that ended and were reaped.
            parents[pid] = int(fields[1])
            used_s[pid] = sum(map(int, fields[11:15])) / _TICKS_A_SECOND
    return [each for pid, each in used_s.items() if _is_own(pid, parents)]


def _is_own(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parents.get(pid, 0)
    return False
