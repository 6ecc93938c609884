"""A check of all assets of a data directory, which may run beside a service."""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

from headrace.errors import CorruptAsset, UnknownAsset
from headrace.store.asset_files import asset_path, verify_asset
from headrace_orchestrator.buffer.assets.files import size_of, subfolders


class AssetReport(NamedTuple):
    """The result of ``check_assets``: number and bytes of the assets; the problem of each damaged one; the missing
    ones; and the unreferenced ones, which are not damage, for a promise may keep them."""

    assets: int
    size_bytes: int
    damaged: dict[str, str]
    missing: list[str]
    unreferenced: list[str]


def check_assets(
    folder: Path, referenced: Set[str], on_progress: Callable[[int], None] = lambda size_bytes: None
) -> AssetReport:
    """Verify all assets against their names, and against the references of stored records. Blocking; writes nothing.
    ``on_progress`` is called with the bytes of each asset."""
    stored: set[str] = set()
    damaged: dict[str, str] = {}
    size_bytes = 0
    for subfolder in subfolders(folder):
        for name in sorted(os.listdir(subfolder)):
            try:
                size = verify_asset(folder, name)
            except UnknownAsset:
                continue  # deleted meanwhile
            except CorruptAsset as error:
                damaged[name] = error.detail
                size = size_of(asset_path(folder, name))
            stored.add(name)
            size_bytes += size
            on_progress(size)
    return AssetReport(
        assets=len(stored),
        size_bytes=size_bytes,
        damaged=damaged,
        missing=sorted(referenced - stored),
        unreferenced=sorted(stored - referenced),
    )


def stored_bytes(folder: Path) -> int:
    """Bytes of all assets. Blocking."""
    return sum(size_of(path) for subfolder in subfolders(folder) for path in subfolder.iterdir())
