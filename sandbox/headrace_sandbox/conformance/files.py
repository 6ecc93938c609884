"""Cases 6b and 29 to 31: files that are copied into and out of a persistent sandbox."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.suite import CONTAINED, REFUSED, CaseContext, Escape, Unclear, case
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Sandbox, SandboxCommand, Template

TTL_S = 120.0

LIMITS = Limits(wall_s=20.0, memory_bytes=256 << 20, file_bytes=1 << 40, disk_bytes=64 << 20)


@asynccontextmanager
async def _open_sandbox(context: CaseContext) -> AsyncIterator[Sandbox]:
    sandbox = await context.runtime.open(Template(limits=LIMITS), TTL_S)
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def _shell(sandbox: Sandbox, script: str) -> None:
    result = await sandbox.run(SandboxCommand(arguments=["sh", "-c", script]), LIMITS)
    if result.fault:
        raise Unclear(f"{script}: {result.exit_code} {result.stderr.text}")


async def _expect_refusal(action: str, call: Callable[[], Awaitable[object]]) -> None:
    try:
        reply = await call()
    except SandboxFailure as failure:
        if failure.retryable:
            raise
        return
    raise Escape(f"{action} was not refused: {str(reply)[:100]}")


@case("6b", "a sparse file of 1 TiB, downloaded", of_runtime=True)
async def sparse_download(context: CaseContext) -> str:
    async with _open_sandbox(context) as sandbox:
        result = await sandbox.run(SandboxCommand(arguments=["truncate", "-s", "1T", "big"]), LIMITS)
        if result.fault:  # it cannot be made; download the largest possible file instead
            await _shell(sandbox, "truncate -s 48M big")
        await _expect_refusal("reading the file", lambda: sandbox.read("big", 1 << 20))
        await _expect_refusal("downloading the folder", lambda: sandbox.download("", 1 << 20))
    return REFUSED


@case("29", "paths that lead out: .., absolute, links, pipes, devices", of_runtime=True)
async def paths(context: CaseContext) -> str:
    async with _open_sandbox(context) as sandbox:
        links = "ln -s /etc/passwd link; ln -s / root; ln -s /proc/self/root magic; ln -s .. up; mkfifo pipe"
        await _shell(sandbox, links + "; ln -s /dev/zero zero; ln /usr/bin/env hard 2>/dev/null; true")
        for path in ("../x", "/etc/passwd", "a/../../x", "link", "root/etc/passwd", "magic/etc/passwd", "pipe", "zero"):
            await _expect_refusal(f"reading {path}", lambda path=path: sandbox.read(path, 1 << 20))  # type: ignore[misc]
        for path in ("../x", "/tmp/x", "a/../../x", "link", "root/tmp/x", "magic/tmp/x", "up/x", "pipe"):
            await _expect_refusal(f"writing {path}", lambda path=path: sandbox.write(path, b"x"))  # type: ignore[misc]
        for path in ("root", "magic/etc", ".."):
            await _expect_refusal(f"listing {path}", lambda path=path: sandbox.list(path))  # type: ignore[misc]
            await _expect_refusal(f"downloading {path}", lambda path=path: sandbox.download(path, 1 << 20))  # type: ignore[misc]
    return REFUSED


def _archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info, content in entries:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b"x" if kind == tarfile.REGTYPE else b""


@case("30", "archives that lead out, or have too much in them", of_runtime=True)
async def archives(context: CaseContext) -> str:
    async with _open_sandbox(context) as sandbox:
        for content, archive in {
            "an absolute path": _archive(_entry("/etc/x")),
            "a path that leads out": _archive(_entry("../x")),
            "a link that leads out": _archive(_entry("a", tarfile.SYMTYPE, "/etc/passwd")),
            "a link to above": _archive(_entry("a", tarfile.SYMTYPE, ".."), _entry("a/x")),
            "a hard link that leads out": _archive(_entry("a", tarfile.LNKTYPE, "/etc/passwd")),
            "a device": _archive(_entry("a", tarfile.CHRTYPE)),
            "a pipe": _archive(_entry("a", tarfile.FIFOTYPE)),
            "a million entries": _many(1_000_000),
            "more than the scratch folder can hold": _archive((tarfile.TarInfo("big"), bytes(80 << 20))),
            "no archive": b"no archive" * 100,
        }.items():
            await _expect_refusal(content, lambda archive=archive: sandbox.upload(archive))  # type: ignore[misc]
        if entries := await sandbox.list():
            raise Escape(f"refused archives left {entries}")
        setuid = tarfile.TarInfo("setuid")
        setuid.mode = 0o6755
        try:
            await sandbox.upload(_archive((setuid, b"x")))
        except SandboxFailure as failure:
            if failure.retryable:
                raise
        else:
            await _shell(sandbox, "test -f setuid && ! test -u setuid && ! test -g setuid")
    return REFUSED


def _many(count: int) -> bytes:
    header = tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT)
    return header * count + bytes(1024)


@case("31a", "a link planted where something may be mounted or written")
async def planted_link(context: CaseContext) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        code = f"""
import os, shutil
for name in ('a', 'main.py.d', 'proc', 'dev'):
    for above in ('.', '/tmp', '/'):
        try:
            os.symlink({folder!r}, os.path.join(above, name))
        except OSError:
            pass
print('planted')
"""
        for _ in range(2):
            await context.run(code)
        if await context.output("print(open('a/b').read())", files={"a/b": b"mine"}) != "mine":
            raise Unclear("the next program's file was not there")
        if files := list(Path(folder).iterdir()):
            raise Escape(f"it made {files} on this machine")
    return CONTAINED


@case("31b", "a link planted in the way of a file that is written", of_runtime=True)
async def planted_link_in_the_way(context: CaseContext) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        async with _open_sandbox(context) as sandbox:
            await _shell(sandbox, f"ln -s {folder} a")
            await _expect_refusal("writing through a link", lambda: sandbox.write("a/b", b"x"))
            await _expect_refusal("unpacking through a link", lambda: sandbox.upload(_archive(_entry("a/b"))))
        if files := list(Path(folder).iterdir()):
            raise Escape(f"it made {files} on this machine")
    return REFUSED
