"""Sessions: shells and interpreters in a persistent sandbox of bubblewrap."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import pids_with_mark
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap.init_process import BubblewrapSessionHost
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from headrace_sandbox.runtimes.shared.sessions import HostedSession
from tests.sandbox.runtimes.helpers import LIMITS, detached, output_of, pids_marked, pids_named, wait_until

pytestmark = pytest.mark.component("bubblewrap")

BOTH = pytest.mark.parametrize("kind", ["bash", "python"])

PR_SET_NAME, NAME_BYTES = 15, 15
"""The option of ``prctl`` for a process's own name, and the longest name."""


async def test_a_cell_finds_the_state_of_the_cells_before(sandbox: Sandbox) -> None:
    bash, other = await sandbox.session("bash"), await sandbox.session("bash")
    output_of(await bash.run("x=5; f() { echo f$1; return 4; }; cd given; export Y=y", LIMITS))
    result = await bash.run("pwd; echo $x; f 1", LIMITS)
    assert (result.stdout.text, result.exit_code) == ("/scratch/given\n5\nf1\n", 4)
    assert output_of(await bash.run("echo $?; python3 -c 'import os; print(os.environ[\"Y\"])'", LIMITS)) == "0\ny\n"
    assert output_of(await other.run("echo .$x.", LIMITS)) == "..\n"
    interpreter = await sandbox.session("python")
    output_of(await interpreter.run("import math\ndef f(x):\n    return x + 1\ny = 1", LIMITS))
    assert output_of(await interpreter.run("print('p')\nf(y)", LIMITS)) == "p\n2\n"
    assert output_of(await interpreter.run("None", LIMITS)) == ""


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
    assert output_of(await session.run("x", LIMITS)) == "2\n"


async def test_a_cell_of_any_size_runs(sandbox: Sandbox) -> None:
    bash, interpreter = await sandbox.session("bash"), await sandbox.session("python")
    assert output_of(await bash.run("\n".join(["x=1"] * 100_000) + "\necho $x", LIMITS)) == "1\n"
    assert output_of(await interpreter.run("\n".join(["x = 1"] * 50_000) + "\nx", LIMITS)) == "1\n"
    with pytest.raises(SandboxFailure) as caught:
        await bash.run("#" * 2_000_000, LIMITS)
    assert caught.value.kind == "request-too-large"


@BOTH
async def test_a_cell_that_is_not_unicode_is_refused_and_the_session_goes_on(sandbox: Sandbox, kind: Any) -> None:
    session = await sandbox.session(kind)
    with pytest.raises(SandboxFailure) as caught:
        await session.run("x = '\ud800'", LIMITS)
    assert caught.value.kind == "bad-command"
    assert (await session.run("", LIMITS)).exit_code == 0


@BOTH
async def test_a_cells_input_is_empty(sandbox: Sandbox, kind: Any) -> None:
    session = await sandbox.session(kind)
    cell = "cat; read -r line; echo [$line]" if kind == "bash" else "import sys\nprint([sys.stdin.read()])"
    assert output_of(await session.run(cell, LIMITS)) == ("[]\n" if kind == "bash" else "['']\n")


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
async def test_a_cell_that_exceeds_its_time_leaves_the_session_with_its_variables(
    sandbox: Sandbox, kind: Any, cell: str
) -> None:
    session = await sandbox.session(kind)
    await session.run("kept=1", LIMITS)
    result = await session.run(cell, Limits(wall_s=0.7))
    assert (result.limit, result.exit_code, result.fault, result.lost) == ("time", None, "limit", None)
    assert result.stdout.text == "so far\n"
    assert result.wall_s < 5
    assert output_of(await session.run("echo $kept$x" if kind == "bash" else "kept, x", LIMITS)) in ("11\n", "(1, 1)\n")
    assert output_of(await sandbox.run(SandboxCommand(arguments=["echo", "fine"]), LIMITS)) == "fine\n"


@pytest.mark.parametrize(
    ("kind", "cell"),
    [
        ("bash", "x=1; trap '' INT; while :; do :; done"),
        ("bash", "x=1; exec sh -c 'trap \"\" INT; while :; do :; done'"),
        ("python", "import signal\nx=1\nsignal.signal(signal.SIGINT, lambda *_: None)\nwhile True: pass"),
    ],
)
async def test_a_session_that_cannot_go_on_is_recreated_and_says_so(sandbox: Sandbox, kind: Any, cell: str) -> None:
    session = await sandbox.session(kind)
    result = await session.run(cell, Limits(wall_s=0.5))
    assert (result.limit, result.fault) == ("time", "program")
    assert "did not react to an interrupt" in (result.lost or "")
    assert output_of(await session.run("echo .$x." if kind == "bash" else "'x' in globals()", LIMITS)) in (
        "..\n",
        "False\n",
    )


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
async def test_a_cell_that_ends_its_shell_reports_it_and_the_next_one_has_a_new_shell(
    sandbox: Sandbox, kind: Any, cell: str, code: int | None, number: int | None
) -> None:
    session = await sandbox.session(kind)
    result = await session.run(cell, LIMITS)
    assert (result.exit_code, result.signal, result.fault) == (code, number, "program")
    assert "ended" in (result.lost or "")
    assert output_of(await session.run("echo ok" if kind == "bash" else "print('ok')", LIMITS)) == "ok\n"


@BOTH
async def test_interrupting_ends_the_cell_and_not_the_session(sandbox: Sandbox, kind: Any) -> None:
    session = await sandbox.session(kind)
    mark = secrets.token_hex(8)
    slow = f"exec -a {mark} sleep 300"
    python = f"x=1\nimport subprocess\nsubprocess.run(['bash', '-c', {slow!r}])"
    running = asyncio.ensure_future(session.run(f"x=1; ({slow})" if kind == "bash" else python, LIMITS))
    await wait_until(lambda: bool(pids_with_mark(mark)))
    await session.interrupt()
    result = await running
    assert (result.exit_code, result.limit, result.lost) == (130 if kind == "bash" else 1, None, None)
    await session.interrupt()  # without a running cell it does nothing
    assert output_of(await session.run("echo $x" if kind == "bash" else "x", LIMITS)) == "1\n"


async def test_no_output_of_a_cell_ends_it(sandbox: Sandbox) -> None:
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
    assert output_of(await interpreter.run("'next'", LIMITS)) == "'next'\n"
    assert output_of(await bash.run("echo next", LIMITS)) == "next\n"


async def test_a_child_that_knows_a_cells_token_cannot_end_it(sandbox: Sandbox) -> None:
    session = await sandbox.session("python")
    code = """
import gc, os, re, socket, sys, time
frame = sys._getframe()
while frame.f_back is not None and 'token' not in frame.f_locals:
    frame = frame.f_back
token, status = frame.f_locals['token'], frame.f_locals['status']
if os.fork() == 0:
    status.send(token + b' 0')
    os._exit(0)
os.wait()
time.sleep(0.3)
print('end')
1 / 0
"""
    result = await session.run(code, LIMITS)
    assert (result.exit_code, result.stdout.text) == (1, "end\n")


async def test_a_program_cannot_intercept_a_shell_and_its_host(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    output_of(await session.run("x=1", LIMITS))
    for cell in (
        "cd /session; dd if=/dev/zero of=x; touch {1..99}; mkdir out err; mv cell y; rm -f out; chmod 700 .; cd; true",
        "cat /proc/self/fd/1 >/dev/null & cat </session/out >/dev/null & yes | head -c 300000; kill %1 %2; true",
    ):
        result = await session.run(cell, LIMITS)
        assert (result.exit_code, result.lost) == (0, None), result.stderr.text
    assert output_of(await session.run("echo $x; ls /session", LIMITS)) == "1\ncell\nerr\nout\n"


async def test_a_forked_child_of_a_cell_does_not_take_later_cells(sandbox: Sandbox) -> None:
    session = await sandbox.session("python")
    output_of(await session.run("import os\nos.fork()\nx = 1", LIMITS))
    for _ in range(3):
        assert output_of(await session.run("x", LIMITS)) == "1\n"


@BOTH
async def test_a_shell_that_was_killed_between_cells_is_recreated_and_the_next_cell_says_so(
    fresh: BubblewrapRuntime, kind: Any
) -> None:
    mark = secrets.token_hex(8)
    sandbox = await fresh.open(Template(environment={"MARK": mark}), 60.0)
    session = await sandbox.session(kind)
    killer = "(until [ -e go ]; do sleep 0.01; done; kill -9 $$) &"
    if kind == "python":
        # The interpreter was forked without an environment of its own, so it is found by its name.
        killer = (
            f"import ctypes, subprocess\nctypes.CDLL(None).prctl({PR_SET_NAME}, {mark[:NAME_BYTES].encode()!r})\n"
            f"subprocess.Popen({killer.replace('$$', '$PPID')!r}, shell=True)\nx = None"
        )
    output_of(await session.run(killer, LIMITS))
    await wait_until(lambda: bool(pids_marked(mark)))  # the killer has started
    there = [*pids_marked(mark), *pids_named(mark[:NAME_BYTES])]
    await sandbox.write("go", b"")
    await wait_until(lambda: not pids_marked(mark))  # the killer has ended too
    await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in there))  # its host knows that it ended
    result = await session.run("echo ok" if kind == "bash" else "print('ok')", LIMITS)
    assert (result.stdout.text, result.exit_code, result.fault) == ("ok\n", 0, "program"), result
    assert "was ended by signal 9" in (result.lost or "")
    assert output_of(await session.run("echo ok" if kind == "bash" else "print('ok')", LIMITS)) == "ok\n"


async def test_an_interrupt_of_a_cell_spares_processes_of_earlier_cells(sandbox: Sandbox) -> None:
    session = await sandbox.session("python")
    mark = secrets.token_hex(8)
    code = f"import subprocess\np = subprocess.Popen(['bash', '-c', 'exec -a {mark} sleep 300'])"
    output_of(await session.run(code, LIMITS))
    await wait_until(lambda: bool(pids_with_mark(mark)))
    assert (await session.run("while True:\n    pass", Limits(wall_s=0.3))).limit == "time"
    assert output_of(await session.run("p.poll()", LIMITS)) == ""
    assert pids_with_mark(mark)


@pytest.mark.component("cgroups")
async def test_the_result_says_that_an_interpreter_was_killed_for_memory(fresh: BubblewrapRuntime) -> None:
    sandbox = await fresh.open(Template(limits=Limits(memory_bytes=64 << 20)), 60.0)
    session = await sandbox.session("python")
    result = await session.run("held = [bytearray(10_000_000) for _ in range(1000)]", LIMITS)
    assert (result.signal, result.limit, result.fault) == (9, "memory", "program")
    assert "was ended by signal 9" in (result.lost or "")
    assert output_of(await session.run("1 + 1", LIMITS)) == "2\n"


@BOTH
async def test_a_cell_with_endless_output_is_truncated_and_stopped(sandbox: Sandbox, kind: Any) -> None:
    session = await sandbox.session(kind)
    cell = "x=1; yes" if kind == "bash" else "x=1\nwhile True:\n    print('y' * 1000)"
    result = await session.run(cell, Limits(wall_s=30, output_bytes=4 << 20, kept_bytes=1000))
    assert (result.limit, result.fault, result.lost) == ("output", "limit", None)
    assert result.stdout.truncated
    assert len(result.stdout.head) + len(result.stdout.tail) == 1000
    assert output_of(await session.run("echo $x" if kind == "bash" else "x", LIMITS)) == "1\n"


async def test_output_bytes_are_kept_unchanged(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    assert (await session.run(r"printf '\xff\x00\x1b[31m\r'; printf 'no end'", LIMITS)).stdout.head == (
        b"\xff\x00\x1b[31m\rno end"
    )


async def test_zombies_are_reaped_in_a_session_and_in_the_sandbox(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    output_of(await session.run("for i in $(seq 40); do (true & true) ; done", LIMITS))
    count = "for f in /proc/[0-9]*/stat; do sed 's/.*) //' $f; done 2>/dev/null | grep -c ^Z"
    async with asyncio.timeout(10):
        while (await session.run(count, LIMITS)).stdout.text != "0\n":
            await asyncio.sleep(0.02)


async def test_a_cancelled_cell_is_killed_and_the_session_is_recreated(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    mark = secrets.token_hex(8)
    running = asyncio.ensure_future(session.run(f"x=1; bash -c 'exec -a {mark} sleep 300'", LIMITS))
    await wait_until(lambda: bool(pids_with_mark(mark)))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not pids_with_mark(mark)
    assert output_of(await session.run("echo .$x.", LIMITS)) == "..\n"


async def test_a_closed_session_leaves_nothing_and_others_go_on(sandbox: Sandbox) -> None:
    first, second = await sandbox.session("bash"), await sandbox.session("bash")
    mark = secrets.token_hex(8)
    await first.run(f"{detached(mark)} &", LIMITS)
    await wait_until(lambda: bool(pids_with_mark(mark)))
    output_of(await second.run("x=1", LIMITS))
    await first.close()
    assert not pids_with_mark(mark)
    assert output_of(await second.run("echo $x", LIMITS)) == "1\n"
    with pytest.raises(SandboxFailure):
        await first.run("echo", LIMITS)


async def test_a_session_of_an_unknown_kind_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.session("node")  # type: ignore[arg-type]
    assert caught.value.kind == "not-offered"


async def test_a_session_whose_host_was_killed_from_outside_is_our_failure(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    assert isinstance(session, HostedSession)
    mark = secrets.token_hex(8)
    running = asyncio.ensure_future(session.run(f"x=1; bash -c 'exec -a {mark} sleep 300'", LIMITS))
    await wait_until(lambda: bool(pids_with_mark(mark)))
    assert isinstance(session._host, BubblewrapSessionHost)
    signal.pidfd_send_signal(session._host._pidfd, signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await running
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)
    assert output_of(await session.run("echo .$x.", LIMITS)) == "..\n"


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
async def test_a_cells_damage_to_its_shell_is_contained_or_reported_as_loss(sandbox: Sandbox, kind: Any) -> None:
    for way in ODD[kind]:
        session = await sandbox.session(kind)
        first = await session.run(way, Limits(wall_s=5.0))
        second, third = [await session.run("echo ok" if kind == "bash" else "print('ok')", LIMITS) for _ in range(2)]
        assert first.lost or second.lost or second.stdout.text == "ok\n", way
        assert third.stdout.text == "ok\n", way
        await session.close()
