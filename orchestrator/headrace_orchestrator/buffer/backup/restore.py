"""Restoring a backup.

* Every file is compared with the digest that it was copied with.
* The restored directory begins an epoch above every one that the old directory had, so that leases and
  answers of the old service are refused.
* Damage in a backup is refused, or restored as it is on request: then only the damaged records are lost.
* A directory in which a restore failed is left empty.
* Nothing is written outside of the directory: a backup with other names than those of log files is refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.errors import CorruptRecord, SetupError
from headrace.store.asset_files import FOLDER
from headrace_orchestrator.buffer.backup.backup import read_manifest
from headrace_orchestrator.buffer.backup.file_copy import (
    CopyProgress,
    LogFileDeleted,
    assets_in,
    copy,
    copy_asset,
    store_errors,
)
from headrace_orchestrator.buffer.durable_files import replace_file
from headrace_orchestrator.buffer.progress import OnProgress

_IN_NEW_VOLUMES = "lost+found"


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a restore. ``damaged``: damaged files, which were restored anyway."""

    epoch: int
    files: int
    assets: int
    size_bytes: int
    damaged: list[str]


def restore(
    backup: Path,
    data: Path,
    *,
    now_s: int,
    despite_damage: bool = False,
    on_progress: OnProgress = lambda done, total: None,
) -> RestoreReport:
    """Restore a backup into ``data``, which must be missing or empty. Blocking. Raises SetupError, StoreError or
    CorruptRecord."""
    manifest = read_manifest(backup)
    if data.exists() and any(file.name != _IN_NEW_VOLUMES for file in data.iterdir()):
        raise SetupError(f"{data} is not empty.", hint="Name a new directory; two logs cannot be mixed.")
    assets = list(assets_in(backup))
    total = sum(file.size_bytes for file in manifest.files) + sum(asset.stat().st_size for asset in assets)
    progress, damaged = CopyProgress(on_progress, total), list[str]()
    with store_errors(data), _all_or_nothing(data):
        (data / "log").mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            source = backup / "log" / file.name
            try:
                is_intact = copy(source, data / "log" / file.name, file.size_bytes, progress) == file.sha256
            except LogFileDeleted:
                is_intact = False
            if not is_intact:
                damaged.append(_accept_damage(source, despite_damage))
        damaged += [_accept_damage(asset, despite_damage) for asset in assets if not copy_asset(asset, data, progress)]
        # Starts are seconds apart, so counting them never reaches the clock; a later restore gets a higher epoch.
        epoch = max(manifest.epoch + 1, now_s)
        replace_file(data / "epoch", b"%d\n" % epoch)  # last: a service does not start without it
    return RestoreReport(epoch=epoch, files=len(manifest.files), assets=len(assets), size_bytes=total, damaged=damaged)


def _accept_damage(path: Path, despite_damage: bool) -> str:
    """The name of a damaged file. Raises CorruptRecord unless damage is to be restored."""
    if not despite_damage:
        raise CorruptRecord(
            f"{path} is damaged or missing: its digest is not the one that it was copied with.",
            hint="`headrace fsck` of the backup lists the lost records; --despite-damage restores it anyway.",
            file=path.name,
        )
    return path.name


@contextmanager
def _all_or_nothing(data: Path) -> Iterator[None]:
    """Empty the directory if the block fails."""
    try:
        yield
    except BaseException:
        for name in ("log", FOLDER):
            shutil.rmtree(data / name, ignore_errors=True)
        raise
