"""Sandboxes that live on, and sessions in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.cgroups import NoDriver
from headrace_sandbox.conformance.look import descendants, lives
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command, Sandbox, Template
from headrace_sandbox.runtimes.bubblewrap import Bubblewrap
from headrace_sandbox.runtimes.kept import KeptSandbox, _SessionHost
from headrace_sandbox.sessions import HostedSession

pytestmark = pytest.mark.component("bubblewrap")

LIMITS = Limits(wall_s=20.0)

BOTH = pytest.mark.parametrize("kind", ["bash", "python"])


@pytest.fixture
async def sandbox(fresh: Bubblewrap) -> Sandbox:
    return await fresh.open(Template(files={"given/x.txt": b"given"}), 300.0)


def python(code: str) -> Command:
    return Command(arguments=["python3", "-I", "-c", code])


def said(result: ExecResult) -> str:
    assert (result.fault, result.stderr.text) == ("", "")
    return result.stdout.text


def daemon(mark: str) -> str:
    """For a shell: a process in a session of its own, that holds no output."""
    return f"setsid bash -c 'exec -a {mark} sleep 300' >/dev/null 2>&1"


def marked(mark: str) -> list[int]:
    """Processes of this machine with the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


async def until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)


# Commands -------------------------------------------------------------------------------------------------------------


async def test_commands_share_files_and_nothing_else_is_left_of_one(sandbox: Sandbox) -> None:
    mark = secrets.token_hex(8)
    script = f"{daemon(mark)} & cat given/x.txt; echo more >y; until grep -qa {mark} /proc/*/cmdline; do :; done"
    assert said(await sandbox.run(Command(arguments=["bash", "-c", script]), LIMITS)) == "given"
    assert not lives(mark)
    assert said(await sandbox.run(Command(arguments=["cat", "y"]), LIMITS)) == "more\n"


async def test_a_command_has_its_input_files_environment_and_its_own_verdict(sandbox: Sandbox) -> None:
    command = Command(
        arguments=["bash", "-c", "cat; cat a/b; echo $X; exit 3"],
        stdin=b"in ",
        files={"a/b": b"file "},
        environment={"X": "x"},
    )
    result = await sandbox.run(command, LIMITS)
    assert (result.stdout.text, result.exit_code, result.fault) == ("in file x\n", 3, "program")
    result = await sandbox.run(python("import os\nos.kill(os.getpid(), 15)"), LIMITS)
    assert (result.signal, result.fault) == (15, "program")
    result = await sandbox.run(Command(arguments=["no-such-program"]), LIMITS)
    assert (result.exit_code, result.stderr.text) == (127, "no-such-program: No such file or directory\n")
    result = await sandbox.run(python("print('so far', flush=True)\nimport time\ntime.sleep(99)"), Limits(wall_s=1.0))
    assert (result.limit, result.exit_code, result.stdout.text) == ("time", None, "so far\n")
    result = await sandbox.run(Command(arguments=["yes"]), Limits(output_bytes=1 << 20))
    assert (result.limit, result.fault) == ("output", "limit")


async def test_what_fails_in_a_full_sandbox_ran_into_its_disk(fresh: Bubblewrap) -> None:
    sandbox = await fresh.open(Template(limits=Limits(disk_bytes=1 << 20)), 60.0)
    session = await sandbox.session("bash")
    fill, clear = python("open('x', 'wb').write(bytes(2 << 20))"), Command(arguments=["rm", "x"])
    assert (await session.run("false", LIMITS)).limit is None
    result = await sandbox.run(fill, LIMITS)
    assert (result.exit_code, result.limit, result.fault) == (1, "disk", "limit")
    result = await session.run("cp x y", LIMITS)
    assert (result.exit_code, result.limit, result.fault) == (1, "disk", "limit")
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.read("none", 1)
    assert caught.value.kind == "no-such-file"  # what is known of its end counts, and not the disk
    assert (await session.run("true", LIMITS)).limit is None
    assert (await sandbox.run(clear, LIMITS)).limit is None
    assert (await session.run("rm y; false", LIMITS)).limit is None


@pytest.mark.component("cgroups")
async def test_limits_are_those_of_the_whole_sandbox(fresh: Bubblewrap) -> None:
    sandbox = await fresh.open(Template(limits=Limits(memory_bytes=64 << 20, pids=20)), 60.0)
    session = await sandbox.session("bash")
    hungry = "held = [bytearray(10_000_000) for _ in range(1000)]"
    result = await sandbox.run(python(hungry), LIMITS)
    assert (result.signal, result.limit, result.fault) == (9, "memory", "limit")
    result = await session.run(f"python3 -c '{hungry}'", LIMITS)
    assert (result.exit_code, result.limit, result.fault, result.lost) == (137, "memory", "limit", None)
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(300)"
    result = await sandbox.run(python(forks), LIMITS)
    assert (result.limit, result.fault) == ("pids", "limit")
    assert said(await session.run("echo fine", LIMITS)) == "fine\n"


@pytest.mark.component("cgroups")
async def test_35_programs_count_the_processors_that_they_may_use(fresh: Bubblewrap) -> None:
    sandbox = await fresh.open(Template(limits=Limits(cpus=1.0)), 60.0)
    session = await sandbox.session("bash")
    assert said(await session.run("nproc", LIMITS)) == "1\n"
    assert said(await sandbox.run(Command(arguments=["nproc"]), LIMITS)) == "1\n"


async def test_what_runs_inside_sees_neither_the_keeper_nor_others(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    await session.run("sleep 300 &", LIMITS)
    look = """
import os
print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))
for path in ('/proc/1/mem', '/proc/1/environ', '/proc/1/root/etc', '/proc/1/fd'):
    try:
        os.listdir(path) if path.endswith(('fd', 'etc')) else open(path).read(1)
        print('reached', path)
    except OSError as error:
        print(error.strerror)
for number in (9, 19, 2, 15):
    os.kill(1, number)
"""
    result = await sandbox.run(python(look), LIMITS)
    assert said(result).splitlines() == ["[1, 2]", *["Permission denied"] * 4]
    status = await session.run("grep -E 'NoNewPrivs|CapEff|CapBnd|Seccomp:' /proc/self/status; id -u", LIMITS)
    assert said(status).split()[1::2] == ["0" * 16, "0" * 16, "1", "2"]


# Sessions -------------------------------------------------------------------------------------------------------------


async def test_what_a_cell_sets_the_next_one_finds(sandbox: Sandbox) -> None:
    bash, other = await sandbox.session("bash"), await sandbox.session("bash")
    said(await bash.run("x=5; f() { echo f$1; return 4; }; cd given; export Y=y", LIMITS))
    result = await bash.run("pwd; echo $x; f 1", LIMITS)
    assert (result.stdout.text, result.exit_code) == ("/scratch/given\n5\nf1\n", 4)
    assert said(await bash.run("echo $?; python3 -c 'import os; print(os.environ[\"Y\"])'", LIMITS)) == "0\ny\n"
    assert said(await other.run("echo .$x.", LIMITS)) == "..\n"
    interpreter = await sandbox.session("python")
    said(await interpreter.run("import math\ndef f(x):\n    return x + 1\ny = 1", LIMITS))
    assert said(await interpreter.run("print('p')\nf(y)", LIMITS)) == "p\n2\n"
    assert said(await interpreter.run("None", LIMITS)) == ""


async def test_an_exception_is_1_with_its_traceback_and_an_exit_is_its_code(sandbox: Sandbox) -> None:
    session = await sandbox.session("python")
    result = await session.run("def f():\n    return 1 / 0\nf()", LIMITS)
    assert (result.exit_code, result.fault, result.lost) == (1, "program", None)
    lines = result.stderr.text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == '  File "<cell 1>", line 3, in <module>'
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "/headrace" not in result.stderr.text
    assert (await session.run("x = 1\nif", LIMITS)).stderr.text.endswith("SyntaxError: invalid syntax\n")
    assert (await session.run("import sys\nx = 2\nsys.exit(7)", LIMITS)).exit_code == 7
    assert (await session.run("exit(8)", LIMITS)).exit_code == 8
    assert said(await session.run("x", LIMITS)) == "2\n"


async def test_a_cell_of_any_size_runs(sandbox: Sandbox) -> None:
    bash, interpreter = await sandbox.session("bash"), await sandbox.session("python")
    assert said(await bash.run("\n".join(["x=1"] * 100_000) + "\necho $x", LIMITS)) == "1\n"
    assert said(await interpreter.run("\n".join(["x = 1"] * 50_000) + "\nx", LIMITS)) == "1\n"
    with pytest.raises(SandboxFailure) as caught:
        await bash.run("#" * 2_000_000, LIMITS)
    assert caught.value.kind == "request-too-large"


@BOTH
async def test_12_input_is_at_its_end(sandbox: Sandbox, kind: Any) -> None:
    session = await sandbox.session(kind)
    cell = "cat; read -r line; echo [$line]" if kind == "bash" else "import sys\nprint([sys.stdin.read()])"
    assert said(await session.run(cell, LIMITS)) == ("[]\n" if kind == "bash" else "['']\n")


SLOW = {
    "bash": [
        "x=1; echo so far; sleep 300; echo more",
        "x=1; echo so far; while :; do :; done",
        "x=1; echo so far; sh -c 'trap \"\" INT TERM; while :; do sleep 1; done'; echo more; sleep 300",
        "x=1; echo so far; sleep 300 | cat",
    ],
    "python": [
        "x=1\nprint('so far')\nimport time\ntime.sleep(300)",
        "x=1\nprint('so far', flush=True)\nwhile True:\n    pass",
        "x=1\nprint('so far', flush=True)\nimport subprocess\n"
        "subprocess.run(['sh', '-c', 'trap \"\" INT; while :; do sleep 1; done'])",
    ],
}


@pytest.mark.parametrize(("kind", "cell"), [(kind, cell) for kind, cells in SLOW.items() for cell in cells])
async def test_a_cell_that_runs_into_its_time_leaves_the_session_with_its_variables(
    sandbox: Sandbox, kind: Any, cell: str
) -> None:
    session = await sandbox.session(kind)
    await session.run("kept=1", LIMITS)
    result = await session.run(cell, Limits(wall_s=0.7))
    assert (result.limit, result.exit_code, result.fault, result.lost) == ("time", None, "limit", None)
    assert result.stdout.text == "so far\n"
    assert result.wall_s < 5
    assert said(await session.run("echo $kept$x" if kind == "bash" else "kept, x", LIMITS)) in ("11\n", "(1, 1)\n")
    assert said(await sandbox.run(Command(arguments=["echo", "fine"]), LIMITS)) == "fine\n"


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        ("bash", "x=1; trap '' INT; while :; do :; done"),
        ("bash", "x=1; exec sh -c 'trap \"\" INT; while :; do :; done'"),
        ("python", "import signal\nx=1\nsignal.signal(signal.SIGINT, lambda *_: None)\nwhile True: pass"),
    ],
)
async def test_a_session_that_cannot_go_on_is_made_anew_and_says_so(sandbox: Sandbox, kind: Any, cell: str) -> None:
    session = await sandbox.session(kind)
    result = await session.run(cell, Limits(wall_s=0.5))
    assert (result.limit, result.fault) == ("time", "program")
    assert "did not come back" in (result.lost or "")
    assert said(await session.run("echo .$x." if kind == "bash" else "'x' in globals()", LIMITS)) in ("..\n", "False\n")


@pytest.mark.parametrize(
    ("kind", "cell", "code", "number"),
    [
        ("bash", "exit 3", 3, None),
        ("bash", "exec true", 0, None),
        ("bash", "kill -9 $$", None, 9),
        ("python", "import os\nos._exit(3)", 3, None),
        ("python", "import os\nos.kill(os.getpid(), 11)", None, 11),
        ("python", "import os\nos.execv('/bin/false', ['false'])", 1, None),
        ("python", "import os\nos.closerange(3, 256)", 1, None),
    ],
)
async def test_a_cell_that_ends_its_shell_is_told_how_and_the_next_one_finds_a_new_one(
    sandbox: Sandbox, kind: Any, cell: str, code: int | None, number: int | None
) -> None:
    session = await sandbox.session(kind)
    result = await session.run(cell, LIMITS)
    assert (result.exit_code, result.signal, result.fault) == (code, number, "program")
    assert "ended" in (result.lost or "")
    assert said(await session.run("echo ok" if kind == "bash" else "print('ok')", LIMITS)) == "ok\n"


@BOTH
async def test_interrupting_ends_the_cell_and_not_the_session(sandbox: Sandbox, kind: Any) -> None:
    session = await sandbox.session(kind)
    mark = secrets.token_hex(8)
    slow = f"exec -a {mark} sleep 300"
    python = f"x=1\nimport subprocess\nsubprocess.run(['bash', '-c', {slow!r}])"
    running = asyncio.ensure_future(session.run(f"x=1; ({slow})" if kind == "bash" else python, LIMITS))
    await until(lambda: bool(lives(mark)))
    await session.interrupt()
    result = await running
    assert (result.exit_code, result.limit, result.lost) == (130 if kind == "bash" else 1, None, None)
    await session.interrupt()  # nothing runs: nothing happens
    assert said(await session.run("echo $x" if kind == "bash" else "x", LIMITS)) == "1\n"


async def test_37_nothing_that_a_cell_writes_anywhere_ends_it(sandbox: Sandbox) -> None:
    flood = "for fd in {1..63}; do for word in x '0 0' '1 0 0'; do echo $word >&$fd; done; done 2>/dev/null"
    bash = await sandbox.session("bash")
    cell = f"{flood}; ({flood}); bash -c {shlex.quote(flood)}; sleep 0.3; echo end"
    result = await bash.run(cell, LIMITS)
    assert (result.exit_code, result.stdout.text[-4:], result.lost) == (0, "end\n", None)
    interpreter = await sandbox.session("python")
    code = """
import os, time
def flood():
    for fd in range(1, 64):
        for data in (b'x', b'0 0', bytes(9), b'x\\0\\0\\0\\0', bytes(200)):
            try:
                os.write(fd, data)
            except OSError:
                pass
flood()
if os.fork() == 0:
    flood()
    os._exit(0)
os.wait()
time.sleep(0.3)
print('end')
"""
    result = await interpreter.run(code, LIMITS)
    assert (result.exit_code, result.stdout.text[-4:], result.lost) == (0, "end\n", None)
    assert said(await interpreter.run("'next'", LIMITS)) == "'next'\n"
    assert said(await bash.run("echo next", LIMITS)) == "next\n"


async def test_37_a_child_that_knows_the_word_of_a_cell_cannot_end_it(sandbox: Sandbox) -> None:
    session = await sandbox.session("python")
    code = """
import gc, os, re, socket, sys, time
frame = sys._getframe()
while frame.f_back is not None and 'word' not in frame.f_locals:
    frame = frame.f_back
word, status = frame.f_locals['word'], frame.f_locals['status']
if os.fork() == 0:
    status.send(word + b' 0')
    os._exit(0)
os.wait()
time.sleep(0.3)
print('end')
1 / 0
"""
    result = await session.run(code, LIMITS)
    assert (result.exit_code, result.stdout.text) == (1, "end\n")


async def test_a_program_cannot_come_between_a_shell_and_its_host(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    said(await session.run("x=1", LIMITS))
    for cell in (
        "cd /session; dd if=/dev/zero of=x; touch {1..99}; mkdir out err; mv cell y; rm -f out; chmod 700 .; cd; true",
        "cat /proc/self/fd/1 >/dev/null & cat </session/out >/dev/null & yes | head -c 300000; kill %1 %2; true",
    ):
        result = await session.run(cell, LIMITS)
        assert (result.exit_code, result.lost) == (0, None), result.stderr.text
    assert said(await session.run("echo $x; ls /session", LIMITS)) == "1\ncell\nerr\nout\n"


async def test_a_child_that_a_cell_forked_takes_no_cell_of_its_own(sandbox: Sandbox) -> None:
    session = await sandbox.session("python")
    said(await session.run("import os\nos.fork()\nx = 1", LIMITS))
    for _ in range(3):
        assert said(await session.run("x", LIMITS)) == "1\n"


@BOTH
async def test_a_shell_that_was_killed_between_cells_is_made_anew_and_the_next_cell_says_so(
    fresh: Bubblewrap, kind: Any
) -> None:
    mark = secrets.token_hex(8)
    sandbox = await fresh.open(Template(environment={"MARK": mark}), 60.0)
    session = await sandbox.session(kind)
    killer = "(until [ -e go ]; do sleep 0.01; done; kill -9 $$) &"
    if kind == "python":
        killer = f"import subprocess\nsubprocess.Popen({killer.replace('$$', '$PPID')!r}, shell=True)\nx = None"
    said(await session.run(killer, LIMITS))
    there = marked(mark)
    await sandbox.write("go", b"")
    await until(lambda: not marked(mark))  # the killer, too, has come and gone
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in there))  # its host knows that it ended
    result = await session.run("echo ok" if kind == "bash" else "print('ok')", LIMITS)
    assert (result.stdout.text, result.exit_code, result.fault) == ("ok\n", 0, "program")
    assert "was ended by signal 9" in (result.lost or "")
    assert said(await session.run("echo ok" if kind == "bash" else "print('ok')", LIMITS)) == "ok\n"


async def test_what_an_earlier_cell_left_running_is_not_interrupted_with_a_later_one(sandbox: Sandbox) -> None:
    session = await sandbox.session("python")
    mark = secrets.token_hex(8)
    code = f"import subprocess\np = subprocess.Popen(['bash', '-c', 'exec -a {mark} sleep 300'])"
    said(await session.run(code, LIMITS))
    await until(lambda: bool(lives(mark)))
    assert (await session.run("while True:\n    pass", Limits(wall_s=0.3))).limit == "time"
    assert said(await session.run("p.poll()", LIMITS)) == ""
    assert lives(mark)


@pytest.mark.component("cgroups")
async def test_an_interpreter_that_is_killed_for_memory_is_told_so(fresh: Bubblewrap) -> None:
    sandbox = await fresh.open(Template(limits=Limits(memory_bytes=64 << 20)), 60.0)
    session = await sandbox.session("python")
    result = await session.run("held = [bytearray(10_000_000) for _ in range(1000)]", LIMITS)
    assert (result.signal, result.limit, result.fault) == (9, "memory", "program")
    assert "was ended by signal 9" in (result.lost or "")
    assert said(await session.run("1 + 1", LIMITS)) == "2\n"


@BOTH
async def test_7_a_cell_that_writes_without_end_is_cut_and_stopped(sandbox: Sandbox, kind: Any) -> None:
    session = await sandbox.session(kind)
    cell = "x=1; yes" if kind == "bash" else "x=1\nwhile True:\n    print('y' * 1000)"
    result = await session.run(cell, Limits(wall_s=30, output_bytes=4 << 20, kept_bytes=1000))
    assert (result.limit, result.fault, result.lost) == ("output", "limit", None)
    assert result.stdout.truncated
    assert len(result.stdout.head) + len(result.stdout.tail) == 1000
    assert said(await session.run("echo $x" if kind == "bash" else "x", LIMITS)) == "1\n"


async def test_32_bytes_are_kept_as_they_are(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    assert (await session.run(r"printf '\xff\x00\x1b[31m\r'; printf 'no end'", LIMITS)).stdout.head == (
        b"\xff\x00\x1b[31m\rno end"
    )


async def test_14_zombies_are_reaped_in_a_session_and_in_the_sandbox(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    said(await session.run("for i in $(seq 40); do (true & true) ; done", LIMITS))
    count = "for f in /proc/[0-9]*/stat; do sed 's/.*) //' $f; done 2>/dev/null | grep -c ^Z"
    async with asyncio.timeout(10):
        while (await session.run(count, LIMITS)).stdout.text != "0\n":
            await asyncio.sleep(0.02)


async def test_a_cancelled_cell_is_killed_and_the_session_is_made_anew(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    mark = secrets.token_hex(8)
    running = asyncio.ensure_future(session.run(f"x=1; bash -c 'exec -a {mark} sleep 300'", LIMITS))
    await until(lambda: bool(lives(mark)))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not lives(mark)
    assert said(await session.run("echo .$x.", LIMITS)) == "..\n"


async def test_an_idle_sandbox_takes_less_than_ten_megabytes(fresh: Bubblewrap) -> None:
    sandbox = await fresh.open(Template(), 60.0)
    said(await sandbox.run(python("print(1)"), LIMITS))
    assert isinstance(sandbox, KeptSandbox)
    assert sandbox._keeper is not None
    bubblewrap = sandbox._keeper._process.pid
    proportional = 0
    for pid in {bubblewrap, *descendants(bubblewrap)}:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        proportional += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    assert proportional < 10_000


# Its life -------------------------------------------------------------------------------------------------------------


async def test_a_reset_sandbox_is_as_it_was_made(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    mark = secrets.token_hex(8)
    cell = f"exec -a {mark} sleep 300 & rm -r given; echo left >left; echo left >/dev/shm/left; kill -0 $!"
    said(await session.run(cell, LIMITS))
    await until(lambda: bool(lives(mark)))
    before = await canary(sandbox)
    await sandbox.reset()
    assert not lives(mark)
    after, again = await canary(sandbox), await sandbox.session("bash")
    assert "left" in before
    assert "left" not in after
    assert said(await again.run("cat given/x.txt; ls /dev/shm", LIMITS)) == "given"
    with pytest.raises(SandboxFailure) as caught:
        await session.run("echo", LIMITS)
    assert caught.value.kind == "closed"


async def canary(sandbox: Sandbox) -> str:
    return said(await sandbox.run(Command(arguments=["ls", "-lR", "/scratch", "/dev/shm", "/proc/sysvipc"]), LIMITS))


async def test_a_closed_sandbox_leaves_no_process_group_mount_or_descriptor(fresh: Bubblewrap) -> None:
    async def life() -> None:
        sandbox = await fresh.open(Template(files={"x": b"x"}), 60.0)
        for kind in ("bash", "python"):
            session = await sandbox.session(kind)  # type: ignore[arg-type]
            await session.run(f"sleep {mark} & x=1" if kind == "bash" else "x=1", LIMITS)
        await sandbox.run(python("print(1)"), LIMITS)
        await sandbox.list()
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(SandboxFailure) as caught:
            await sandbox.list()
        assert caught.value.kind == "closed"

    mark = f"{300 + secrets.randbelow(1 << 20)}.5"
    await life()
    before, mounts = len(os.listdir("/proc/self/fd")), Path("/proc/self/mounts").read_text()
    for _ in range(3):
        await life()
    assert len(os.listdir("/proc/self/fd")) == before
    assert Path("/proc/self/mounts").read_text() == mounts
    assert not lives(mark)


async def test_a_closed_session_leaves_nothing_and_others_go_on(sandbox: Sandbox) -> None:
    first, second = await sandbox.session("bash"), await sandbox.session("bash")
    mark = secrets.token_hex(8)
    await first.run(f"{daemon(mark)} &", LIMITS)
    await until(lambda: bool(lives(mark)))
    said(await second.run("x=1", LIMITS))
    await first.close()
    assert not lives(mark)
    assert said(await second.run("echo $x", LIMITS)) == "1\n"
    with pytest.raises(SandboxFailure):
        await first.run("echo", LIMITS)


async def test_a_sandbox_ends_at_its_time(fresh: Bubblewrap) -> None:
    sandbox = await fresh.open(Template(), 1.5)
    session = await sandbox.session("bash")
    mark = secrets.token_hex(8)
    with pytest.raises(SandboxFailure) as caught:
        await session.run(f"bash -c 'exec -a {mark} sleep 300'", LIMITS)
    assert (caught.value.kind, caught.value.retryable) == ("expired", True)
    await until(lambda: not lives(mark))
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.list()
    assert caught.value.kind == "expired"


SUPERVISOR = """
import asyncio, sys
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Template
from headrace_sandbox.runtimes.bubblewrap import Bubblewrap
from headrace_sandbox.runtimes.kept import KeptSandbox, _SessionHost
from headrace_sandbox.sessions import HostedSession

async def main():
    runtime = Bubblewrap()
    sandbox = await runtime.open(Template(), float(sys.argv[2]))
    session = await sandbox.session("bash")
    await session.run(f"setsid bash -c 'exec -a {sys.argv[1]} sleep 300' & sleep 0.2", Limits())
    print("ready", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["killed", "stopped for good"])
async def test_40_nothing_outlives_a_supervisor_that_never_comes_back(how: str) -> None:
    mark = secrets.token_hex(8)
    ttl_s = 300.0 if how == "killed" else 8.0
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUPERVISOR, mark, f"{ttl_s}", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        assert lives(f"{mark}\x00300")
        process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        await until(lambda: not lives(f"{mark}\x00300"), 20.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for group in Path("/sys/fs/cgroup").glob(f"**/headrace/{process.pid}-*"):
            group.rmdir()


async def test_sessions_and_files_work_without_control_groups() -> None:
    runtime = Bubblewrap(NoDriver())
    sandbox = await runtime.open(Template(files={"x": b"x"}, limits=Limits(pids=30)), 60.0)
    session = await sandbox.session("bash")
    assert said(await session.run("cat x", LIMITS)) == "x"
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(300)"
    assert "Resource temporarily unavailable" in (await sandbox.run(python(forks), LIMITS)).stderr.text
    assert "MemoryError" in (await sandbox.run(python("x = bytearray(1 << 30)"), LIMITS)).stderr.text
    assert said(await session.run("cat x", LIMITS)) == "x"
    await runtime.close()


async def test_a_template_with_an_image_is_refused(fresh: Bubblewrap) -> None:
    with pytest.raises(SandboxFailure) as caught:
        await fresh.open(Template(image="debian:12"), 60.0)
    assert caught.value.kind == "not-offered"


async def test_a_session_of_a_kind_that_there_is_not_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.session("node")  # type: ignore[arg-type]
    assert caught.value.kind == "not-offered"


async def test_a_session_whose_host_was_killed_from_outside_is_our_failure(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    assert isinstance(session, HostedSession)
    mark = secrets.token_hex(8)
    running = asyncio.ensure_future(session.run(f"x=1; bash -c 'exec -a {mark} sleep 300'", LIMITS))
    await until(lambda: bool(lives(mark)))
    assert isinstance(session._host, _SessionHost)
    signal.pidfd_send_signal(session._host._pidfd, signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await running
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)
    assert said(await session.run("echo .$x.", LIMITS)) == "..\n"


ODD = {
    "bash": [
        "ulimit -n 3",
        "ulimit -u 0",
        "ulimit -f 0",
        "set -e; false",
        "printf() { :; }; alias builtin=false",
        "coproc cat",
        "kill -9 0",
        "kill -HUP $$",
        "exec nosuchcommand",
        'for fd in {0..255}; do eval "exec $fd>&-"; done 2>/dev/null',
        'for fd in {3..255}; do eval "exec $fd</dev/null"; done 2>/dev/null',
        "chmod 000 /scratch",
        "yes & disown; yes >&2 &",
        ":(){ :|:& };:",
    ],
    "python": [
        "import os\nos.closerange(0, 256)",
        "import sys\nsys.stdout = sys.stderr = 5",
        "import sys\nsys.modules.clear()",
        "import builtins\nbuiltins.__dict__.clear()",
        "import os\nos.fork()",
        "import os\nos.kill(0, 9)",
        "import os\n[os.dup(0) for _ in range(300)]",
        "import socket\nsocket.recv_fds = None",
        "class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E",
        "import threading\n[threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start() for _ in range(3)]",
    ],
}


@BOTH
async def test_whatever_a_cell_does_to_its_shell_is_contained_or_said_to_have_lost_it(
    sandbox: Sandbox, kind: Any
) -> None:
    for way in ODD[kind]:
        session = await sandbox.session(kind)
        first = await session.run(way, Limits(wall_s=5.0))
        second, third = [await session.run("echo ok" if kind == "bash" else "print('ok')", LIMITS) for _ in range(2)]
        assert first.lost or second.lost or second.stdout.text == "ok\n", way
        assert third.stdout.text == "ok\n", way
        await session.close()
