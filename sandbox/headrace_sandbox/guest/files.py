"""Runs inside a sandbox: operations on its files, with the rights of its programs.

* A path is followed from the scratch folder down, one name at a time; a link anywhere in it is refused, so it cannot
  lead out, even if programs move files meanwhile.
* Only regular files are read and written: a pipe without a writer does not block, and a device is not opened.
* The size is checked before a file is read; a file that grows meanwhile is refused at the bound.

A request has ``op`` and its arguments; content is on standard input, and the reply on standard output. A refusal is
JSON on standard error, with exit code 1.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
from collections.abc import Iterator

TYPE_CHECKING = False  # the module `typing` would be half a megabyte in every sandbox
if TYPE_CHECKING:
    from typing import Any

READ_BYTES = 256 << 10
MOST_ENTRIES = 10_000  # in a list or an archive
MOST_DEPTH = 100

FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Refusal(Exception):
    """A refused request. ``kind``: as in SandboxFailure."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def read(request: dict[str, Any]) -> None:
    path, most_bytes = request["path"], request["most_bytes"]
    with folder_of(path) as (folder, name):
        descriptor = os.open(name, os.O_RDONLY | FILE, dir_fd=folder)
    size = regular_size(descriptor, path)
    if size > most_bytes:
        raise too_large(path, size, most_bytes)
    remaining = most_bytes
    while data := os.read(descriptor, READ_BYTES):
        remaining -= len(data)
        if remaining < 0:
            raise too_large(path, most_bytes - remaining, most_bytes)
        write_all(1, data)


def write(request: dict[str, Any]) -> None:
    write_file(request["path"], stdin_blocks(), 0o644)


def list_folder(request: dict[str, Any]) -> None:
    path = request["path"]
    with open_folders(path) as folder:
        entries = [entry(folder, name, f"{path}/{name}" if path else name) for name in names_in(folder, path)]
    write_all(1, json.dumps(entries).encode())


def unpack(request: dict[str, Any]) -> None:
    """Write many files, folders and links; standard input has the contents of the files in sequence."""
    base = request["path"]
    if base:
        make_folder(base)
    for item in request["entries"]:
        path = f"{base}/{item['path']}" if base else item["path"]
        if item["kind"] == "folder":
            make_folder(path)
        elif item["kind"] == "link":
            with folder_of(path, make=True) as (folder, name):
                remove_file(folder, name)
                os.symlink(item["target"], name, dir_fd=folder)
        else:
            write_file(path, stdin_blocks(item["size_bytes"]), 0o755 if item["executable"] else 0o644)


def pack(request: dict[str, Any]) -> None:
    """Write everything below a folder to standard output: a line of JSON with all entries, then the contents of the
    files. Links and special files are omitted."""
    path, most_bytes = request["path"], request["most_bytes"]
    with open_folders(path) as folder:
        entries: list[dict[str, Any]] = []
        collect(folder, "", entries, 0)
        total = sum(item["size_bytes"] for item in entries)
        if total > most_bytes:
            raise too_large(path or ".", total, most_bytes)
        write_all(1, json.dumps(entries).encode() + b"\n")
        for item in entries:
            if item["kind"] == "file":
                copy_exactly(folder, item["path"], item["size_bytes"])


OPERATIONS = {"read": read, "write": write, "list": list_folder, "unpack": unpack, "pack": pack}


# Folders and names ----------------------------------------------------------------------------------------------------


class open_folders:  # noqa: N801 - used as a function
    """A descriptor of a folder below the scratch folder, which is the current folder. ``make``: make missing ones."""

    def __init__(self, path: str, *, make: bool = False) -> None:
        self._names = path.split("/") if path else []
        self._path, self._make = path, make

    def __enter__(self) -> int:
        self.descriptor = open_folder(".", None)
        for name in self._names:
            if name in ("", ".", ".."):
                raise Refusal("bad-path", f"{self._path!r} leads out of the scratch folder.")
            try:
                inner = open_folder(name, self.descriptor)
            except FileNotFoundError:
                if not self._make:
                    raise
                os.mkdir(name, 0o755, dir_fd=self.descriptor)
                inner = open_folder(name, self.descriptor)
            os.close(self.descriptor)
            self.descriptor = inner
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def open_folder(name: str, parent: int | None) -> int:
    """A descriptor of a folder; a link to one is refused. Without O_DIRECTORY, with which gVisor follows links in spite
    of O_NOFOLLOW."""
    descriptor = os.open(name, os.O_RDONLY | FILE, dir_fd=parent)
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return descriptor


class folder_of:  # noqa: N801 - used as a function
    """A descriptor of the folder of a path, and the name in it."""

    def __init__(self, path: str, *, make: bool = False) -> None:
        parent, _, self._name = path.rpartition("/")
        if self._name in ("", ".", ".."):
            raise Refusal("bad-path", f"{path!r} leads out of the scratch folder.")
        self._folder = open_folders(parent, make=make)

    def __enter__(self) -> tuple[int, str]:
        return self._folder.__enter__(), self._name

    def __exit__(self, *_: object) -> None:
        self._folder.__exit__()


def make_folder(path: str) -> None:
    with open_folders(path, make=True):
        pass


def names_in(folder: int, path: str) -> list[str]:
    names = []
    with os.scandir(folder) as entries:
        for item in entries:
            names.append(item.name)
            if len(names) > MOST_ENTRIES:
                raise Refusal("too-many-entries", f"{path or '.'!r} has more than {MOST_ENTRIES} entries.")
    return sorted(names)


def entry(folder: int, name: str, path: str) -> dict[str, Any]:
    entries = os.stat(name, dir_fd=folder, follow_symlinks=False)
    kind = "file" if stat.S_ISREG(entries.st_mode) else "folder" if stat.S_ISDIR(entries.st_mode) else "other"
    return {
        "path": os.fsencode(path).decode(errors="replace"),
        "kind": kind,
        "size_bytes": entries.st_size if kind == "file" else 0,
        "executable": kind == "file" and bool(entries.st_mode & 0o100),
    }


def collect(folder: int, parent: str, entries: list[dict[str, Any]], depth: int) -> None:
    if depth > MOST_DEPTH:
        raise Refusal("too-many-entries", f"Folders are nested more than {MOST_DEPTH} deep.")
    for name in names_in(folder, parent):
        item = entry(folder, name, name)
        if item["kind"] == "other":
            continue
        item["path"] = parent + name
        entries.append(item)
        if len(entries) > MOST_ENTRIES:
            raise Refusal("too-many-entries", f"The folder has more than {MOST_ENTRIES} entries.")
        if item["kind"] == "folder":
            inner = open_folder(name, folder)
            try:
                collect(inner, f"{parent}{name}/", entries, depth + 1)
            finally:
                os.close(inner)


# Files ----------------------------------------------------------------------------------------------------------------


def write_file(path: str, content: Iterator[bytes], mode: int) -> None:
    with folder_of(path, make=True) as (folder, name):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | FILE, mode, dir_fd=folder)
        try:
            regular_size(descriptor, path)
            os.ftruncate(descriptor, 0)
            os.fchmod(descriptor, mode)
            for data in content:
                write_all(descriptor, data)
        except OSError:
            os.unlink(name, dir_fd=folder)  # a partial file would look complete
            raise
        finally:
            os.close(descriptor)


def remove_file(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def copy_exactly(base: int, path: str, size_bytes: int) -> None:
    """Write this many bytes of a file to standard output; zeros replace the missing ones if it shrank meanwhile."""
    descriptor, remaining = -1, size_bytes
    try:
        folder = os.dup(base)
        *parent, name = path.split("/")
        for part in parent:
            inner = open_folder(part, folder)
            os.close(folder)
            folder = inner
        descriptor = os.open(name, os.O_RDONLY | FILE, dir_fd=folder)
        regular_size(descriptor, path)
        while remaining and (data := os.read(descriptor, min(remaining, READ_BYTES))):
            remaining -= len(data)
            write_all(1, data)
    except FileNotFoundError:
        pass
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        os.close(folder)
    while remaining:
        data = bytes(min(remaining, READ_BYTES))
        remaining -= len(data)
        write_all(1, data)


def regular_size(descriptor: int, path: str) -> int:
    entries = os.fstat(descriptor)
    if not stat.S_ISREG(entries.st_mode):
        raise Refusal("bad-path", f"{path!r} is not a regular file.")
    return entries.st_size


def stdin_blocks(size_bytes: int | None = None) -> Iterator[bytes]:
    remaining = size_bytes
    while remaining is None or remaining > 0:
        data = os.read(0, READ_BYTES if remaining is None else min(remaining, READ_BYTES))
        if not data:
            if remaining:
                raise Refusal("bad-archive", "The content ended early.")
            return
        if remaining is not None:
            remaining -= len(data)
        yield data


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# Refusals -------------------------------------------------------------------------------------------------------------


def too_large(path: str, size_bytes: int, most_bytes: int) -> Refusal:
    return Refusal("file-too-large", f"{path!r} has {size_bytes} bytes; the limit is {most_bytes}.")


KINDS = {
    errno.ENOENT: "no-such-file",
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-full",
    errno.EFBIG: "disk-full",
}


def run(request: dict[str, Any]) -> int:
    """Carry out a request in the current folder; returns the exit code."""
    try:
        OPERATIONS[request["op"]](request)
    except Refusal as refusal:
        reply = {"kind": refusal.kind, "message": str(refusal)}
    except OSError as error:
        # Links are ELOOP or ENOTDIR; a pipe without a reader is ENXIO; a refused permission is the program's fault.
        name = request.get("path", "")
        reply = {"kind": KINDS.get(error.errno or 0, "bad-path"), "message": f"{name!r}: {error.strerror}."}
    else:
        return 0
    write_all(2, json.dumps(reply).encode())
    return 1


def main() -> None:
    """Carry out the request in the second argument (JSON), in the folder of the first."""
    os.chdir(sys.argv[1])
    sys.exit(run(json.loads(sys.argv[2])))
