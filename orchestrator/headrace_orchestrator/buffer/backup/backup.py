"""Backups: copies of a data directory, taken while its service runs.

* A copy is a cut: everything that was acknowledged before it began, and a prefix of what the log says after that.
* Only what is new is copied: a file of the log that is followed by another never changes.
* A copy that is interrupted leaves the one before it as it was. A copy of another log is not overwritten, and a data
  directory never.
* An asset that is damaged is named, and ends nothing.
* What a data directory lost, and did not delete by its rules, stays in the copy: a damaged file of the log is named and
  not copied over the intact one, and a copy that has more than the directory is left as it is.

A copy is a folder with ``log`` and ``assets``, as a data directory has them, so that all tools read it; and
``backup.json``, which says how much of each file counts. Files of the log only grow, so a file that is longer than it
says there is of a copy that was interrupted later.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.errors import InvalidRequest, SetupError, StoreError
from headrace.store import log_files, log_format
from headrace.store.asset_files import FOLDER, asset_path
from headrace.store.log_format import Damage
from headrace_orchestrator.buffer.backup.file_copy import (
    CopyProgress,
    LogFileDeleted,
    OnProgress,
    assets_in,
    copy,
    copy_asset,
    digest_of,
    disk_errors,
)
from headrace_orchestrator.buffer.data_directory import MANIFEST, last_epoch, replace, sync_directory

_PROBE_BYTES = 4096
"""So much of the beginning and of the end of a file tells whether it is the one that was copied: its head, and its
footer with a digest of all between."""
_ATTEMPTS = 5
"""Retention may delete files while they are copied; then the copy begins again with those that are left."""


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the log: how much of it counts, and the SHA-256 of that."""

    name: str
    size_bytes: int
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy is. ``log`` is the id of the log, ``epoch`` that of the directory at that time, ``made_ms`` the Unix
    time in milliseconds."""

    format: int = 1
    log: str
    epoch: int
    made_ms: int
    files: list[CopiedFile]


class BackupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was done. ``file`` and ``offset``: where the cut is in the log. ``damaged_assets``: those that
    are not what their names say; they are not in the copy. ``kept_files``: files of the log that are not any more what
    was copied; the copy has them as they were."""

    file: str
    offset: int
    files: int
    copied_files: int
    assets: int
    copied_assets: int
    copied_bytes: int
    damaged_assets: list[str]
    kept_files: list[str]


def back_up(
    data: Path, destination: Path, *, now_ms: int, on_progress: OnProgress = lambda done, total: None
) -> BackupReport:
    """Copy what is new in the data directory into ``destination``, made if missing. Blocking. Raises SetupError,
    InvalidRequest, StoreError or CorruptRecord; then the copy before this one is still there."""
    if not (data / "log").is_dir():
        raise SetupError(
            f"{data} is no data directory: there is no folder named log in it.",
            hint="Give the directory that the orchestrator was started with (--data).",
        )
    if destination.resolve().is_relative_to(data.resolve()):
        raise InvalidRequest(f"{destination} is in {data} itself.", hint="Name a folder elsewhere, on another disk.")
    with disk_errors(destination), _alone(destination):
        if last_epoch(destination):
            raise InvalidRequest(
                f"{destination} is a data directory: the copy would take the place of what is stored there.",
                hint="Name a folder of its own for the backup.",
            )
        for _ in range(_ATTEMPTS):
            try:
                return _Copy(data, destination, on_progress).make(now_ms)
            except LogFileDeleted:
                continue
    raise StoreError(
        f"Files of {data} were deleted faster than they could be copied.", hint="Try again, or keep data for longer."
    )


def read_manifest(backup: Path) -> BackupManifest:
    """What a copy says of itself. Raises SetupError."""
    try:
        return msgspec.json.decode((backup / MANIFEST).read_bytes(), type=BackupManifest)
    except FileNotFoundError as error:
        raise SetupError(
            f"{backup} is no backup: there is no {MANIFEST} in it.",
            hint="Give the folder that `headrace backup` wrote; if its first run was interrupted, there is none yet.",
        ) from error
    except msgspec.MsgspecError as error:
        raise SetupError(f"{backup / MANIFEST} cannot be read: {error}.", hint="It is damaged.") from error


class _Copy:
    """One attempt at a copy."""

    def __init__(self, data: Path, destination: Path, on_progress: OnProgress) -> None:
        self._data, self._destination = data, destination
        self._files = sorted((data / "log").glob("*.log"))
        sizes = [_size(file) for file in self._files]
        self._moved = CopyProgress(on_progress, sum(sizes))
        self._damaged_assets: set[str] = set()
        self._kept_files: list[str] = []
        self._copied_files = self._copied_assets = self._copied_bytes = 0
        self._assets: set[str] = set()
        self._log = _log_of(data)
        self._before: dict[str, CopiedFile] = {}
        self._sealed: set[str] = set()
        if (destination / MANIFEST).exists():
            before = read_manifest(destination)
            if before.log not in ("", self._log):
                raise InvalidRequest(
                    f"{destination} holds a backup of another log.", hint="Name another folder, or delete this one."
                )
            self._before = {file.name: file for file in before.files}
            self._sealed = {file.name for file in before.files[:-1]}
            self._require_no_less()

    def make(self, now_ms: int) -> BackupReport:
        # Assets are stored before the record that refers to them, and deleted with the last one: those of old records
        # are taken before the log, those of new ones after it.
        self._take_assets()
        (self._destination / "log").mkdir(exist_ok=True)
        files = [self._take(file, last=file == self._files[-1]) for file in self._files]
        self._take_assets()
        sync_directory(self._destination)
        manifest = BackupManifest(log=self._log, epoch=last_epoch(self._data), made_ms=now_ms, files=files)
        replace(self._destination / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        self._forget({file.name for file in files})
        return BackupReport(
            file=files[-1].name if files else "",
            offset=files[-1].size_bytes if files else 0,
            files=len(files),
            copied_files=self._copied_files,
            assets=len(self._assets),
            copied_assets=self._copied_assets,
            copied_bytes=self._copied_bytes,
            damaged_assets=sorted(self._damaged_assets),
            kept_files=self._kept_files,
        )

    def _require_no_less(self) -> None:
        """Retention deletes the oldest files, and a file only grows. What else is missing was lost, and is perhaps
        nowhere but in the copy. Raises InvalidRequest, or LogFileDeleted where retention deletes just now."""
        there = {file.name for file in self._files}
        oldest = min(there, default="")
        missing = [name for name in self._before if name > oldest and name not in there]
        last = max(self._before, default="")
        if last in there and not _goes_on(self._data / "log" / last, self._destination / "log" / last):
            missing.append(last)
        if not missing:
            return
        if not self._files[0].exists():
            raise LogFileDeleted
        raise InvalidRequest(
            f"{self._destination} has what {self._data} lost: {', '.join(sorted(missing))} is missing in the log "
            "there, or is another file now.",
            hint="Keep that copy, for it may be the only one: `headrace restore` puts it back. Name another folder to "
            "copy what is still there.",
        )

    def _take(self, file: Path, *, last: bool) -> CopiedFile:
        copied = self._destination / "log" / file.name
        known = self._before.get(file.name)
        size = _size(file)
        if not last and known is not None and known.size_bytes == size and _alike(file, copied):
            self._moved.add(size)
            return known
        if known is not None and known.name in self._sealed and _is_intact(copied, known):
            self._kept_files.append(known.name)
            self._moved.add(size)
            return known
        if last:
            size = _durable_size(file)
        digest = copy(file, copied, size, self._moved)
        self._copied_files += 1
        self._copied_bytes += size
        if last and (whole := _whole_size(copied)) < size:
            os.truncate(copied, whole)
            size, digest = whole, digest_of(copied, whole)
        return CopiedFile(name=file.name, size_bytes=size, sha256=digest)

    def _take_assets(self) -> None:
        for asset in assets_in(self._data):
            if asset.name in self._damaged_assets:
                continue
            copied = asset_path(self._destination / FOLDER, asset.name)
            try:
                size = asset.stat().st_size
                if not copied.exists() or copied.stat().st_size != size:
                    if not copy_asset(asset, self._destination, self._moved):
                        self._damaged_assets.add(asset.name)
                        copied.unlink()  # so that the next copy asks again
                        continue
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
        for asset in assets_in(self._destination):
            if asset.name not in self._assets:
                asset.unlink()


def _log_of(data: Path) -> str:
    """The id of a log; empty before anything was written."""
    try:
        for file in log_files.newest_first(data / "log", log_files.numbers_in(data / "log")):
            if file.head is not None:
                return file.head.log
    except FileNotFoundError:
        raise LogFileDeleted from None
    return ""


def _alike(one: Path, other: Path) -> bool:
    """Whether two files that never change are the same, by their size, beginning and end."""
    return other.exists() and _probe(one) == _probe(other)


def _is_intact(copied: Path, known: CopiedFile) -> bool:
    """Whether a copied file is what was copied."""
    return copied.exists() and digest_of(copied, known.size_bytes) == known.sha256


def _goes_on(file: Path, copied: Path) -> bool:
    """Whether a file is the one of which the beginning was copied, as far as their heads say."""
    heads = []
    for path in (file, copied):
        try:
            heads.append(log_files.head_of(path))
        except FileNotFoundError:
            return True  # there is nothing to lose, or retention has deleted it
    return None in heads or heads[0] == heads[1]


def _probe(path: Path) -> tuple[int, bytes, bytes]:
    try:
        with path.open("rb") as stream:
            first = stream.read(_PROBE_BYTES)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _PROBE_BYTES))
            return size, first, stream.read()
    except FileNotFoundError:
        raise LogFileDeleted from None


def _durable_size(file: Path) -> int:
    """How large a file is, all of that on disk."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            os.fdatasync(stream.fileno())
            return size
    except FileNotFoundError:
        raise LogFileDeleted from None


def _whole_size(file: Path) -> int:
    """How much of a file is there without an append that was under way."""
    with file.open("rb") as stream:
        for item in log_format.scan(stream):
            if isinstance(item, Damage) and item.torn:
                return item.offset
    return file.stat().st_size


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        raise LogFileDeleted from None


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
