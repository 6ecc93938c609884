"""glibc's allocator as the orchestrator has it; each case in a process of its own.

Neither the environment nor huge pages change what is measured: variables that tell the allocator otherwise are left
out, and each process does without huge pages, which make one page fault of five hundred.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")

USED_AGAIN = """
def use(): return [bytes(bytearray(37_000)) for _ in range(32)]
for _ in range(20): use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100): use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

LARGE = """
def use(): return [bytearray(1 << 20) for _ in range(300)]
use()
before = resident_mb()
use()
print(resident_mb() - before)
"""
"""The first use makes the interpreter's own small tables, which stay and would keep what is free below them."""

THREADS = """
before = resident_mb()
my_turn, all_had_one = threading.Lock(), threading.Barrier(8)
def use():
    with my_turn:
        held = [bytearray(1 << 20) for _ in range(30)]
        del held
    all_had_one.wait()
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(resident_mb() - before)
"""
"""One after the other, for a small block that is still in use keeps what is free below it. Nobody ends before all had a
turn, so that no thread takes over what another one left."""

PREPARED = """
import ctypes, resource, threading
from pathlib import Path
from headrace_orchestrator.allocator import keep_freed_memory
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
def resident_mb():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * 1024 / 1e6
"""
"""Pages are counted one by one: /proc/self/statm is off by some for each core."""

TELLS_THE_ALLOCATOR = ("MALLOC_", "GLIBC_TUNABLES", "PYTHONMALLOC", "LD_PRELOAD")
"""Beginnings of names of environment variables."""


def test_buffers_of_a_requests_size_come_from_memory_that_was_used_before():
    assert measured(USED_AGAIN) < 100 < measured(USED_AGAIN, keeps=False)


def test_what_is_free_beyond_a_bound_goes_back_to_the_system():
    assert measured(LARGE) < 80


def test_the_bound_is_one_for_all_threads():
    assert measured(THREADS) < 80


def measured(code: str, *, keeps: bool = True) -> float:
    """What code prints, in a process whose allocator keeps freed memory or not."""
    call = "keep_freed_memory()\n" if keeps else ""
    done = subprocess.run(
        [sys.executable, "-c", PREPARED + call + code],
        env={name: value for name, value in os.environ.items() if not name.startswith(TELLS_THE_ALLOCATOR)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return float(done.stdout)
