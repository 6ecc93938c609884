"""What a test left behind in this process: child processes, threads, listening sockets.

* A snapshot before and one after; whatever is new after a short grace is a leak.
* Threads that are daemons do not count: they belong to libraries that keep them on purpose.
* A process that escaped (its parent died) is found at the end of the session by a mark in its environment.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import uuid
from pathlib import Path

GRACE_S = 3.0
"""A child that was told to end, or a thread that is finishing, may take this long."""

MARK = "HEADRACE_TEST_SESSION"
"""Environment variable that every process started by this session inherits."""

_PROC = Path("/proc")
_LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""


def mark_session() -> str:
    """Mark this process, and so all that it will start."""
    os.environ[MARK] = uuid.uuid4().hex
    return os.environ[MARK]


def snapshot() -> set[str]:
    """What exists now, one readable line each. Empty for the parts that this system cannot list."""
    return _children() | _threads() | _listeners()


def new_since(before: set[str]) -> list[str]:
    """What is there now and was not before, after a grace that ends as soon as nothing is left."""
    deadline = time.monotonic() + GRACE_S
    while (left := snapshot() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(left)


def descriptors(*, collect: bool = False) -> int:
    """How many files this process has open. ``collect``: after those are closed that other tests left to the garbage
    collector, which comes at any moment."""
    if collect:
        gc.collect()
    return len(os.listdir(_PROC / "self/fd"))


def escaped(mark: str) -> list[str]:
    """Processes of the marked session that still run after the grace, each with the test that started it."""
    deadline = time.monotonic() + GRACE_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _marked(mark: str) -> list[str]:
    found = []
    for entry in _PROC.glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            environ = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
        if f"{MARK}={mark}".encode() in environ:
            test = next((item for item in environ if item.startswith(b"PYTEST_CURRENT_TEST=")), b"=?").decode()
            found.append(f"process {entry.name} ({_command(int(entry.name))}), started by {test.partition('=')[2]}")
    return found


def _children() -> set[str]:
    found = set()
    for task in _PROC.glob("self/task/*/children"):
        try:
            pids = task.read_text().split()
        except OSError:
            continue  # the thread ended meanwhile
        found |= {f"child process {pid} ({_command(int(pid))})" for pid in pids}
    return found


def _command(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return "ended"


def _threads() -> set[str]:
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    }


def _listeners() -> set[str]:
    listening = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "self/net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        listening |= {fields[9] for line in lines if (fields := line.split())[3] == _LISTENING}
    found = set()
    for fd in _PROC.glob("self/fd/*"):
        try:
            target = os.readlink(fd)
        except OSError:
            continue  # the descriptor of this very listing
        if target.startswith("socket:[") and target[8:-1] in listening:
            found.add(f"listening socket (descriptor {fd.name})")
    return found
