from __future__ import annotations

import itertools
import re
import subprocess
import sys
import uuid

from headrace.common.ids import IdSource, RandomPool, new_id

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def test_an_id_is_a_uuid_of_version_7_with_its_time() -> None:
    source = IdSource(clock_ns=lambda: 1_800_000_000_123_000_000)
    id = uuid.UUID(source())
    assert UUID7.fullmatch(str(id))
    assert (id.version, id.int >> 80) == (7, 1_800_000_000_123)


def test_ids_are_unique_and_increase() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert all(a < b for a, b in itertools.pairwise(ids))


def test_ids_increase_when_the_clock_stops_or_moves_back() -> None:
    clock = iter([5_000_000, 5_000_000, 3_000_000, 1_000_000, 6_000_000])
    source = IdSource(clock_ns=lambda: next(clock))
    ids = [source() for _ in range(5)]
    assert ids == sorted(set(ids))


def test_a_full_counter_borrows_from_the_next_millisecond() -> None:
    source = IdSource(clock_ns=lambda: 5_000_000, random_bytes=lambda size: b"\xff" * size)
    first = source()
    source._counter = (1 << 30) - 1
    second = source()
    assert first < second
    assert int(second.replace("-", "")[:12], 16) == 6


def test_two_processes_never_share_random_bits() -> None:
    drawn = itertools.count()
    source = IdSource(clock_ns=lambda: 5_000_000, random_bytes=lambda size: next(drawn).to_bytes(size, "big"))
    tails = {int(source().replace("-", ""), 16) & ((1 << 44) - 1) for _ in range(8)}
    assert tails == set(range(8))


def test_random_bytes_are_used_once() -> None:
    pool = RandomPool()
    drawn = [pool(10) for _ in range(2000)]
    assert {len(portion) for portion in drawn} == {10}
    assert len(set(drawn)) == 2000
    assert RandomPool(lambda size: bytes(size))(16) == RandomPool(lambda size: bytes(size))(16)
    assert RandomPool(lambda size: bytes(size))(16) != RandomPool(lambda size: b"\1" * size)(16)


def test_a_forked_child_has_its_own_random_bytes() -> None:
    script = """
import os
from headrace.common.ids import random_pool
random_pool(8)
child = os.fork()
os.write(1, random_pool(8).hex().encode() + b"\\n")
if child:
    os.waitpid(child, 0)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    parent, child = result.stdout.split()
    assert parent != child
