"""The files of assets, on a disk that loses its power."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from headrace.assets import AssetData, make_asset
from headrace.errors import UnknownAsset
from headrace.store.asset_files import read_asset
from headrace_orchestrator.buffer.assets.files import AssetFiles, subfolders
from tests.chaos.disk import Disk, cut_power, note_all

CUTS = 40


class Crash(BaseException):
    """The process is gone."""


class _Crashes:
    """Lets so many syncs begin; the process is gone before the next one has had any effect."""

    def __init__(self, syncs: int) -> None:
        self.left = syncs

    def starts(self, path: Path) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash

    def still_unsafe(self, path: Path) -> None: ...

    def safe(self, path: Path) -> None: ...


def batches(draw: Random) -> list[list[AssetData]]:
    """Assets as they arrive together; some come twice."""
    pool = [make_asset(draw.randbytes(draw.randrange(1, 3000)), "image/png") for _ in range(8)]
    return [
        list({asset.name: asset for asset in draw.choices(pool, k=draw.randrange(1, 4))}.values()) for _ in range(6)
    ]


def test_after_a_power_cut_all_that_was_written_is_there_and_nothing_is_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = lost = 0
    for seed in range(CUTS):
        draw = Random(seed)
        data, vault = tmp_path / f"{seed}-data", tmp_path / f"{seed}-vault"
        data.mkdir()
        note_all(data, vault)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", Disk(data, vault, _Crashes(draw.randrange(40))).sync)
            written, begun = _write(AssetFiles(data / "assets"), batches(draw))
        crashed += len(written) < len(begun)
        cut_power(data, vault, draw)
        files = AssetFiles(data / "assets")
        files.open()
        files.close()
        for name, content in written.items():
            assert read_asset(data / "assets", name) == content, seed
        for name in {path.name for shelf in subfolders(data / "assets") for path in shelf.iterdir()}:
            assert read_asset(data / "assets", name) == begun[name], seed
        for name in begun.keys() - written.keys():
            try:
                read_asset(data / "assets", name)
            except UnknownAsset:
                lost += 1
    assert crashed > CUTS // 4
    assert lost > 0


def _write(files: AssetFiles, batches: list[list[AssetData]]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What was written, and what was begun to be written, when all was done or the process was gone."""
    written: dict[str, bytes] = {}
    begun: dict[str, bytes] = {}
    try:
        files.open()
        for batch in batches:
            pairs = [(asset.name, asset.data) for asset in batch]
            begun.update(pairs)
            files.write(pairs)
            written.update(pairs)
    except Crash:
        pass
    finally:
        files.close()
    return written, begun


def test_what_is_written_and_deleted_is_counted(tmp_path: Path) -> None:
    one, two, three = (make_asset(bytes([value]) * (value + 10), "image/png") for value in range(3))
    files = AssetFiles(tmp_path / "assets")
    files.open()
    files.write([(one.name, one.data), (two.name, two.data)])
    files.write([(two.name, two.data)])
    assert (files.count, files.size_bytes) == (2, 21)
    files.close()
    files = AssetFiles(tmp_path / "assets")
    files.open()
    assert files.delete([one.name, three.name]) == [one.name, three.name]
    files.write([(three.name, three.data)])
    for shelf in [*subfolders(files.folder), *subfolders(files.folder)]:
        files.count_subfolder(shelf)
    assert (files.count, files.size_bytes) == (2, 23)
    assert files.delete([two.name]) == [two.name]
    assert (files.count, files.size_bytes) == (1, 12)
    files.close()
