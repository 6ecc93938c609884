"""Runs inside a sandbox: operations on its files, with the rights of its programs.

* A path is followed from the scratch folder down, one name at a time; a link anywhere in it is refused, so it cannot
  lead out, whoever moves things about meanwhile.
* Only regular files are read and written: a pipe without a writer does not block, and a device is not opened.
* A size is looked at before anything is read; a file that grows meanwhile is cut off at the bound.

What to do is a request, ``op`` with its arguments; content is standard input, and the answer standard output. A refusal
is JSON on standard error, and the status 1.
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
MOST_ENTRIES = 10_000  # of a list, or an archive
MOST_DEPTH = 100

FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Refused(Exception):
    """``kind`` and a message."""

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
    left = most_bytes
    while data := os.read(descriptor, READ_BYTES):
        left -= len(data)
        if left < 0:
            raise too_large(path, most_bytes - left, most_bytes)
        write_all(1, data)


def write(request: dict[str, Any]) -> None:
    write_file(request["path"], stdin_blocks(), 0o644)


def list_folder(request: dict[str, Any]) -> None:
    path = request["path"]
    with opened_folder(path) as folder:
        found = [entry(folder, name, f"{path}/{name}" if path else name) for name in names_in(folder, path)]
    write_all(1, json.dumps(found).encode())


def unpack(request: dict[str, Any]) -> None:
    """Write many files, folders and links; standard input has the content of the files, one after the other."""
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
    """Everything below a folder: a line of JSON with all entries, then the content of the files. Links and special
    files are left out."""
    path, most_bytes = request["path"], request["most_bytes"]
    with opened_folder(path) as folder:
        found: list[dict[str, Any]] = []
        collect(folder, "", found, 0)
        total = sum(item["size_bytes"] for item in found)
        if total > most_bytes:
            raise too_large(path or ".", total, most_bytes)
        write_all(1, json.dumps(found).encode() + b"\n")
        for item in found:
            if item["kind"] == "file":
                copy_exactly(folder, item["path"], item["size_bytes"])


OPERATIONS = {"read": read, "write": write, "list": list_folder, "unpack": unpack, "pack": pack}


# Folders and names ----------------------------------------------------------------------------------------------------


class opened_folder:  # noqa: N801 - used as a function
    """A folder below the scratch folder, which is where this runs; it is made if it should be."""

    def __init__(self, path: str, *, make: bool = False) -> None:
        self._names = path.split("/") if path else []
        self._path, self._make = path, make

    def __enter__(self) -> int:
        self.descriptor = open_folder(".", None)
        for name in self._names:
            if name in ("", ".", ".."):
                raise Refused("bad-path", f"{self._path!r} leads out of the scratch folder.")
            try:
                below = open_folder(name, self.descriptor)
            except FileNotFoundError:
                if not self._make:
                    raise
                os.mkdir(name, 0o755, dir_fd=self.descriptor)
                below = open_folder(name, self.descriptor)
            os.close(self.descriptor)
            self.descriptor = below
        return self.descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)


def open_folder(name: str, above: int | None) -> int:
    """A descriptor of a folder, and of no link to one. Not by O_DIRECTORY: with it gVisor follows links in spite of
    O_NOFOLLOW."""
    descriptor = os.open(name, os.O_RDONLY | FILE, dir_fd=above)
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return descriptor


class folder_of:  # noqa: N801 - used as a function
    """The folder of a path, and the name in it."""

    def __init__(self, path: str, *, make: bool = False) -> None:
        above, _, self._name = path.rpartition("/")
        if self._name in ("", ".", ".."):
            raise Refused("bad-path", f"{path!r} leads out of the scratch folder.")
        self._folder = opened_folder(above, make=make)

    def __enter__(self) -> tuple[int, str]:
        return self._folder.__enter__(), self._name

    def __exit__(self, *_: object) -> None:
        self._folder.__exit__()


def make_folder(path: str) -> None:
    with opened_folder(path, make=True):
        pass


def names_in(folder: int, path: str) -> list[str]:
    names = []
    with os.scandir(folder) as found:
        for item in found:
            names.append(item.name)
            if len(names) > MOST_ENTRIES:
                raise Refused("too-many-entries", f"{path or '.'!r} has more than {MOST_ENTRIES} entries.")
    return sorted(names)


def entry(folder: int, name: str, path: str) -> dict[str, Any]:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    kind = "file" if stat.S_ISREG(found.st_mode) else "folder" if stat.S_ISDIR(found.st_mode) else "other"
    return {
        "path": os.fsencode(path).decode(errors="replace"),
        "kind": kind,
        "size_bytes": found.st_size if kind == "file" else 0,
        "executable": kind == "file" and bool(found.st_mode & 0o100),
    }


def collect(folder: int, above: str, found: list[dict[str, Any]], depth: int) -> None:
    if depth > MOST_DEPTH:
        raise Refused("too-many-entries", f"Folders are more than {MOST_DEPTH} deep.")
    for name in names_in(folder, above):
        item = entry(folder, name, name)
        if item["kind"] == "other":
            continue
        item["path"] = above + name
        found.append(item)
        if len(found) > MOST_ENTRIES:
            raise Refused("too-many-entries", f"There are more than {MOST_ENTRIES} entries.")
        if item["kind"] == "folder":
            below = open_folder(name, folder)
            try:
                collect(below, f"{above}{name}/", found, depth + 1)
            finally:
                os.close(below)


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
            os.unlink(name, dir_fd=folder)  # half a file would look like a whole one
            raise
        finally:
            os.close(descriptor)


def remove_file(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def copy_exactly(base: int, path: str, size_bytes: int) -> None:
    """The content of a file; if it shrank meanwhile, zeros in place of what is missing."""
    descriptor, left = -1, size_bytes
    try:
        folder = os.dup(base)
        *above, name = path.split("/")
        for part in above:
            below = open_folder(part, folder)
            os.close(folder)
            folder = below
        descriptor = os.open(name, os.O_RDONLY | FILE, dir_fd=folder)
        regular_size(descriptor, path)
        while left and (data := os.read(descriptor, min(left, READ_BYTES))):
            left -= len(data)
            write_all(1, data)
    except FileNotFoundError:
        pass
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        os.close(folder)
    while left:
        data = bytes(min(left, READ_BYTES))
        left -= len(data)
        write_all(1, data)


def regular_size(descriptor: int, path: str) -> int:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise Refused("bad-path", f"{path!r} is not a regular file.")
    return found.st_size


def stdin_blocks(size_bytes: int | None = None) -> Iterator[bytes]:
    left = size_bytes
    while left is None or left > 0:
        data = os.read(0, READ_BYTES if left is None else min(left, READ_BYTES))
        if not data:
            if left:
                raise Refused("bad-archive", "The content ended early.")
            return
        if left is not None:
            left -= len(data)
        yield data


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# Refusals -------------------------------------------------------------------------------------------------------------


def too_large(path: str, size_bytes: int, most_bytes: int) -> Refused:
    return Refused("file-too-large", f"{path!r} has {size_bytes} bytes, and at most {most_bytes} are wanted.")


KINDS = {
    errno.ENOENT: "no-such-file",
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-full",
    errno.EFBIG: "disk-full",
}


def run(request: dict[str, Any]) -> int:
    """Do it, in the scratch folder; gives the status."""
    try:
        OPERATIONS[request["op"]](request)
    except Refused as refused:
        said = {"kind": refused.kind, "message": str(refused)}
    except OSError as error:
        # Links are ELOOP or ENOTDIR; a pipe without a reader is ENXIO; what is not permitted is the program's doing.
        name = request.get("path", "")
        said = {"kind": KINDS.get(error.errno or 0, "bad-path"), "message": f"{name!r}: {error.strerror}."}
    else:
        return 0
    write_all(2, json.dumps(said).encode())
    return 1


def main() -> None:
    """Arguments: the scratch folder, and the request as JSON."""
    os.chdir(sys.argv[1])
    sys.exit(run(json.loads(sys.argv[2])))
