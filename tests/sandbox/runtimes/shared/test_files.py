"""Files of a persistent sandbox: read and written with the rights of its programs, and no more."""

from __future__ import annotations

import asyncio
import io
import tarfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SandboxFailure
from headrace_sandbox.host.layout import SCRATCH
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import FileInfo, Sandbox, SandboxCommand, Template, checked_path
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from headrace_sandbox.runtimes.shared.archives import ArchiveEntry, entries_of, tar_of

pytestmark = pytest.mark.component("bubblewrap")

LIMITS = Limits(wall_s=20.0)

DISK_BYTES = 8 << 20


@pytest.fixture
async def sandbox(fresh: BubblewrapRuntime) -> Sandbox:
    return await fresh.open(Template(limits=Limits(disk_bytes=DISK_BYTES, file_bytes=1 << 40)), 300.0)


async def shell(sandbox: Sandbox, script: str) -> str:
    result = await sandbox.run(SandboxCommand(arguments=["bash", "-c", script]), LIMITS)
    assert result.fault == "", result.stderr.text
    return result.stdout.text


async def refused(call: Any) -> str:
    with pytest.raises(SandboxFailure) as caught:
        await call
    assert not caught.value.retryable
    return caught.value.kind


async def test_bytes_come_back_as_they_were_written(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 8000
    await sandbox.write("a/b/c.bin", content)
    assert await sandbox.read("a/b/c.bin", len(content)) == content
    assert await shell(sandbox, "wc -c <a/b/c.bin; stat -c %a a/b/c.bin; echo more >>a/b/c.bin") == "2048000\n644\n"
    assert await refused(sandbox.read("a/b/c.bin", len(content))) == "file-too-large"
    await sandbox.write("a/b/c.bin", b"")
    assert await sandbox.read("a/b/c.bin", 0) == b""
    await sandbox.write("é \n'\"", b"x")
    assert await sandbox.read("é \n'\"", 9) == b"x"


async def test_a_folders_entries_are_listed(sandbox: Sandbox) -> None:
    await shell(sandbox, "mkdir d; echo hi >f; ln -s /etc l; mkfifo p; touch $'\\xff'")
    assert await sandbox.list() == [
        FileInfo(path="d", kind="folder", size_bytes=0),
        FileInfo(path="f", kind="file", size_bytes=3),
        FileInfo(path="l", kind="other", size_bytes=0),
        FileInfo(path="p", kind="other", size_bytes=0),
        FileInfo(path="\ufffd", kind="file", size_bytes=0),
    ]
    assert await sandbox.list("d") == []
    await sandbox.write("d/e/f", b"x")
    assert [item.path for item in await sandbox.list("d")] == ["d/e"]
    assert await refused(sandbox.list("f")) == "bad-path"
    assert await refused(sandbox.list("none")) == "no-such-file"
    many = await sandbox.run(SandboxCommand(arguments=["bash", "-c", "mkdir m; cd m; touch {1..9000}"]), LIMITS)
    assert many.fault == ""
    assert len(await sandbox.list("m")) == 9000


async def test_no_path_leads_out_of_the_scratch_folder(sandbox: Sandbox) -> None:
    await shell(
        sandbox,
        "mkdir d; echo x >d/f; ln -s /etc/ld.so.cache link; ln -s d inner; ln -s / root; ln -s /proc/self/root magic;"
        "ln -s /proc/self/fd/0 fd; ln -s .. up; ln -s ../.. d/up; mkfifo pipe; ln -s /dev/zero zero;"
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'",
    )
    out = ["../x", "/etc/passwd", "d/../../x", "d/./f", "d//f", "", "d/\0", "..", "."]
    through = ["link", "inner/f", "root/etc/ld.so.cache", "magic/usr", "fd", "up/x", "d/up/x", "zero", "pipe", "socket"]
    for path in out + through:
        assert await refused(sandbox.read(path, 1 << 20)) == "bad-path", path
        assert await refused(sandbox.write(path, b"x")) == "bad-path", path
    for path in ("root", "inner", "d/up", "magic/etc", "..", "/", "pipe", "d/f"):
        assert await refused(sandbox.list(path)) == "bad-path", path
        assert await refused(sandbox.download(path, 1 << 20)) == "bad-path", path
        assert await refused(sandbox.upload(tar_of([ArchiveEntry(path="x", kind="file")]), path)) == "bad-path", path
    assert await shell(sandbox, "cat d/f; ls d") == "x\nf\nup\n"
    assert await refused(sandbox.read("d", 9)) == "bad-path"
    assert await refused(sandbox.read("none/x", 9)) == "no-such-file"


async def test_links_that_move_during_a_call_lead_nowhere(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    await session.run("mkdir real; echo mine >real/f; ln -s /usr/bin link; cp -r real d", LIMITS)
    swap = "(while :; do mv -T d was; cp -P link d; rm d; mv -T was d; done) 2>/dev/null &"
    await session.run(swap, LIMITS)
    for _ in range(30):
        try:
            assert await sandbox.read("d/f", 1 << 20) == b"mine\n"
        except SandboxFailure as failure:
            assert failure.kind in ("bad-path", "no-such-file")  # noqa: PT017 - both are right


async def test_a_sparse_file_of_a_tebibyte_is_refused_before_it_is_read(sandbox: Sandbox) -> None:
    await shell(sandbox, "mkdir d; truncate -s 1T d/big 2>/dev/null || truncate -s 7M d/big")
    assert await refused(sandbox.read("d/big", 1 << 20)) == "file-too-large"
    assert await refused(sandbox.download("d", 1 << 20)) == "file-too-large"
    assert (await sandbox.list("d"))[0].size_bytes >= 7 << 20


async def test_a_full_scratch_folder_is_reported_as_full(sandbox: Sandbox) -> None:
    assert await refused(sandbox.write("x", bytes(DISK_BYTES + 1))) == "disk-full"
    assert await sandbox.list() == []
    await sandbox.write("x", bytes(DISK_BYTES - 8192))
    assert await refused(sandbox.write("y", bytes(16384))) == "disk-full"
    archive = tar_of([ArchiveEntry(path="z", kind="file", content=bytes(16384))])
    assert await refused(sandbox.upload(archive)) == "disk-full"


async def test_a_file_that_the_program_made_unreadable_is_its_own_fault(sandbox: Sandbox) -> None:
    await shell(sandbox, "mkdir -p d; echo x >d/f; chmod 000 d/f; mkdir e; chmod 000 e")
    assert await refused(sandbox.read("d/f", 9)) == "bad-path"
    assert await refused(sandbox.write("e/f", b"")) == "bad-path"
    await shell(sandbox, "chmod 000 /scratch; true")
    assert await refused(sandbox.list()) == "bad-path"
    await sandbox.reset()
    assert await sandbox.list() == []


async def test_a_folder_is_downloaded_and_uploaded_as_an_archive(sandbox: Sandbox) -> None:
    await shell(sandbox, "mkdir -p d/e; echo x >d/e/f; printf '#!' >d/run; chmod +x d/run; ln -s f d/e/l; mkfifo d/p")
    archive = await sandbox.download("d", 1 << 20)
    entries = [
        ArchiveEntry(path="e", kind="folder"),
        ArchiveEntry(path="e/f", kind="file", content=b"x\n"),
        ArchiveEntry(path="run", kind="file", content=b"#!", executable=True),
    ]
    assert entries_of(archive, 1 << 20) == entries
    await sandbox.upload(tar_of([*entries, ArchiveEntry(path="e/link", kind="link", target="../run")]), "copy/of")
    assert await shell(sandbox, "cd copy/of; find . | sort; cat e/f e/link; stat -c %a run e/f e; readlink e/link") == (
        ".\n./e\n./e/f\n./e/link\n./run\nx\n#!755\n644\n755\n../run\n"
    )
    await sandbox.upload(tar_of([ArchiveEntry(path="e/f", kind="file", content=b"new")]), "copy/of")
    assert await sandbox.read("copy/of/e/f", 9) == b"new"
    whole = entries_of(await sandbox.download("", 1 << 20), 1 << 20)
    assert {entry.path for entry in whole if entry.kind == "file"} == {"copy/of/e/f", "copy/of/run", "d/e/f", "d/run"}


async def test_nothing_of_a_refused_archive_is_written(sandbox: Sandbox) -> None:
    def archive(info: tarfile.TarInfo) -> bytes:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("first"))
            tar.addfile(info, io.BytesIO(bytes(info.size)))
        return file.getvalue()

    def info(name: str, **fields: Any) -> tarfile.TarInfo:
        made = tarfile.TarInfo(name)
        for key, value in fields.items():
            setattr(made, key, value)
        return made

    for made in (
        info("../x"),
        info("/x"),
        info("x", type=tarfile.SYMTYPE, linkname="/etc"),
        info("x", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        info("x", type=tarfile.FIFOTYPE),
        info("x", type=tarfile.CHRTYPE),
        info("x", mode=0o4755),
    ):
        assert await refused(sandbox.upload(archive(made))) == "bad-archive"
    assert await refused(sandbox.upload(archive(info("x", size=DISK_BYTES + 1)))) == "archive-too-large"
    assert await sandbox.list() == []


async def test_a_link_in_the_path_of_an_upload_is_refused_or_replaced(sandbox: Sandbox) -> None:
    await shell(sandbox, "mkdir d; ln -s /dev/shm out; ln -s /dev/shm/x file; mkfifo pipe")
    for entry in (
        ArchiveEntry(path="out/x", kind="file"),
        ArchiveEntry(path="out", kind="folder"),
        ArchiveEntry(path="file", kind="file"),
    ):
        assert await refused(sandbox.upload(tar_of([entry]))) == "bad-path"
    assert await refused(sandbox.upload(tar_of([ArchiveEntry(path="pipe", kind="file", content=b"x")]))) == "bad-path"
    await sandbox.upload(
        tar_of([ArchiveEntry(path="d/x", kind="file"), ArchiveEntry(path="out", kind="link", target="d")])
    )
    assert await shell(sandbox, "readlink out; ls /dev/shm") == "d\n"
    assert await refused(sandbox.run(SandboxCommand(arguments=["true"], files={"out/x": b""}), LIMITS)) == "bad-path"


async def test_concurrent_calls_are_kept_apart(sandbox: Sandbox) -> None:
    await asyncio.gather(*(sandbox.write(f"f{n}", f"{n}".encode()) for n in range(10)))
    assert await asyncio.gather(*(sandbox.read(f"f{n}", 9) for n in range(10))) == [f"{n}".encode() for n in range(10)]


@given(st.lists(st.sampled_from(["", ".", "..", "a", "b\0", "é", " "]), max_size=4).map("/".join))
def test_a_checked_path_is_below_the_scratch_folder(path: str) -> None:
    try:
        checked = checked_path(path)
    except SandboxFailure as failure:
        assert failure.kind == "bad-path"  # noqa: PT017 - others are fine
        return
    parts = f"{SCRATCH}/{checked}".split("/")
    assert parts[1:2] == [SCRATCH.strip("/")]
    assert not {"", ".", ".."} & set(parts[1:])
