"""The simulated disk loses only data that a real one may lose."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.chaos.disk import SECTOR_BYTES, NoObserver, SimulatedDisk, cut_power

CUTS = 40


class DiskHarness:
    """A folder on a simulated disk. ``cut`` returns the files that a power cut leaves."""

    def __init__(self, folder: Path) -> None:
        self.data, self.synced_dir = folder / "data", folder / "synced"
        self.data.mkdir(parents=True)
        self.disk = SimulatedDisk(self.data, self.synced_dir, NoObserver())

    def write(self, name: str, content: bytes, *, sync: bool) -> None:
        with open(self.data / name, "ab") as stream:
            stream.write(content)
            stream.flush()
            if sync:
                self.disk.sync(stream)

    def sync_names(self) -> None:
        descriptor = os.open(self.data, os.O_RDONLY)
        self.disk.sync(descriptor)
        os.close(descriptor)

    def cut(self, seed: int) -> dict[str, bytes]:
        cut_power(self.data, self.synced_dir, Random(seed))
        return {path.name: path.read_bytes() for path in self.data.iterdir()}


@pytest.fixture
def harnesses(tmp_path: Path) -> list[DiskHarness]:
    return [DiskHarness(tmp_path / str(number)) for number in range(CUTS)]


def test_data_that_was_synced_with_its_name_survives_every_power_cut(harnesses: list[DiskHarness]) -> None:
    for seed, harness in enumerate(harnesses):
        harness.write("a", b"x" * 3000, sync=True)
        harness.sync_names()
        harness.write("a", b"y" * 3000, sync=False)
        left = harness.cut(seed)["a"]
        assert left[:3000] == b"x" * 3000
        assert len(left) <= 6000


def test_unsynced_data_is_lost_sector_by_sector(harnesses: list[DiskHarness]) -> None:
    outcomes = set()
    for seed, harness in enumerate(harnesses):
        harness.write("a", b"", sync=True)
        harness.sync_names()
        harness.write("a", b"y" * 8 * SECTOR_BYTES, sync=False)
        left = harness.cut(seed)["a"]
        sectors = [left[at : at + SECTOR_BYTES] for at in range(0, len(left), SECTOR_BYTES)]
        assert all(set(sector) in ({0}, {ord("y")}) for sector in sectors)
        outcomes.add("all" if left == b"y" * 8 * SECTOR_BYTES else "none" if not left else "torn")
    assert outcomes == {"all", "none", "torn"}


def test_a_synced_file_whose_directory_was_not_synced_may_be_lost(harnesses: list[DiskHarness]) -> None:
    left = []
    for seed, harness in enumerate(harnesses):
        harness.sync_names()
        harness.write("new", b"z", sync=True)
        left.append(harness.cut(seed).get("new"))
    assert set(left) == {None, b"z"}


def test_a_replaced_file_is_the_old_or_the_new_one(harnesses: list[DiskHarness]) -> None:
    left = []
    for seed, harness in enumerate(harnesses):
        harness.write("a", b"old", sync=True)
        harness.sync_names()
        harness.write("a.new", b"new", sync=True)
        os.replace(harness.data / "a.new", harness.data / "a")
        left.append(harness.cut(seed)["a"])
    assert set(left) == {b"old", b"new"}


def test_a_removed_directory_may_come_back(harnesses: list[DiskHarness]) -> None:
    left = set()
    for seed, harness in enumerate(harnesses):
        (harness.data / "folder").mkdir()
        harness.sync_names()
        (harness.data / "folder").rmdir()
        cut_power(harness.data, harness.synced_dir, Random(seed))
        left.add((harness.data / "folder").is_dir())
    assert left == {True, False}


def test_concurrent_syncs_of_a_directory_never_lose_names_of_each_other(harnesses: list[DiskHarness]) -> None:
    harness = harnesses[0]

    def sync_names(prefix: str) -> None:
        for number in range(100):
            (harness.data / f"{prefix}-{number}").touch()
            harness.sync_names()
            (record,) = harness.synced_dir.glob("names-*[!w]")
            assert f"{prefix}-{number}" in json.loads(record.read_bytes())

    with ThreadPoolExecutor(2) as both:
        list(both.map(sync_names, ("a", "b")))


def test_data_that_survived_a_power_cut_is_durable(harnesses: list[DiskHarness]) -> None:
    for seed, harness in enumerate(harnesses):
        harness.sync_names()
        harness.write("a", b"y" * 3000, sync=False)
        left = harness.cut(seed)
        assert harness.cut(seed + 1) == left
