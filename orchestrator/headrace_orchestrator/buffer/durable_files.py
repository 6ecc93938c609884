"""Durable changes of files and directories."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.store.regular_files import open_to_write


def replace_file(file: Path, content: bytes) -> None:
    """Replace a small file as a whole, durably: readers see the old content or the new content."""
    new = file.with_name(file.name + ".new")
    with open_to_write(new) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
