"""Backups: copies of a data directory, taken while its service runs.

* A backup of a live service has everything that was acknowledged before it began, and a prefix of the log after that.
* Only new data is copied: a file of the log never changes once a later one exists.
* An interrupted backup leaves the previous one as it was. A backup of another log is not overwritten, and a data
  directory never.
* A damaged asset is named, and does not end the backup.
* Names in a backup's list of files are those of log files, and symbolic links and special files are refused, in the
  directory and in the backup.
* Data that the directory lost, and did not delete by its rules, stays in the backup: a damaged file of the log is named
  and not copied over the intact one, and a backup that has more than the directory is left as it is.

A backup is a folder with ``log`` and ``assets`` like those of a data directory, so that all tools read it; and
``backup.json``, which holds the valid length of each file. Files of the log only grow, so a file that is longer belongs
to a later backup that was interrupted.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from headrace.errors import InvalidRequest, SetupError, StoreError
from headrace.store import log_files, log_format
from headrace.store.asset_files import FOLDER, asset_path
from headrace.store.log_format import Damage
from headrace.store.regular_files import open_to_read, read_file, require_regular_entries, truncate
from headrace_orchestrator.buffer.backup.file_copy import (
    CopyProgress,
    LogFileDeleted,
    assets_in,
    copy,
    copy_asset,
    digest_of,
    store_errors,
)
from headrace_orchestrator.buffer.data_directory import BACKUP_MANIFEST, last_epoch, require_log
from headrace_orchestrator.buffer.durable_files import replace_file, sync_directory
from headrace_orchestrator.buffer.progress import OnProgress

_PROBE_BYTES = 4096
"""Bytes at the beginning and at the end of a file that identify it: its head, and its footer with a digest of
everything between."""
_ATTEMPTS = 5
"""Retention may delete files while they are copied; then the backup begins again with the remaining files."""


MAX_EPOCH = 1 << 48
"""Highest epoch of a backup: restores and starts can count on from there."""


class CopiedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the log: its valid length, and the SHA-256 of that part."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{8}\.log\Z")]
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``backup.json``. ``log`` is the id of the log, ``epoch`` that of the directory at that time,
    ``made_ms`` the Unix time in milliseconds."""

    format: int = 1
    log: str
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
    made_ms: int
    files: list[CopiedFile]


class BackupReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a backup. ``file`` and ``offset``: position of the cut in the log. ``damaged_assets``: those whose
    bytes do not match their names; they are not in the backup. ``kept_files``: files of the log that were damaged after
    they had been copied; the backup keeps them as they were."""

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
    """Copy the new data of the data directory into ``destination``, made if missing. Blocking. Raises SetupError,
    InvalidRequest, StoreError or CorruptRecord; then the previous backup is still intact."""
    require_log(data)
    if destination.resolve().is_relative_to(data.resolve()):
        raise InvalidRequest(f"{destination} is inside {data}.", hint="Name a folder elsewhere, on another disk.")
    with store_errors(destination), _exclusive(destination):
        require_regular_entries(destination)
        if last_epoch(destination):
            raise InvalidRequest(
                f"{destination} is a data directory: the backup would overwrite the data that is stored there.",
                hint="Name a folder of its own for the backup.",
            )
        for _ in range(_ATTEMPTS):
            try:
                return _BackupRun(data, destination, on_progress).run(now_ms)
            except LogFileDeleted:
                continue
    raise StoreError(
        f"Files of {data} were deleted faster than they could be copied.", hint="Try again, or keep data for longer."
    )


def read_manifest(backup: Path) -> BackupManifest:
    """Read the manifest of a backup. Raises SetupError, also if the backup has symbolic links or special files."""
    require_regular_entries(backup)
    try:
        return msgspec.json.decode(read_file(backup / BACKUP_MANIFEST), type=BackupManifest)
    except FileNotFoundError as error:
        raise SetupError(
            f"{backup} is not a backup: it has no file {BACKUP_MANIFEST}.",
            hint="Give the folder that `headrace backup` wrote; a first run that was interrupted leaves no backup.",
        ) from error
    except msgspec.MsgspecError as error:
        raise SetupError(f"{backup / BACKUP_MANIFEST} cannot be read: {error}.", hint="It is damaged.") from error


class _BackupRun:
    """An attempt at a backup."""

    def __init__(self, data: Path, destination: Path, on_progress: OnProgress) -> None:
        self._data, self._destination = data, destination
        self._files = sorted((data / "log").glob("*.log"))
        sizes = [_size(file) for file in self._files]
        self._progress = CopyProgress(on_progress, sum(sizes))
        self._damaged_assets: set[str] = set()
        self._kept_files: list[str] = []
        self._copied_files = self._copied_assets = self._copied_bytes = 0
        self._assets: set[str] = set()
        self._log = _log_of(data)
        self._previous: dict[str, CopiedFile] = {}
        self._sealed: set[str] = set()
        if (destination / BACKUP_MANIFEST).exists():
            previous = read_manifest(destination)
            if previous.log not in ("", self._log):
                raise InvalidRequest(
                    f"{destination} holds a backup of another log.", hint="Name another folder, or delete this one."
                )
            self._previous = {file.name: file for file in previous.files}
            self._sealed = {file.name for file in previous.files[:-1]}
            self._require_nothing_lost()

    def run(self, now_ms: int) -> BackupReport:
        # Assets are stored before the record that refers to them, and deleted after the last one: assets of old records
        # are copied before the log, those of new records after it.
        self._copy_assets()
        (self._destination / "log").mkdir(exist_ok=True)
        files = [self._copy_file(file, last=file == self._files[-1]) for file in self._files]
        self._copy_assets()
        sync_directory(self._destination)
        manifest = BackupManifest(log=self._log, epoch=last_epoch(self._data), made_ms=now_ms, files=files)
        replace_file(self._destination / BACKUP_MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        self._delete_others({file.name for file in files})
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

    def _require_nothing_lost(self) -> None:
        """Raise InvalidRequest if the directory lost data that the backup has, perhaps as its only copy. Retention
        deletes the oldest files, and a file only grows; any other difference is a loss. Raises LogFileDeleted if
        retention deletes a file meanwhile."""
        present = {file.name for file in self._files}
        oldest = min(present, default="")
        missing = [name for name in self._previous if name > oldest and name not in present]
        last = max(self._previous, default="")
        if last in present and not _continues(self._data / "log" / last, self._destination / "log" / last):
            missing.append(last)
        if not missing:
            return
        if not self._files[0].exists():
            raise LogFileDeleted
        raise InvalidRequest(
            f"{self._destination} has data that {self._data} lost: {', '.join(sorted(missing))} is missing from its "
            "log, or was replaced by another file.",
            hint="Keep that backup, for it may be the only copy: `headrace restore` restores it. Name another folder "
            "to copy the remaining data.",
        )

    def _copy_file(self, file: Path, *, last: bool) -> CopiedFile:
        target = self._destination / "log" / file.name
        previous = self._previous.get(file.name)
        size = _size(file)
        if not last and previous is not None and previous.size_bytes == size and _same_file(file, target):
            self._progress.add(size)
            return previous
        if previous is not None and previous.name in self._sealed and _is_intact(target, previous):
            self._kept_files.append(previous.name)
            self._progress.add(size)
            return previous
        if last:
            size = _durable_size(file)
        digest = copy(file, target, size, self._progress)
        self._copied_files += 1
        self._copied_bytes += size
        if last and (whole := _whole_size(target)) < size:
            truncate(target, whole)
            size, digest = whole, digest_of(target, whole)
        return CopiedFile(name=file.name, size_bytes=size, sha256=digest)

    def _copy_assets(self) -> None:
        for asset in assets_in(self._data):
            if asset.name in self._damaged_assets:
                continue
            target = asset_path(self._destination / FOLDER, asset.name)
            try:
                size = asset.stat().st_size
                if not target.exists() or target.stat().st_size != size:
                    if not copy_asset(asset, self._destination, self._progress):
                        self._damaged_assets.add(asset.name)
                        target.unlink()  # so that the next backup checks the asset again
                        continue
                    self._copied_assets += 1
                    self._copied_bytes += size
            except FileNotFoundError:
                continue  # deleted after it was listed: no copied record refers to it
            self._assets.add(asset.name)

    def _delete_others(self, names: set[str]) -> None:
        """Delete the files that the source does not have any more."""
        for file in (self._destination / "log").iterdir():
            if file.name not in names:
                file.unlink()
        for asset in assets_in(self._destination):
            if asset.name not in self._assets:
                asset.unlink()


def _log_of(data: Path) -> str:
    """The id of a log; empty if nothing was written yet."""
    try:
        for file in log_files.newest_first(data / "log", log_files.numbers_in(data / "log")):
            if file.head is not None:
                return file.head.log
    except FileNotFoundError:
        raise LogFileDeleted from None
    return ""


def _same_file(one: Path, other: Path) -> bool:
    """True if two sealed files have the same size, beginning and end."""
    return other.exists() and _probe(one) == _probe(other)


def _is_intact(path: Path, copied: CopiedFile) -> bool:
    """True if a file in the backup still has the digest that it was copied with."""
    return path.exists() and digest_of(path, copied.size_bytes) == copied.sha256


def _continues(file: Path, copied: Path) -> bool:
    """True if ``copied`` is the beginning of ``file``, judged by their heads."""
    heads = []
    for path in (file, copied):
        try:
            heads.append(log_files.head_of(path))
        except FileNotFoundError:
            return True  # the backup has nothing to lose, or retention has deleted the file
    return None in heads or heads[0] == heads[1]


def _probe(path: Path) -> tuple[int, bytes, bytes]:
    try:
        with open_to_read(path) as stream:
            first = stream.read(_PROBE_BYTES)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _PROBE_BYTES))
            return size, first, stream.read()
    except FileNotFoundError:
        raise LogFileDeleted from None


def _durable_size(file: Path) -> int:
    """Size of a file, after a sync."""
    try:
        with open_to_read(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            os.fdatasync(stream.fileno())
            return size
    except FileNotFoundError:
        raise LogFileDeleted from None


def _whole_size(file: Path) -> int:
    """Size of a file without an append that was under way."""
    with open_to_read(file) as stream:
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
def _exclusive(destination: Path) -> Iterator[None]:
    """Allow one backup at a time into a folder."""
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
