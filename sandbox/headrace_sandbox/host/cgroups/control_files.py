"""Reads and writes the control files of the kernel's control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def read_file(path: Path | str) -> bytes:
    """The content of a control file. Raises OSError."""
    # Without the layers of a file object: each execution reads several files.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


def write_file(path: Path | str, value: object) -> None:
    """Write a value to a control file. Raises the OSError with which the kernel refuses it."""
    # No buffer: the kernel's answer is that of this very write.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def named_value(text: bytes, name: str) -> int:
    """A value in lines ``name value``; 0 if the name is missing."""
    for line in text.decode().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def list_group(path: str) -> Iterator[int]:
    """The process ids in a control file."""
    # A process that this one cannot see is listed as 0, which to `kill` means its own process group.
    yield from filter(None, map(int, Path(path).read_bytes().split()))
