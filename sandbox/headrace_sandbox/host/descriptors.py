"""Opens several file descriptors without leaking any, and reports exhausted resources as a failure.

* A failure between the first and the last descriptor leaves none of them open.
* A refusal of this machine (descriptors, processes, memory) is our own, retryable failure.
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
    """Descriptors that are closed at the end of a ``with``, except those whose ownership was released."""

    def __init__(self) -> None:
        self._owned: set[int] = set()

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._owned:
            os.close(descriptor)

    def own(self, descriptor: int) -> int:
        """Own this descriptor."""
        self._owned.add(descriptor)
        return descriptor

    def pipe(self) -> tuple[int, int]:
        """The ends of a new pipe, for reading and for writing."""
        reads, writes = os.pipe()
        return self.own(reads), self.own(writes)

    def hangup_pair(self) -> tuple[int, int]:
        """Two descriptors: the first becomes readable once every copy of the second is closed. The second reads as
        empty."""
        ours, theirs = socket.socketpair()
        ours.shutdown(socket.SHUT_WR)
        return self.own(ours.detach()), self.own(theirs.detach())

    def close(self, *descriptors: int) -> None:
        """Close these now."""
        self.release(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def release(self, *descriptors: int) -> None:
        """Release ownership of these."""
        self._owned.difference_update(descriptors)


def popen_with_pipes(
    arguments: Sequence[str],
    *,
    stdin: int | IO[bytes] = subprocess.PIPE,
    stderr: int | IO[bytes] = subprocess.PIPE,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """``Popen`` with its output on a pipe. Before Python 3.11.4 ``Popen`` itself leaks the first pipes if it cannot
    make a further one. Raises OSError."""
    streams: dict[str, Any] = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": stderr}
    ours: dict[str, int] = {}
    with Descriptors() as owned:
        for name in [name for name, stream in streams.items() if stream == subprocess.PIPE]:
            reads, writes = owned.pipe()
            streams[name], ours[name] = (reads, writes) if name == "stdin" else (writes, reads)
        process: subprocess.Popen[bytes] = subprocess.Popen(arguments, **streams, **options)
        for name, descriptor in ours.items():
            setattr(process, name, os.fdopen(descriptor, "wb" if name == "stdin" else "rb"))
        owned.release(*ours.values())
    return process


def detach_descriptor(stream: IO[bytes] | None) -> int:
    """A duplicate of a stream's descriptor; the stream is closed, so the duplicate is the only open end."""
    assert stream is not None
    descriptor = os.dup(stream.fileno())
    stream.close()
    return descriptor


def memory_file(content: bytes) -> int:
    """A descriptor of an anonymous file with this content, positioned at its start."""
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def is_readable(descriptor: int) -> bool:
    """True if the descriptor can be read now, or is at its end."""
    look = select.poll()  # `select.select` takes no descriptor above 1023
    look.register(descriptor, select.POLLIN)
    return bool(look.poll(0))


async def wait_readable(descriptor: int) -> None:
    """Wait until the descriptor can be read, or is at its end."""
    loop = asyncio.get_running_loop()
    can_be_read = asyncio.Event()
    loop.add_reader(descriptor, can_be_read.set)
    try:
        await can_be_read.wait()
    finally:
        loop.remove_reader(descriptor)


@contextlib.contextmanager
def os_errors_as_failures() -> Iterator[None]:
    """Raise SandboxFailure ``refused-by-machine`` for an OSError."""
    try:
        yield
    except OSError as error:
        raise SandboxFailure(
            f"This machine refused a resource that a sandbox needs: {error}.",
            hint="If too many files are open: run fewer sandboxes at a time, or raise the limit (`ulimit -n`).",
            kind="refused-by-machine",
            retryable=True,
        ) from error
