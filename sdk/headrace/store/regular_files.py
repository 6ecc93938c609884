"""Regular files in folders that somebody else may have written: a data directory, a backup, an asset folder.

* Only regular files are opened: a symbolic link, a pipe or a device is refused, and never followed, waited for or cut.
* A folder with a symbolic link, a pipe or a device among its entries is refused before anything in it is touched.
* The folder that the user names may itself be a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from headrace.errors import SetupError

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags of every open. Without ``O_NONBLOCK`` opening a pipe waits for its other end."""

_FILES = ("owner", "epoch", "address")
"""Files of a data directory without a dot in their names."""

_FOLDERS = ("log", "logs", "assets")
"""The folders of a data directory; ``logs`` has the output of the processes of ``headrace up``."""


class NotRegularFile(OSError):
    """The path is not a regular file."""


def open_descriptor(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Open a regular file; it is inherited by no child. Raises OSError, of the class NotRegularFile for other files."""
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | _FLAGS, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket, or a pipe to write to
            raise _not_regular(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_regular(path)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _not_regular(path: str | os.PathLike[str]) -> NotRegularFile:
    return NotRegularFile(errno.ELOOP, "it is not a regular file", os.fspath(path))


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file to read. Raises as ``open_descriptor``."""
    return open(open_descriptor(path, os.O_RDONLY), "rb")


def open_to_write(path: Path) -> BinaryIO:
    """Open a regular file to write, empty; it is made if it is missing. Raises as ``open_descriptor``."""
    return open(open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def open_to_append(path: Path) -> BinaryIO:
    """Open a regular file to append to it; it is made if it is missing. Raises as ``open_descriptor``."""
    return open(open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def read_file(path: Path) -> bytes:
    """The content of a regular file. Raises as ``open_descriptor``."""
    with open_to_read(path) as stream:
        return stream.read()


def truncate(path: Path, size_bytes: int) -> None:
    """Cut a regular file. Raises as ``open_descriptor``."""
    descriptor = open_descriptor(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def require_regular_entries(folder: Path) -> None:
    """Raise SetupError if a data directory or a backup has an entry that is neither a regular file nor a folder, in
    itself or in its folders. Files of assets are not listed, because there may be millions. Raises OSError."""
    for entry in _entries(folder):
        is_file = entry.is_file(follow_symlinks=False)
        if is_file and entry.name not in _FOLDERS:
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder and "." not in entry.name and entry.name not in _FILES:
            continue
        kind = "folder" if is_folder else "regular file" if is_file else "special file"
        what = "symbolic link" if entry.is_symlink() else kind
        raise SetupError(
            f"{entry.path} is a {what}, and not followed or read: it may lead to files that are not part of {folder}.",
            hint="Move it away, or put the file or folder itself in its place. The folder that you name may be a link.",
        )


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    for listed in (folder, *(folder / name for name in _FOLDERS)):
        try:
            with os.scandir(listed) as entries:
                yield from entries
        except (FileNotFoundError, NotADirectoryError):
            continue
