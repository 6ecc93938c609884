"""Opening regular files, and nothing else."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import SetupError
from headrace.store.regular_files import (
    NotRegularFile,
    open_descriptor,
    open_to_append,
    open_to_read,
    open_to_write,
    read_file,
    require_regular_entries,
    truncate,
)

SECRET = b"of somebody else"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file outside of the folder that is opened."""
    file = tmp_path / "outside"
    file.write_bytes(SECRET)
    return file


def link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def device(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/full")


def unix_socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def folder(path: Path, outside: Path) -> None:
    path.mkdir()


OTHERS = [link, pipe, device, unix_socket, folder]

OPENERS: list[Callable[[Path], object]] = [
    open_to_read,
    open_to_write,
    open_to_append,
    read_file,
    lambda path: truncate(path, 0),
    lambda path: open_descriptor(path, os.O_RDWR | os.O_CREAT),
]


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize("opener", OPENERS)
def test_only_regular_files_are_opened(
    tmp_path: Path, outside: Path, make: Callable[[Path, Path], None], opener: Callable[[Path], object]
):
    make(tmp_path / "file", outside)
    with pytest.raises((NotRegularFile, IsADirectoryError)):
        opener(tmp_path / "file")
    assert outside.read_bytes() == SECRET


def test_a_regular_file_is_written_appended_to_cut_and_read(tmp_path: Path):
    file = tmp_path / "file"
    with open_to_write(file) as stream:
        stream.write(b"longer than the next")
    with open_to_write(file) as stream:
        stream.write(b"one")
    with open_to_append(file) as stream:
        stream.write(b" two")
    assert read_file(file) == b"one two"
    truncate(file, 3)
    with open_to_read(file) as stream:
        assert stream.read() == b"one"
    descriptor = open_descriptor(file, os.O_RDONLY)
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("make", OTHERS)
@pytest.mark.parametrize("place", ["", "log", "logs", "assets"])
def test_a_folder_with_a_symbolic_link_a_pipe_or_a_device_among_its_entries_is_refused(
    tmp_path: Path, outside: Path, make: Callable[[Path, Path], None], place: str
):
    data = tmp_path / "data"
    (data / place).mkdir(parents=True)
    (data / place / "00000002.log").touch()
    require_regular_entries(data)
    make(data / place / "00000001.log", outside)
    with pytest.raises(SetupError, match=r"00000001\.log is a (symbolic link|special file|folder)"):
        require_regular_entries(data)


@pytest.mark.parametrize("name", ["log", "assets", "owner"])
def test_a_link_in_the_place_of_a_folder_is_refused_too(tmp_path: Path, name: str):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match=f"{name} is a symbolic link"):
        require_regular_entries(tmp_path / "data")


def test_the_folder_that_the_user_names_may_itself_be_a_link(tmp_path: Path):
    (tmp_path / "data" / "log").mkdir(parents=True)
    (tmp_path / "named").symlink_to(tmp_path / "data")
    require_regular_entries(tmp_path / "named")


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x")
    with pytest.raises(SetupError, match="log is a regular file"):
        require_regular_entries(tmp_path)
