"""Data directories and backups that somebody else has prepared: with links, pipes, folders and hostile names.

* Nothing outside of a folder is read into it, written, cut or deleted, whichever command is given the folder.
* Every command ends, with success or with an error of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.assets import make_asset
from headrace.errors import HeadraceError, SetupError
from headrace_orchestrator.buffer.backup.backup import back_up
from headrace_orchestrator.buffer.backup.restore import restore
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.service.fsck.fsck import check, rebuild
from tests.orchestrator.buffer.test_assets import send, submit_one
from tests.orchestrator.serving import orchestrator
from tests.sdk.store.test_regular_files import link, pipe, unix_socket

EXAMPLES = int(os.environ.get("HEADRACE_HOSTILE_FOLDERS", "60"))
"""`make chaos` tries more."""

SECRET = b"a secret of somebody else"

HOSTILE_NAMES = ["../../x", "/etc/x", "..", "", "a.log", "00000001.log/../../../x", "0000001\n.log", "00000001.log\n"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data directory and its backup, both intact."""
    folder = tmp_path_factory.mktemp("template")
    asyncio.run(_fill(folder / "data"))
    back_up(folder / "data", folder / "backup", now_ms=0)
    return folder


async def _fill(data: Path) -> None:
    """Store records, one with an asset, in several files of the log."""
    async with orchestrator(data, log_file_bytes=8 << 10) as api:
        await api.create_run(max_staleness=7)
        await api.play(free=8)
        asset = make_asset(b"picture" * 9, "image/png")
        await send(api, asset)
        assert (await submit_one(api, asset)).verdict == "accepted"
        await api.play(free=8)


async def start(folder: Path) -> None:
    async with orchestrator(folder) as api:
        await api.ask("GET", "/v1/status")


def read(folder: Path) -> None:
    for trajectory in headrace.open(folder).trajectories():
        for asset in trajectory.assets:
            headrace.open(folder).asset(asset.name)


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "start": lambda folder, target: asyncio.run(start(folder)),
    "read": lambda folder, target: read(folder),
    "fsck": lambda folder, target: check(folder),
    "rebuild": lambda folder, target: rebuild(folder),
    "back up": lambda folder, target: back_up(folder, target / "copy", now_ms=1),
    "back up over": lambda folder, target: back_up(folder.parent / "data", folder, now_ms=1),
    "restore": lambda folder, target: restore(folder, target / "restored", now_s=1),
    "restore despite damage": lambda folder, target: restore(folder, target / "restored", now_s=1, despite_damage=True),
}


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside.parent)


def dangling_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside.with_name("new"))


def folder(path: Path, outside: Path) -> None:
    path.mkdir()


def garbage(path: Path, outside: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(200))


def long_number(path: Path, outside: Path) -> None:
    path.write_bytes(b"9" * 40)


REPLACEMENTS = [link, link_to_folder, dangling_link, pipe, unix_socket, folder, garbage, long_number]

NEW_NAMES = ["epoch.new", "address", "address.new", "backup.json.new", "log/00000001.log.partial", "log/99999999.log"]
NEW_NAMES += ["assets/new", "assets/ab", "projection.sqlite-wal", "projection.sqlite.new", "log", "assets", "owner"]


@pytest.mark.timeout(300)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_nothing_outside_of_a_hostile_folder_is_touched_and_every_command_ends(template: Path, data: st.DataObject):
    with hostile(template) as (scratch, outside):
        folder = scratch / data.draw(st.sampled_from(["data", "backup"]), label="folder")
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        for name in data.draw(st.lists(st.sampled_from(names + NEW_NAMES), min_size=1, max_size=2), label="names"):
            replace(folder / name, data.draw(st.sampled_from(REPLACEMENTS), label="by"), outside)
        before = content(outside.parent)
        command = data.draw(st.sampled_from(sorted(COMMANDS)), label="command")
        with contextlib.suppress(HeadraceError):
            COMMANDS[command](folder, scratch / "target")
        assert content(outside.parent) == before
        assert SECRET not in b"".join(content(scratch).values())


@contextlib.contextmanager
def hostile(template: Path) -> Iterator[tuple[Path, Path]]:
    """A copy of the template, and a file outside of it."""
    with tempfile.TemporaryDirectory() as name:
        scratch, outside = Path(name, "scratch"), Path(name, "outside", "file")
        shutil.copytree(template, scratch)
        (scratch / "target").mkdir()
        outside.parent.mkdir()
        outside.write_bytes(SECRET)
        yield scratch, outside


def replace(path: Path, by: Callable[[Path, Path], None], outside: Path) -> None:
    """Replace a file or a folder, unless its own folder was replaced before."""
    if not path.parent.is_dir() or path.parent.is_symlink():
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    by(path, outside)


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder that are not links, with their bytes."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_backup_with_other_names_than_those_of_log_files_is_refused(template: Path, name: str):
    with hostile(template) as (scratch, _):
        (scratch / "x").write_bytes(b"not of the backup")
        manifest = json.loads((scratch / "backup" / "backup.json").read_bytes())
        manifest["files"][0]["name"] = name
        (scratch / "backup" / "backup.json").write_text(json.dumps(manifest))
        before = content(scratch)
        with pytest.raises(SetupError, match=r"backup\.json cannot be read"):
            restore(scratch / "backup", scratch / "target" / "a" / "b", now_s=1)
        assert content(scratch) == before


@pytest.mark.parametrize(
    ("field", "value"), [("epoch", -1), ("epoch", 1 << 62), ("epoch", "1"), ("files", [{"name": "00000001.log"}])]
)
def test_a_backup_with_impossible_numbers_is_refused(template: Path, field: str, value: object):
    with hostile(template) as (scratch, _):
        manifest = json.loads((scratch / "backup" / "backup.json").read_bytes())
        (scratch / "backup" / "backup.json").write_text(json.dumps({**manifest, field: value}))
        with pytest.raises(SetupError, match=r"backup\.json cannot be read"):
            restore(scratch / "backup", scratch / "target", now_s=1)


@pytest.mark.parametrize("name", ["owner", "epoch", "log", "projection.sqlite"])
def test_a_link_in_a_data_directory_is_refused_before_anything_is_written(template: Path, name: str):
    with hostile(template) as (scratch, outside):
        replace(scratch / "data" / name, link, outside)
        before = content(scratch)
        with pytest.raises(SetupError, match=f"{name} is a symbolic link"):
            DataDirectory.claim(scratch / "data")
        assert content(scratch) == before
        assert outside.read_bytes() == SECRET


def test_a_link_in_the_place_of_the_newest_log_file_does_not_have_its_target_cut(template: Path):
    with hostile(template) as (scratch, outside):
        newest = max((scratch / "data" / "log").iterdir())
        replace(newest, link, outside)
        with pytest.raises(SetupError, match=f"{newest.name} is a symbolic link"):
            asyncio.run(start(scratch / "data"))
        assert outside.read_bytes() == SECRET
