"""Putting a backup back.

* Every file is compared with the digest that it was copied with.
* What is put back begins an epoch above every one that the directory had: answers of the old service are refused.
* Damage in a backup is refused, or put back as it is where that is wanted: then it costs the damaged records only.
* A directory in which something failed is left empty.
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
    OnProgress,
    assets_in,
    copy,
    copy_asset,
    disk_errors,
)
from headrace_orchestrator.buffer.data_directory import replace

_OF_A_FRESH_VOLUME = "lost+found"


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was put back. ``damaged``: files that are not what was copied, put back all the same."""

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
    """Put a backup back into ``data``, which must be missing or empty. Blocking. Raises SetupError, StoreError or
    CorruptRecord."""
    manifest = read_manifest(backup)
    if data.exists() and any(file.name != _OF_A_FRESH_VOLUME for file in data.iterdir()):
        raise SetupError(f"{data} is not empty.", hint="Name a new directory; two logs cannot be mixed.")
    assets = list(assets_in(backup))
    total = sum(file.size_bytes for file in manifest.files) + sum(asset.stat().st_size for asset in assets)
    moved, damaged = CopyProgress(on_progress, total), list[str]()
    with disk_errors(data), _all_or_nothing(data):
        (data / "log").mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            source = backup / "log" / file.name
            if copy(source, data / "log" / file.name, file.size_bytes, moved) != file.sha256:
                damaged.append(_told(source, despite_damage))
        damaged += [_told(asset, despite_damage) for asset in assets if not copy_asset(asset, data, moved)]
        # Starts are seconds apart, so no count of them has come as far as the clock; a later copy comes after this one.
        epoch = max(manifest.epoch + 1, now_s)
        replace(data / "epoch", b"%d\n" % epoch)  # last: without it nothing starts here
    return RestoreReport(epoch=epoch, files=len(manifest.files), assets=len(assets), size_bytes=total, damaged=damaged)


def _told(path: Path, despite_damage: bool) -> str:
    if not despite_damage:
        raise CorruptRecord(
            f"{path} is not what was copied: its digest does not match.",
            hint="`headrace fsck` of the backup names what is lost; --despite-damage puts back all the same.",
            file=path.name,
        )
    return path.name


@contextmanager
def _all_or_nothing(data: Path) -> Iterator[None]:
    """What was put into a directory does not stay if the rest does not come."""
    try:
        yield
    except BaseException:
        for name in ("log", FOLDER):
            shutil.rmtree(data / name, ignore_errors=True)
        raise
