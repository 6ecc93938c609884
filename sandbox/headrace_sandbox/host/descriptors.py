"""File descriptors that are made one after the other, and what comes of it where this machine has no more.

* Whatever fails between the first and the last one, none is left open.
* What this machine refuses (descriptors, processes, memory) is a failure of ours that may be tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import IO, Any

from headrace.errors import SandboxFailure


class Descriptors:
    """Descriptors that are closed at the end of a ``with``, but for those that somebody took over."""

    def __init__(self) -> None:
        self._owned: set[int] = set()

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._owned:
            os.close(descriptor)

    def own(self, descriptor: int) -> int:
        """One more."""
        self._owned.add(descriptor)
        return descriptor

    def pipe(self) -> tuple[int, int]:
        """The ends of a new pipe, to read and to write."""
        reads, writes = os.pipe()
        return self.own(reads), self.own(writes)

    def leash(self) -> tuple[int, int]:
        """Two descriptors: the first can be read once nobody holds the second any more, which reads as empty."""
        ours, theirs = socket.socketpair()
        ours.shutdown(socket.SHUT_WR)
        return self.own(ours.detach()), self.own(theirs.detach())

    def close(self, *descriptors: int) -> None:
        """Close these already."""
        self.give(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def give(self, *descriptors: int) -> None:
        """They are somebody else's now."""
        self._owned.difference_update(descriptors)


def piped(
    arguments: Sequence[str],
    *,
    stdin: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """``Popen`` whose output goes to a pipe. Before Python 3.11.4 ``Popen`` itself leaves the first pipes open where it
    can make no further one. Raises OSError."""
    streams: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": stderr}
    ours: dict[str, int] = {}
    with Descriptors() as made:
        for name in [name for name, stream in streams.items() if stream == subprocess.PIPE]:
            reads, writes = made.pipe()
            streams[name], ours[name] = (reads, writes) if name == "stdin" else (writes, reads)
        process: subprocess.Popen[bytes] = subprocess.Popen(arguments, **streams, **options)
        for name, descriptor in ours.items():
            setattr(process, name, os.fdopen(descriptor, "wb" if name == "stdin" else "rb"))
        made.give(*ours.values())
    return process


def is_readable(descriptor: int) -> bool:
    """Whether it can be read now, or is at its end."""
    look = select.poll()  # `select.select` takes no descriptor above 1023
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(0))


async def readable(descriptor: int) -> None:
    """Wait until it can be read, or is at its end."""
    loop = asyncio.get_running_loop()
    can_be_read = asyncio.Event()
    loop.add_reader(descriptor, can_be_read.set)
    try:
        await can_be_read.wait()
    finally:
        loop.remove_reader(descriptor)


@contextlib.contextmanager
def refused_by_machine() -> Iterator[None]:
    """Raises SandboxFailure ``refused-by-machine`` for an OSError."""
    try:
        yield
    except OSError as error:
        raise SandboxFailure(
            f"This machine refused what a sandbox needs: {error}.",
            hint="Where open files are too many: run fewer at a time, or raise the limit (`ulimit -n`).",
            kind="refused-by-machine",
            retryable=True,
        ) from error
