"""Files of assets, on a disk that loses power."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest

from headrace.assets import AssetData, make_asset
from headrace.errors import UnknownAsset
from headrace.store.asset_files import read_asset
from headrace_orchestrator.buffer.assets.files import AssetFiles, subfolders
from tests.chaos.disk import SimulatedDisk, cut_power, mark_all_synced

CUTS = 40


class Crash(BaseException):
    """Ends the process of a test in place of a crash."""


class _Crashes:
    """Allows a number of syncs; the process crashes before the next one has any effect."""

    def __init__(self, syncs: int) -> None:
        self.syncs_left = syncs

    def on_start(self, path: Path) -> None:
        self.syncs_left -= 1
        if self.syncs_left < 0:
            raise Crash

    def before_durable(self, path: Path) -> None: ...

    def on_durable(self, path: Path) -> None: ...


def batches(draw: Random) -> list[list[AssetData]]:
    """Random batches of assets; some assets come twice."""
    pool = [make_asset(draw.randbytes(draw.randrange(1, 3000)), "image/png") for _ in range(8)]
    return [
        list({asset.name: asset for asset in draw.choices(pool, k=draw.randrange(1, 4))}.values()) for _ in range(6)
    ]


def test_after_a_power_cut_written_assets_are_complete_and_others_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = lost = 0
    for seed in range(CUTS):
        draw = Random(seed)
        data, synced_dir = tmp_path / f"{seed}-data", tmp_path / f"{seed}-synced_dir"
        data.mkdir()
        mark_all_synced(data, synced_dir)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", SimulatedDisk(data, synced_dir, _Crashes(draw.randrange(40))).sync)
            written, started = _write(AssetFiles(data / "assets"), batches(draw))
        crashed += len(written) < len(started)
        cut_power(data, synced_dir, draw)
        files = AssetFiles(data / "assets")
        files.open()
        files.close()
        for name, content in written.items():
            assert read_asset(data / "assets", name) == content, seed
        for name in {path.name for shelf in subfolders(data / "assets") for path in shelf.iterdir()}:
            assert read_asset(data / "assets", name) == started[name], seed
        for name in started.keys() - written.keys():
            try:
                read_asset(data / "assets", name)
            except UnknownAsset:
                lost += 1
    assert crashed > CUTS // 4
    assert lost > 0


def _write(files: AssetFiles, batches: list[list[AssetData]]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Assets that were written, and those whose write had started, at the end or at the crash."""
    written: dict[str, bytes] = {}
    started: dict[str, bytes] = {}
    try:
        files.open()
        for batch in batches:
            pairs = [(asset.name, asset.data) for asset in batch]
            started.update(pairs)
            files.write(pairs)
            written.update(pairs)
    except Crash:
        pass
    finally:
        files.close()
    return written, started


def test_written_and_deleted_assets_are_counted(tmp_path: Path) -> None:
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
