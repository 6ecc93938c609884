"""The disk that forgets forgets what it may, and nothing else."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from tests.chaos.disk import SECTOR_BYTES, Disk, cut_power

CUTS = 40


class Rig:
    """A folder whose syncs are noted; ``after_cut`` gives what one power cut leaves of a fresh copy of the story."""

    def __init__(self, folder: Path) -> None:
        self.data, self.vault = folder / "data", folder / "vault"
        self.data.mkdir(parents=True)
        self.disk = Disk(self.data, self.vault, _Nobody())

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
        cut_power(self.data, self.vault, Random(seed))
        return {path.name: path.read_bytes() for path in self.data.iterdir()}


class _Nobody:
    def starts(self, path: Path) -> None: ...

    def still_unsafe(self, path: Path) -> None: ...

    def safe(self, path: Path) -> None: ...


@pytest.fixture
def rigs(tmp_path: Path) -> list[Rig]:
    return [Rig(tmp_path / str(number)) for number in range(CUTS)]


def test_what_was_synced_with_its_name_is_there_after_every_power_cut(rigs: list[Rig]) -> None:
    for seed, rig in enumerate(rigs):
        rig.write("a", b"x" * 3000, sync=True)
        rig.sync_names()
        rig.write("a", b"y" * 3000, sync=False)
        left = rig.cut(seed)["a"]
        assert left[:3000] == b"x" * 3000
        assert len(left) <= 6000


def test_what_was_not_synced_is_lost_sector_by_sector(rigs: list[Rig]) -> None:
    seen = set()
    for seed, rig in enumerate(rigs):
        rig.write("a", b"", sync=True)
        rig.sync_names()
        rig.write("a", b"y" * 8 * SECTOR_BYTES, sync=False)
        left = rig.cut(seed)["a"]
        sectors = [left[at : at + SECTOR_BYTES] for at in range(0, len(left), SECTOR_BYTES)]
        assert all(set(sector) in ({0}, {ord("y")}) for sector in sectors)
        seen.add("all" if left == b"y" * 8 * SECTOR_BYTES else "none" if not left else "torn")
    assert seen == {"all", "none", "torn"}


def test_a_synced_file_whose_directory_was_not_may_be_gone(rigs: list[Rig]) -> None:
    left = []
    for seed, rig in enumerate(rigs):
        rig.sync_names()
        rig.write("new", b"z", sync=True)
        left.append(rig.cut(seed).get("new"))
    assert set(left) == {None, b"z"}


def test_a_replaced_file_is_the_old_or_the_new_one(rigs: list[Rig]) -> None:
    left = []
    for seed, rig in enumerate(rigs):
        rig.write("a", b"old", sync=True)
        rig.sync_names()
        rig.write("a.new", b"new", sync=True)
        os.replace(rig.data / "a.new", rig.data / "a")
        left.append(rig.cut(seed)["a"])
    assert set(left) == {b"old", b"new"}


def test_a_directory_that_was_removed_may_be_there_again(rigs: list[Rig]) -> None:
    left = set()
    for seed, rig in enumerate(rigs):
        (rig.data / "folder").mkdir()
        rig.sync_names()
        (rig.data / "folder").rmdir()
        cut_power(rig.data, rig.vault, Random(seed))
        left.add((rig.data / "folder").is_dir())
    assert left == {True, False}


def test_of_two_that_sync_one_directory_at_once_neither_forgets_names_of_the_other(rigs: list[Rig]) -> None:
    rig = rigs[0]

    def syncs(who: str) -> None:
        for number in range(100):
            (rig.data / f"{who}-{number}").touch()
            rig.sync_names()
            (note,) = rig.vault.glob("names-*[!w]")
            assert f"{who}-{number}" in json.loads(note.read_bytes())

    with ThreadPoolExecutor(2) as both:
        list(both.map(syncs, ("a", "b")))


def test_after_a_power_cut_what_is_left_is_on_the_disk(rigs: list[Rig]) -> None:
    for seed, rig in enumerate(rigs):
        rig.sync_names()
        rig.write("a", b"y" * 3000, sync=False)
        left = rig.cut(seed)
        assert rig.cut(seed + 1) == left
