"""glibc's allocator as the orchestrator has it; each case in a process of its own."""

from __future__ import annotations

import ctypes
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
before = resident_mb()
held = [bytearray(1 << 20) for _ in range(300)]
del held
print(resident_mb() - before)
"""

THREADS = """
before = resident_mb()
all_hold = threading.Barrier(8)
def use():
    held = [bytearray(1 << 20) for _ in range(30)]
    all_hold.wait()
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(resident_mb() - before)
"""


def test_buffers_of_a_requests_size_come_from_memory_that_was_used_before():
    assert measured(USED_AGAIN) < 100 < measured(USED_AGAIN, keeps=False)


def test_what_is_free_beyond_a_bound_goes_back_to_the_system():
    assert measured(LARGE) < 80


def test_the_bound_is_one_for_all_threads():
    assert measured(THREADS) < 80


def measured(code: str, *, keeps: bool = True) -> float:
    """What code prints, in a process whose allocator keeps freed memory or not."""
    before = (
        "import resource, threading\n"
        "from pathlib import Path\n"
        "from headrace_orchestrator.allocator import keep_freed_memory\n"
        "def resident_mb():\n"
        "    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize() / 1e6\n"
    )
    call = "keep_freed_memory()\n" if keeps else ""
    done = subprocess.run(
        [sys.executable, "-c", before + call + code], capture_output=True, text=True, check=True, timeout=60
    )
    return float(done.stdout)
