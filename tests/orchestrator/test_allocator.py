"""The settings of glibc's allocator, each case in its own process.

The processes run without the environment variables that change the allocator, and without huge pages, which would merge
five hundred page faults into one.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")

REUSE = """
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
"""The first use creates small tables of the interpreter. They stay in use, so free memory below them would be kept."""

THREADS = """
before = resident_mb()
my_turn, all_had_one = threading.Lock(), threading.Barrier(8)
def use():
    with my_turn:
        buffers = [bytearray(1 << 20) for _ in range(30)]
        del buffers
    all_had_one.wait()
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(resident_mb() - before)
"""
"""The threads take turns, because a small block in use keeps the free memory below it. No thread ends before all had a
turn, so that none reuses another's memory."""

PREPARATION = """
import ctypes, resource, threading
from pathlib import Path
from headrace_orchestrator.allocator import keep_freed_memory
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
def resident_mb():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Rss:")) * 1024 / 1e6
"""
"""smaps_rollup counts every page; /proc/self/statm is inexact by a few pages for each core."""

ALLOCATOR_VARIABLES = ("MALLOC_", "GLIBC_TUNABLES", "PYTHONMALLOC", "LD_PRELOAD")
"""Prefixes of the environment variables that change the allocator."""


def test_a_buffer_of_a_requests_size_reuses_freed_memory():
    assert measure(REUSE) < 100 < measure(REUSE, apply=False)


def test_free_memory_beyond_a_bound_is_returned_to_the_system():
    assert measure(LARGE) < 80


def test_free_memory_is_returned_whichever_thread_used_it():
    assert measure(THREADS) < 80


def measure(code: str, *, apply: bool = True) -> float:
    """Run code in a new process, with or without the settings; returns the number that it prints."""
    call = "keep_freed_memory()\n" if apply else ""
    result = subprocess.run(
        [sys.executable, "-c", PREPARATION + call + code],
        env={name: value for name, value in os.environ.items() if not name.startswith(ALLOCATOR_VARIABLES)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return float(result.stdout)
