"""Ids: UUIDv7, so that ids sort by the time they were made.

* Ids of one source are unique and strictly increasing, also when the clock stands still or goes back.
* The clock and the random source are injected; two processes never share random bits, forked ones neither.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable

_COUNTER_BITS = 30
"""Counter within a millisecond: 12 bits of ``rand_a`` and 18 of ``rand_b``."""
_SEED_MASK = (1 << (_COUNTER_BITS - 1)) - 1
"""The counter starts in its lower half, which leaves room for 2^29 ids in one millisecond."""
_RANDOM_BITS = 44
"""Fresh random bits of every id, what is left of ``rand_b``."""
_RANDOM_MASK = (1 << _RANDOM_BITS) - 1

_SEED_BYTES = 32
_POOL_BYTES = 4096
"""So much is made of a seed at a time."""

_forks = 0
"""How many forks lie between this process and the one that imported this module."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class RandomPool:
    """Random bytes in small portions, each given out once. A forked child never gives out what its parent might.

    They are SHAKE-256 of a seed that the system gave and a counter. A system call for each would cost more than all the
    rest, and one that lets go of the interpreter's lock can take milliseconds to get it back.
    """

    def __init__(self, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._seed = b""
        self._blocks = 0
        self._pool = b""
        self._used = 0
        self._forks = -1

    def __call__(self, size: int) -> bytes:
        """``size`` bytes, at most 4096. Safe to call from several threads."""
        with self._lock:
            if self._used + size > len(self._pool) or self._forks != _forks:
                self._fill()
            used, self._used = self._used, self._used + size
            return self._pool[used : used + size]

    def _fill(self) -> None:
        if self._forks != _forks:
            self._forks, self._seed = _forks, self._random_bytes(_SEED_BYTES)
        self._pool = hashlib.shake_256(self._seed + self._blocks.to_bytes(8, "little")).digest(_POOL_BYTES)
        self._blocks += 1
        self._used = 0


random_pool = RandomPool()
"""The process's own."""


class IdSource:
    """Makes UUIDv7 strings. Safe to call from several threads.

    ``clock_ns`` gives Unix time in nanoseconds; ``random_bytes(k)`` gives k random bytes.
    """

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes] = random_pool,
    ) -> None:
        self._clock_ns = clock_ns
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._last_ms = -1
        self._counter = 0

    def __call__(self) -> str:
        noise = int.from_bytes(self._random_bytes(10), "big")
        with self._lock:
            now_ms = self._clock_ns() // 1_000_000
            if now_ms > self._last_ms:
                self._last_ms = now_ms
                self._counter = (noise >> _RANDOM_BITS) & _SEED_MASK
            else:
                self._counter += 1
                if self._counter >> _COUNTER_BITS:
                    self._last_ms += 1
                    self._counter = 0
            ms, counter = self._last_ms, self._counter
        return "%08x-%04x-%04x-%04x-%012x" % (  # noqa: UP031  it is the fastest form by far
            ms >> 16,
            ms & 0xFFFF,
            0x7000 | counter >> 18,
            0x8000 | counter >> 4 & 0x3FFF,
            (counter & 0xF) << _RANDOM_BITS | noise & _RANDOM_MASK,
        )


new_id = IdSource()
"""``new_id() -> str``: the process's own source."""
