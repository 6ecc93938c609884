"""The runtime wasm: the isolation of a program, its limits, and the report of its end."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.host.supervisor import FOLDER_VARIABLE, MADE_FOLDER, state_folder
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from headrace_sandbox.runtimes.wasm import interpreter
from headrace_sandbox.runtimes.wasm import runtime as runtime_wasm
from headrace_sandbox.runtimes.wasm.interpreter import CompiledModules
from headrace_sandbox.runtimes.wasm.runtime import WasmRuntime
from tests.leaks import descriptors
from tests.sandbox.host.open_files import MOST_NEEDED, only_descriptors

pytestmark = [pytest.mark.component("wasm"), pytest.mark.timeout(400)]  # the first one compiles the interpreter


@pytest.fixture
async def wasm() -> WasmRuntime:
    runtime = WasmRuntime()
    await runtime.prepare(lambda _: None)
    return runtime


async def execute(
    runtime: WasmRuntime, code: str, *, stdin: bytes = b"", files: Any = None, **limits: Any
) -> ExecResult:
    program = PythonProgram(code=code, stdin=stdin, files=files or {})
    return await runtime.run_code(program, Limits(**{"wall_s": 60.0, **limits}))


def said(result: ExecResult) -> str:
    assert result.fault == "", result.stderr.text
    return result.stdout.text.strip()


TRY = """
def tried(what):
    try:
        return repr(what())
    except BaseException as error:
        return type(error).__name__
"""
"""Defines ``tried(f)``: the result of f, or the name of its error."""


async def worker_of(running: asyncio.Future[Any]) -> int:
    """The process of the only running program, which reports its start by making a file."""
    async with asyncio.timeout(60):
        while not running.done():
            for folder in state_folder().glob(f"{MADE_FOLDER}/*-wasm-*/on"):
                folder.unlink()
                return int(next(Path("/proc/self/task").glob("*/children")).read_text().split()[-1])
            await asyncio.sleep(0.01)
    raise AssertionError(await running)


ON = "import time\nopen('on', 'w').close()\ntime.sleep(300)"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the programs' folders, in this test alone."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    (tmp_path / MADE_FOLDER).mkdir()
    return tmp_path / MADE_FOLDER


# The interpreter ----------------------------------------------------------------------------------------------


async def test_the_interpreter_is_cpython_and_imports_only_wasi(wasm: WasmRuntime) -> None:
    from wasmtime import Module

    from headrace_sandbox.runtimes.wasm.worker import engine

    assert wasm._compiled is not None
    module = Module.deserialize_file(engine(), wasm._compiled.program)
    assert {needed.module for needed in module.imports} == {"wasi_snapshot_preview1"}
    names = {needed.name for needed in module.imports}
    assert {name for name in names if name.startswith("sock_")} == {
        "sock_accept",
        "sock_recv",
        "sock_send",
        "sock_shutdown",
    }
    code = "import sys, platform\nprint(platform.python_version(), sys.implementation.name, sys.platform, *sys.path)"
    assert said(await execute(wasm, code)).startswith("3.12.0 cpython wasi /scratch /usr/local/lib/")


async def test_another_interpreter_is_refused_and_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changed = tmp_path / "python.wasm"
    changed.write_bytes(WasmRuntime()._source.read_bytes()[:-1] + b"\1")
    for module in (changed, tmp_path / "missing.wasm"):
        with pytest.raises(SandboxFailure, match=interpreter.SHA256) as caught:
            await execute(WasmRuntime(module), "print(1)")
        assert caught.value.kind == "wrong-module"
    assert not [path for path in (tmp_path / "cache/headrace").iterdir() if path.suffix != ".lock"]


async def test_a_cache_that_other_users_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace").chmod(0o777)
    with pytest.raises(SandboxFailure) as caught:
        await WasmRuntime().prepare(lambda _: None)
    assert caught.value.kind == "unsafe-cache"


def test_a_missing_extra_is_reported_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "find_spec", lambda _: None)
    with pytest.raises(SandboxFailure) as caught:
        WasmRuntime()
    assert (caught.value.kind, caught.value.hint) == ("runtime-missing", "pip install 'headrace[wasm]'")


# Isolation ----------------------------------------------------------------------------------


async def test_a_program_has_no_processes_threads_sockets_or_variables_of_ours(
    wasm: WasmRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    code = f"""
import os, socket, subprocess, threading
{TRY}
print(tried(lambda: os.fork()), tried(lambda: subprocess.run(['true'])), tried(threading.Thread(target=print).start))
print(tried(socket.socket), tried(lambda: socket.create_connection(('127.0.0.1', 80))), tried(lambda: os.kill(1, 9)))
print(tried(lambda: __import__('ctypes')), sorted(os.environ))
"""
    assert said(await execute(wasm, code)).splitlines() == [
        "AttributeError OSError RuntimeError",
        "OSError AttributeError AttributeError",
        "ModuleNotFoundError ['HOME', 'LANG', 'PATH']",
    ]


async def test_a_program_has_only_the_files_in_its_folder(wasm: WasmRuntime, temporary: Path) -> None:
    outside = temporary / "outside"
    outside.write_text("secret")
    outside.chmod(0o644)
    code = f"""
import os
{TRY}
up = '../' * 12
for path in ('{outside}', '/etc/passwd', '../outside', '/scratch/../outside', '/tmp/../outside', up + 'etc/passwd',
             '/proc/self/environ', '/dev/tty', 'sub/../../outside', './/..//outside'):
    print(tried(lambda: open(path).read()))
for source in ('{outside}', '/etc', '..', '../outside', up + 'etc'):
    made = tried(lambda: os.symlink(source, 'link'))
    print(made in ('None', 'PermissionError'), tried(lambda: open('link').read()), tried(lambda: os.listdir('link')))
    tried(lambda: os.unlink('link'))
print(tried(lambda: os.link('../outside', 'hard')), tried(lambda: os.rename('../outside', 'here')))
print(tried(lambda: os.rename('sub', '../sub')), tried(lambda: os.mkdir('../made')), tried(lambda: os.rmdir('..')))
print(tried(lambda: os.chdir('..') or open('outside').read()))
"""
    seen = said(await execute(wasm, code, files={"sub/x": b""}))
    assert "secret" not in seen
    assert "root:" not in seen
    assert "True" in seen
    assert "False" not in seen
    assert "None" not in seen
    assert outside.read_text() == "secret"
    assert not (temporary / "made").exists()


async def test_a_link_that_another_process_puts_into_its_folder_leads_nowhere(
    wasm: WasmRuntime, temporary: Path
) -> None:
    outside = temporary / "outside"
    outside.write_text("secret")
    code = f"""
import os, time
{TRY}
os.mkdir('sub')
open('on', 'w').close()
while not os.path.lexists('link'):
    time.sleep(0.01)
print(tried(lambda: open('link').read()), tried(lambda: open('link', 'w').write('x')), tried(lambda: os.listdir('up')))
"""
    running = asyncio.ensure_future(execute(wasm, code))
    async with asyncio.timeout(60):
        while not (found := list(temporary.glob("*-wasm-*/on"))):
            await asyncio.sleep(0.01)
    (found[0].parent / "up").symlink_to(temporary)
    (found[0].parent / "link").symlink_to(outside)
    assert set(said(await running).split()) <= {"PermissionError", "OSError"}
    assert outside.read_text() == "secret"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
async def test_the_process_of_a_program_has_no_privileges(wasm: WasmRuntime, temporary: Path) -> None:
    running = asyncio.ensure_future(execute(wasm, ON))
    pid = await worker_of(running)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    running.cancel()
    await asyncio.wait([running])
    assert (status["CapEff"], status["CapPrm"]) == ("0" * 16, "0" * 16)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert (set(status["Uid"].split()) == {str(os.geteuid())}) is (os.geteuid() != 0)


# Limits -------------------------------------------------------------------------------------------------


async def test_memory_is_bounded(wasm: WasmRuntime) -> None:
    result = await execute(wasm, "held = bytearray(600 << 20)")
    assert (result.exit_code, result.fault) == (1, "program")
    assert result.stderr.text.endswith("MemoryError\n")
    code = "held = []\ntry:\n    while True: held.append(bytes(1 << 20))\nexcept MemoryError:\n    print(len(held))"
    result = await execute(wasm, code, memory_bytes=64 << 20)
    assert 40 < int(said(result)) < 64
    assert 40 << 20 < result.usage.peak_memory_bytes <= 64 << 20


FULL = """
import os
def write(n):
    file = open(f'{n}', 'wb', buffering=0)
    file.write(bytes(1 << 20))
    return file
"""


@pytest.mark.parametrize(
    "code",
    [
        "for n in range(40): write(n)",
        "held = []\nfor n in range(40):\n    held.append(write(n))\n    os.unlink(f'{n}')",
        "os.close(1)\nfor n in range(40): write(n)",
        "file = write(0)\nfor n in range(40): os.pwrite(file.fileno(), bytes(1 << 20), n << 20)",
        "file = write(0)\nos.posix_fallocate(file.fileno(), 0, 40 << 20)",
        "for n in range(300): open(f'{n}', 'w').close()",
        "for n in range(300): os.mkdir(f'{n}')",
        "for n in range(300): os.symlink('x', f'{n}')",
        "write(0)\nfor n in range(1, 300): os.link('0', f'{n}')",
    ],
    ids=["files", "deleted", "descriptor-1", "pwrite", "allocate", "empty", "folders", "symlinks", "links"],
)
async def test_the_folder_is_bounded(
    wasm: WasmRuntime, monkeypatch: pytest.MonkeyPatch, temporary: Path, code: str
) -> None:
    monkeypatch.setattr(runtime_wasm, "INODES", 100)
    result = await execute(wasm, FULL + code, disk_bytes=8 << 20, file_bytes=1 << 30)
    assert (result.exit_code, result.limit, result.fault) == (1, "disk", "limit")
    assert "No space left on device" in result.stderr.text
    assert list(temporary.iterdir()) == []


DEEP = """
import os
def deep(top, levels, name='x' * 200):
    os.mkdir(top)
    folder = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=folder)
        inner = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    return folder
"""


@pytest.mark.parametrize(
    "code",
    [
        "deep('a', 5000)",
        "for n in range(20): deep(f'{n}', 20, 'x')\n"
        "for n in range(19): os.rename(f'{n}', f'{n + 1}/' + 'x/' * 20 + 'in')",
        "folder = deep('a', 30)\nfile = os.open('f', os.O_WRONLY | os.O_CREAT, dir_fd=folder)\n"
        "for _ in range(40): os.write(file, bytes(1 << 20))",
    ],
    ids=["deeper", "renamed", "hidden"],
)
async def test_the_folder_is_bounded_at_any_depth(wasm: WasmRuntime, temporary: Path, code: str) -> None:
    result = await execute(wasm, DEEP + code, disk_bytes=8 << 20, file_bytes=1 << 30)
    assert (result.limit, result.fault) == ("disk", "limit")
    assert "No space left on device" in result.stderr.text
    assert list(temporary.iterdir()) == []


async def test_a_refused_write_is_not_a_limit_of_a_program_that_succeeds(wasm: WasmRuntime) -> None:
    caught = "try:\n    for n in range(40): write(n)\nexcept OSError as error:\n    print(error.strerror)"
    result = await execute(wasm, FULL + caught, disk_bytes=8 << 20)
    assert (said(result), result.limit, result.fault) == ("No space left on device", None, "")
    alone = await execute(wasm, "1 / 0", disk_bytes=8 << 20)
    assert (alone.exit_code, alone.limit, alone.fault) == (1, None, "program")


async def test_deleted_and_overwritten_data_is_not_counted_twice(wasm: WasmRuntime) -> None:
    over = "for n in range(40):\n    write(n % 4).close()\n"
    anew = "for n in range(40):\n    write(n).close()\n    os.unlink(f'{n}')\nprint('ok')"
    assert said(await execute(wasm, FULL + over + anew, disk_bytes=8 << 20)) == "ok"


async def test_the_size_of_a_file_is_bounded(wasm: WasmRuntime) -> None:
    for code in ("open('x', 'wb').truncate(1 << 40)", "open('x', 'wb').write(bytes(20 << 20))"):
        result = await execute(wasm, code, disk_bytes=1 << 30)
        assert "File too large" in result.stderr.text


async def test_time_and_output_are_bounded(wasm: WasmRuntime) -> None:
    for code, limits, limit in (
        ("while True: pass", {"wall_s": 0.5}, "time"),
        ("import time\ntime.sleep(300)", {"wall_s": 0.5}, "time"),
        ("while True: pass", {"cpu_s": 0.5}, "cpu"),
        ("while True: print('x' * 1000)", {"output_bytes": 1 << 20, "kept_bytes": 1000}, "output"),
    ):
        result = await execute(wasm, code, **limits)
        assert (result.limit, result.fault, result.exit_code) == (limit, "limit", None)
    assert len(result.stdout.head + result.stdout.tail) == 1000


# Reports --------------------------------------------------------------------------------------------


async def test_a_result_reports_the_programs_end(wasm: WasmRuntime) -> None:
    for code, exit_code, stderr in (
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os\nos.abort()", 134, "wasm trap: wasm `unreachable` instruction executed\n"),
        ("def f(): f()\nf()", 1, "RecursionError: maximum recursion depth exceeded\n"),
    ):
        result = await execute(wasm, code)
        assert (result.exit_code, result.fault, result.limit) == (exit_code, "program", None)
        assert result.stderr.text.endswith(stderr)
    lines = (await execute(wasm, "def f():\n    raise ValueError('hm')\nf()")).stderr.text.splitlines()
    assert lines[1:] == ['  File "main.py", line 3, in <module>', '  File "main.py", line 2, in f', "ValueError: hm"]


async def test_input_output_and_files_keep_every_byte(wasm: WasmRuntime) -> None:
    code = """
import sys
given = sys.stdin.buffer.read()
sys.stdout.buffer.write(bytes(range(256)) + open('a/b', 'rb').read() + str(len(given)).encode())
import helper, json, unittest, decimal, sqlite3
print('é', helper.x, __name__, sys.argv, file=sys.stderr)
"""
    files = {"a/b": b"\xff\0", "helper.py": b"x = 1"}
    result = await execute(wasm, code, stdin=b"x" * 1_000_000, files=files)
    assert result.stdout.head == bytes(range(256)) + b"\xff\x001000000"
    assert result.stderr.text == "é 1 __main__ ['main.py']\n"
    with pytest.raises(SandboxFailure) as caught:
        await execute(wasm, "", files={"../x": b""})
    assert caught.value.kind == "bad-path"


async def test_a_crash_of_the_webassembly_runtime_is_the_programs_fault(wasm: WasmRuntime, temporary: Path) -> None:
    running = asyncio.ensure_future(execute(wasm, ON))
    os.kill(await worker_of(running), signal.SIGABRT)
    result = await running
    assert (result.exit_code, result.fault) == (None, "program")
    assert result.lost == "The program crashed the WebAssembly runtime: SIGABRT."


async def test_a_process_that_is_killed_from_outside_is_our_failure(wasm: WasmRuntime, temporary: Path) -> None:
    running = asyncio.ensure_future(execute(wasm, ON))
    os.kill(await worker_of(running), signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await running
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)
    assert list(temporary.iterdir()) == []


async def test_a_cancelled_call_leaves_nothing(wasm: WasmRuntime, temporary: Path) -> None:
    running = asyncio.ensure_future(execute(wasm, "open('on', 'w').close()\nwhile True: open('x', 'w').close()"))
    pid = await worker_of(running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not Path(f"/proc/{pid}").exists()
    assert list(temporary.iterdir()) == []


async def test_a_call_without_enough_descriptors_is_our_failure_and_leaks_none(wasm: WasmRuntime) -> None:
    await execute(wasm, "")
    before, failures = descriptors(collect=True), []
    for more in range(MOST_NEEDED):
        try:
            with only_descriptors(more):
                await execute(wasm, "")
        except SandboxFailure as failure:
            failures.append(failure)
    assert failures
    assert all(failure.retryable for failure in failures)
    assert descriptors() == before


async def test_a_process_that_cannot_be_started_is_our_failure(wasm: WasmRuntime, tmp_path: Path) -> None:
    wasm._compiled = CompiledModules(*[str(tmp_path / "missing")] * 3)
    with pytest.raises(SandboxFailure, match="No such file") as caught:
        await execute(wasm, "")
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-not-made", True)


SUPERVISOR = """
import asyncio
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram
from headrace_sandbox.runtimes.wasm.runtime import WasmRuntime
program = PythonProgram(code="print('on', flush=True)\\nwhile True: pass")
asyncio.run(WasmRuntime().run_code(program, Limits(wall_s=300)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
async def test_a_program_does_not_outlive_its_supervisor(wasm: WasmRuntime) -> None:
    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR])
    async with asyncio.timeout(60):
        while not (found := children(supervisor.pid)):
            await asyncio.sleep(0.01)
    supervisor.kill()
    supervisor.wait()
    async with asyncio.timeout(20):
        while Path(f"/proc/{found[0]}").exists():
            await asyncio.sleep(0.05)


async def test_concurrent_programs_share_nothing_and_leave_nothing(wasm: WasmRuntime, temporary: Path) -> None:
    await execute(wasm, "")
    before = descriptors(collect=True)
    code = "import os, sys\nprint(os.listdir(), sys.stdin.read())\nopen('x', 'w').close()"
    results = await asyncio.gather(*(execute(wasm, code, stdin=b"%d" % n) for n in range(4)))
    assert [said(result) for result in results] == [f"[] {n}" for n in range(4)]
    assert list(temporary.iterdir()) == []
    assert descriptors() == before


async def test_only_python_commands_are_accepted(wasm: WasmRuntime) -> None:
    for arguments, files in (
        (["python3", "-I", "-c", "import sys; print(sys.argv[1:])", "a"], {}),
        (["/usr/bin/python3", "x.py", "a"], {"x.py": b"import sys; print(sys.argv[1:])"}),
    ):
        assert said(await wasm.run(SandboxCommand(arguments=arguments, files=files), Limits(wall_s=60))) == "['a']"
    refused: list[Callable[[], Any]] = [
        lambda: wasm.run(SandboxCommand(arguments=["bash", "-c", "true"]), Limits()),
        lambda: wasm.run(SandboxCommand(arguments=["python3", "-m", "http.server"]), Limits()),
        lambda: wasm.open(Template(), 60),
    ]
    for call in refused:
        with pytest.raises(SandboxFailure) as caught:
            await call()
        assert caught.value.kind == "not-offered"


async def test_a_result_has_the_isolation_and_the_usage(wasm: WasmRuntime) -> None:
    result = await execute(wasm, "for _ in range(1_000_000): pass")
    assert result.isolation.versions.keys() == {"wasmtime", "cpython", "kernel"}
    assert {"memory_bytes", "pids", "disk_bytes"} <= set(result.isolation.active)
    assert result.usage.cpu_s is not None
    assert result.usage.cpu_s > 0.02
    assert result.start_s > 0


async def test_the_cache_is_private_and_may_be_part_of_an_image(
    wasm: WasmRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "headrace"
    assert interpreter.cache_folders() == [folder]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert wasm._compiled is not None
    for module in (wasm._compiled.program, wasm._compiled.stand_in, wasm._compiled.guard):
        (folder / Path(module).name).touch(mode=0o444)
    monkeypatch.setattr(interpreter, "_compile", None)
    another = WasmRuntime()
    await another.prepare(lambda _: None)
    assert another._compiled is not None
    assert Path(another._compiled.program).parent == folder
