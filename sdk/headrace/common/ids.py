"""Ids: UUIDv7, which sort by the time of their creation.

* Ids of one source are unique and strictly increasing, also when the clock stops or moves back.
* The clock and the random source are injected; two processes never share random bits, not even after a fork.
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
"""Mask of the counter's start value: the lower half, which leaves room for 2^29 ids in one millisecond."""
_RANDOM_BITS = 44
"""Fresh random bits of every id: the rest of ``rand_b``."""
_RANDOM_MASK = (1 << _RANDOM_BITS) - 1

_SEED_BYTES = 32
_POOL_BYTES = 4096
"""Bytes generated from the seed at a time."""

_forks = 0
"""Number of forks between the process that imported this module and this one."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class RandomPool:
    """Random bytes in small portions, each used once. A forked child never returns bytes that its parent may return.

    The bytes are SHAKE-256 of a system seed and a counter. A system call for each id would cost more than the rest of
    the id, and one that releases the interpreter lock can take milliseconds to acquire it again.
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
        """``size`` random bytes, at most 4096. Safe to call from several threads."""
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
"""The random bytes of this process."""


class IdSource:
    """A source of UUIDv7 strings. Safe to call from several threads.

    ``clock_ns`` returns Unix time in nanoseconds; ``random_bytes(k)`` returns k random bytes.
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
        return "%08x-%04x-%04x-%04x-%012x" % (  # noqa: UP031  this is the fastest form by far
            ms >> 16,
            ms & 0xFFFF,
            0x7000 | counter >> 18,
            0x8000 | counter >> 4 & 0x3FFF,
            (counter & 0xF) << _RANDOM_BITS | noise & _RANDOM_MASK,
        )


new_id = IdSource()
"""``new_id() -> str``: the id source of this process."""
