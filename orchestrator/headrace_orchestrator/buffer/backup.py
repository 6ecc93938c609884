"""Copies of a data directory, taken while its service runs, and put back.

* A copy is a cut: everything that was acknowledged before it began, and a prefix of what the log says after that.
* Only what is new is copied: a file of the log that is followed by another never changes.
* Every byte that is copied is synced, read back and compared by digest.
* A copy that is interrupted leaves the one before it as it was, and a copy of another log is not overwritten.
* What is put back begins an epoch above every one that the directory had: answers of the old service are refused.

A copy is a folder with ``log`` and ``assets``, as a data directory has them, so that all tools read it; and
``backup.json``, which says how much of each file counts. Files of the log only grow, so a file that is longer than it
says there is of a copy that was interrupted later.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace import logfiles, logformat
from headrace.errors import CorruptRecord, InvalidRequest, SetupError, StoreError
from headrace.logformat import Damage
from headrace_orchestrator.buffer.directory import last_epoch, replace, sync_directory

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are done, and how many there are."""

MANIFEST = "backup.json"

_CHUNK_BYTES = 4 << 20
_PROBE_BYTES = 4096
"""So much of the beginning and of the end of a file tells whether it is the one that was copied: its head, and its
footer with a digest of all between."""
_ATTEMPTS = 5
"""Retention may delete files while they are copied; then the copy begins again with those that are left."""
_OF_A_FRESH_VOLUME = "lost+found"
_ASSET_NAME = re.compile(r"[0-9a-f]{64}")


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the log: how much of it counts, and the SHA-256 of that."""

    name: str
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy is. ``log`` is the id of the log, ``epoch`` that of the directory at that time, ``made_ms`` the Unix
    time in milliseconds."""

    format: int = 1
    log: str
    epoch: int
    made_ms: int
    files: list[CopiedFile]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was done. ``file`` and ``offset``: where the cut is in the log."""

    file: str
    offset: int
    files: int
    copied_files: int
    assets: int
    copied_assets: int
    copied_bytes: int


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What was put back."""

    epoch: int
    files: int
    assets: int
    size_bytes: int


class _Gone(Exception):
    """A file was deleted since it was listed."""


def back_up(
    data: Path, destination: Path, *, now_ms: int, on_progress: OnProgress = lambda done, total: None
) -> Report:
    """Copy what is new in the data directory into ``destination``, made if missing. Blocking. Raises SetupError,
    InvalidRequest, StoreError or CorruptRecord; then the copy before this one is still there."""
    if not (data / "log").is_dir():
        raise SetupError(
            f"{data} is no data directory: there is no folder named log in it.",
            hint="Give the directory that the orchestrator was started with (--data).",
        )
    if destination.resolve().is_relative_to(data.resolve()):
        raise InvalidRequest(f"{destination} is in {data} itself.", hint="Name a folder elsewhere, on another disk.")
    with _told(destination), _alone(destination):
        for _ in range(_ATTEMPTS):
            try:
                return _Copy(data, destination, on_progress).make(now_ms)
            except _Gone:
                continue
    raise StoreError(
        f"Files of {data} were deleted faster than they could be copied.", hint="Try again, or keep data for longer."
    )


def restore(backup: Path, data: Path, *, now_s: int, on_progress: OnProgress = lambda done, total: None) -> Restored:
    """Put a copy back into ``data``, which must be missing or empty. Blocking. Raises SetupError, StoreError or
    CorruptRecord."""
    manifest = read_manifest(backup)
    if data.exists() and any(file.name != _OF_A_FRESH_VOLUME for file in data.iterdir()):
        raise SetupError(f"{data} is not empty.", hint="Name a new directory; two logs cannot be mixed.")
    assets = list(_assets_in(backup))
    total = sum(file.size_bytes for file in manifest.files) + sum(asset.stat().st_size for asset in assets)
    moved = _Moved(on_progress, total)
    with _told(data), _all_or_nothing(data):
        (data / "log").mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            found = _copy(backup / "log" / file.name, data / "log" / file.name, file.size_bytes, moved)
            if found != file.sha256:
                raise _differs(backup / "log" / file.name)
        for asset in assets:
            _copy_asset(asset, data, moved)
        # Starts are seconds apart, so no count of them has come as far as the clock; a later copy comes after this one.
        epoch = max(manifest.epoch + 1, now_s)
        replace(data / "epoch", b"%d\n" % epoch)  # last: without it nothing starts here
    return Restored(epoch=epoch, files=len(manifest.files), assets=len(assets), size_bytes=total)


def read_manifest(backup: Path) -> Manifest:
    """What a copy says of itself. Raises SetupError."""
    try:
        return msgspec.json.decode((backup / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise SetupError(
            f"{backup} is no backup: there is no {MANIFEST} in it.",
            hint="Give the folder that `headrace backup` wrote; if its first run was interrupted, there is none yet.",
        ) from error
    except msgspec.MsgspecError as error:
        raise SetupError(f"{backup / MANIFEST} cannot be read: {error}.", hint="It is damaged.") from error


class _Moved:
    """Bytes that were moved so far."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self.done = 0

    def add(self, size: int) -> None:
        self.done += size
        self._on_progress(min(self.done, self._total), self._total)


class _Copy:
    """One attempt at a copy."""

    def __init__(self, data: Path, destination: Path, on_progress: OnProgress) -> None:
        self._data, self._destination = data, destination
        self._files = sorted((data / "log").glob("*.log"))
        sizes = [_size(file) for file in self._files]
        self._moved = _Moved(on_progress, sum(sizes))
        self._copied_files = self._copied_assets = self._copied_bytes = 0
        self._assets: set[str] = set()
        self._log = _log_of(data)
        self._before: dict[str, CopiedFile] = {}
        if (destination / MANIFEST).exists():
            before = read_manifest(destination)
            if before.log not in ("", self._log):
                raise InvalidRequest(
                    f"{destination} holds a backup of another log.", hint="Name another folder, or delete this one."
                )
            self._before = {file.name: file for file in before.files}

    def make(self, now_ms: int) -> Report:
        # Assets are stored before the record that refers to them, and deleted with the last one: those of old records
        # are taken before the log, those of new ones after it.
        self._take_assets()
        for folder in ("log", "assets"):
            (self._destination / folder).mkdir(exist_ok=True)
        files = [self._take(file, last=file == self._files[-1]) for file in self._files]
        self._take_assets()
        sync_directory(self._destination)
        manifest = Manifest(log=self._log, epoch=last_epoch(self._data), made_ms=now_ms, files=files)
        replace(self._destination / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        self._forget({file.name for file in files})
        return Report(
            file=files[-1].name if files else "",
            offset=files[-1].size_bytes if files else 0,
            files=len(files),
            copied_files=self._copied_files,
            assets=len(self._assets),
            copied_assets=self._copied_assets,
            copied_bytes=self._copied_bytes,
        )

    def _take(self, file: Path, *, last: bool) -> CopiedFile:
        copied = self._destination / "log" / file.name
        known = self._before.get(file.name)
        size = _size(file)
        if not last and known is not None and known.size_bytes == size and _alike(file, copied):
            self._moved.add(size)
            return known
        if last:
            size = _durable_size(file)
        digest = _copy(file, copied, size, self._moved)
        self._copied_files += 1
        self._copied_bytes += size
        if last and (whole := _whole_size(copied)) < size:
            os.truncate(copied, whole)
            size, digest = whole, _digest(copied, whole)
        return CopiedFile(name=file.name, size_bytes=size, sha256=digest)

    def _take_assets(self) -> None:
        for asset in _assets_in(self._data):
            copied = self._destination / "assets" / asset.parent.name / asset.name
            try:
                size = asset.stat().st_size
                if not copied.exists() or copied.stat().st_size != size:
                    _copy_asset(asset, self._destination, None)
                    self._copied_assets += 1
                    self._copied_bytes += size
            except FileNotFoundError:
                continue  # deleted since it was listed: nothing that is copied refers to it
            self._assets.add(asset.name)

    def _forget(self, names: set[str]) -> None:
        """Delete what the source has no more."""
        for file in (self._destination / "log").iterdir():
            if file.name not in names:
                file.unlink()
        for asset in _assets_in(self._destination):
            if asset.name not in self._assets:
                asset.unlink()


def _log_of(data: Path) -> str:
    """The id of a log; empty before anything was written."""
    try:
        for file in logfiles.newest_first(data / "log", logfiles.numbers_in(data / "log")):
            if file.head is not None:
                return file.head.log
    except FileNotFoundError:
        raise _Gone from None
    return ""


def _assets_in(directory: Path) -> Iterator[Path]:
    for asset in sorted((directory / "assets").glob("??/*")):
        if _ASSET_NAME.fullmatch(asset.name):
            yield asset


def _copy_asset(asset: Path, directory: Path, moved: _Moved | None) -> None:
    copied = directory / "assets" / asset.parent.name / asset.name
    copied.parent.mkdir(parents=True, exist_ok=True)
    if _copy(asset, copied, asset.stat().st_size, moved) != asset.name:
        raise _differs(asset)


def _copy(source: Path, copied: Path, size: int, moved: _Moved | None) -> str:
    """Put the first ``size`` bytes of a file in place, durably; returns their SHA-256, which was compared with what is
    on disk now."""
    partial = copied.with_name(copied.name + ".partial")
    digest = hashlib.sha256()
    try:
        reading = source.open("rb")
    except FileNotFoundError:
        if source.suffix == ".log":
            raise _Gone from None
        raise
    with reading, partial.open("wb") as writing:
        left = size
        while left:
            chunk = reading.read(min(_CHUNK_BYTES, left))
            if not chunk:
                raise _differs(source)
            digest.update(chunk)
            writing.write(chunk)
            left -= len(chunk)
            if moved is not None:
                moved.add(len(chunk))
        writing.flush()
        os.fsync(writing.fileno())
        os.posix_fadvise(writing.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is read, not the memory
    if _digest(partial, size) != digest.hexdigest():
        raise CorruptRecord(
            f"{partial} does not read back as it was written.", hint="The disk that it is on is failing; use another."
        )
    partial.replace(copied)
    sync_directory(copied.parent)
    return digest.hexdigest()


def _digest(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while size and (chunk := stream.read(min(_CHUNK_BYTES, size))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


def _alike(one: Path, other: Path) -> bool:
    """Whether two files that never change are the same, by their size, beginning and end."""
    return other.exists() and _probe(one) == _probe(other)


def _probe(path: Path) -> tuple[int, bytes, bytes]:
    try:
        with path.open("rb") as stream:
            first = stream.read(_PROBE_BYTES)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _PROBE_BYTES))
            return size, first, stream.read()
    except FileNotFoundError:
        raise _Gone from None


def _durable_size(file: Path) -> int:
    """How large a file is, all of that on disk."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            os.fdatasync(stream.fileno())
            return size
    except FileNotFoundError:
        raise _Gone from None


def _whole_size(file: Path) -> int:
    """How much of a file is there without an append that was under way."""
    with file.open("rb") as stream:
        for item in logformat.scan(stream):
            if isinstance(item, Damage) and item.torn:
                return item.offset
    return file.stat().st_size


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        raise _Gone from None


@contextmanager
def _alone(destination: Path) -> Iterator[None]:
    """One copy at a time goes into a folder."""
    destination.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(destination, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidRequest(
                f"Another backup into {destination} is under way.", hint="Wait for it, or name another folder."
            ) from error
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _all_or_nothing(data: Path) -> Iterator[None]:
    """What was put into a directory does not stay if the rest does not come."""
    try:
        yield
    except BaseException:
        for name in ("log", "assets"):
            shutil.rmtree(data / name, ignore_errors=True)
        raise


@contextmanager
def _told(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or destination}: {error.strerror}.",
            hint="Mend that and run it again; what was there before is whole.",
        ) from error


def _differs(path: Path) -> CorruptRecord:
    return CorruptRecord(
        f"{path} is not what it should be: its digest or its length does not match.",
        hint="`headrace fsck` names what is damaged.",
        file=path.name,
    )
