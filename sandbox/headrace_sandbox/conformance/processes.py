"""Cases 9 to 17 and 40 to 42: processes, signals and time."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import Traces, descendants, pids_with_mark, traces, wait_gone
from headrace_sandbox.conformance.resources import NO_FORK
from headrace_sandbox.conformance.suite import CONTAINED, REFUSED, CaseContext, SkipCase, Unclear, case, outcome_of
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, SupportsSweep

FREEZER = Path("/sys/fs/cgroup/freezer")
"""The freezer of control groups version 1; frozen processes survive even SIGKILL."""

HIDDEN_S = 3.0
"""Time for a program to become visible, where the supervisor has child processes at all."""

START_S = 20.0
"""Time limit for a program to become visible from outside."""


def _contained(result: ExecResult, output: str) -> str:
    if result.fault == "" and result.stdout.text == output:
        return CONTAINED
    return outcome_of(result, *NO_FORK)


@case("9", "a daemon, forked twice in a session of its own")
async def daemon(context: CaseContext) -> str:
    mark = secrets.token_hex(8)
    code = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp('sleep', ['{mark}', '300'])
    os._exit(0)
os.wait()
print('away')
"""
    result = await context.run(code)
    await wait_gone(mark)
    return _contained(result, "away\n")


@case("10", "a child in the background that holds the output")
async def held_output(context: CaseContext) -> str:
    mark = secrets.token_hex(8)
    code = f"import subprocess\nsubprocess.Popen(['{mark}', '300'], executable='/bin/sleep')\nprint('done')"
    result = await context.run(code)
    if result.wall_s > 10:
        raise Unclear(f"it took {result.wall_s:.1f} s")
    await wait_gone(mark)
    return _contained(result, "done\n")


@case("11", "ignoring every signal", harmless=True)
async def deaf(context: CaseContext) -> str:
    code = """
import signal
for number in set(signal.Signals) - {getattr(signal, 'SIGKILL', 9), getattr(signal, 'SIGSTOP', 19)}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
print('deaf', flush=True)
while True:
    pass
"""
    result = await context.run(code, wall_s=1.0)
    if result.stdout.text != "deaf\n" or result.wall_s > 3:
        raise Unclear(f"after {result.wall_s:.1f} s: {result.stdout.text} {result.stderr.text}")
    return outcome_of(result)


@case("12a", "reading the input to its end", harmless=True)
async def input_ends(context: CaseContext) -> str:
    if await context.output("import sys\nprint(repr(sys.stdin.read()))") != "''":
        raise Unclear("there was input")
    return CONTAINED


@case("12b", "sleeping for ever", harmless=True)
async def sleeper(context: CaseContext) -> str:
    result = await context.run("print('so far', flush=True)\nimport time\ntime.sleep(300)", wall_s=1.0)
    if result.stdout.text != "so far\n":
        raise Unclear(f"partial output {result.stdout.text!r}")
    return outcome_of(result)


@case("13", "waiting in the kernel, where no signal ends it")
async def uninterruptible(context: CaseContext) -> str:
    """Freeze the program from outside while it sleeps: like a hung file system, this survives SIGKILL."""
    if not os.access(FREEZER, os.W_OK):
        raise SkipCase(f"{FREEZER} cannot be used here: it needs root and control groups of version 1")
    mark = secrets.token_hex(8)
    code = f"import os, sys\nif sys.platform != 'linux':\n    os.fork\nos.execvp('sleep', ['{mark}', '300'])"
    with _freezer(mark) as freeze:
        running = asyncio.ensure_future(context.run(code, wall_s=2.0))
        until = time.monotonic() + START_S
        while not freeze() and not running.done() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        try:
            result = await running
        except SandboxFailure as failure:
            if await context.output("print('another')") != "another":
                raise Unclear("the next program did not run") from failure
            raise
    return CONTAINED if result.limit == "time" else outcome_of(result, *NO_FORK)


@contextmanager
def _freezer(mark: str) -> Iterator[Callable[[], bool]]:
    folder = FREEZER / f"headrace-conformance-{mark}"
    folder.mkdir()

    def freeze() -> bool:
        pids = pids_with_mark(mark)
        for pid in pids:
            (folder / "cgroup.procs").write_text(f"{pid}")
        if pids:
            (folder / "freezer.state").write_text("FROZEN")
        return bool(pids)

    try:
        yield freeze
    finally:
        (folder / "freezer.state").write_text("THAWED")
        for pid in pids_with_mark(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + START_S
        while (folder / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.01)
        folder.rmdir()


@case("14", "eighty zombies")
async def zombies(context: CaseContext) -> str:
    code = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
time.sleep(0.2)
pids = [int(pid) for pid in os.listdir('/proc') if pid.isdigit() and int(pid) > 1]
print([open(f'/proc/{pid}/stat').read().split()[2] for pid in pids].count('Z'))
"""
    return _contained(await context.run(code), "0\n")


@case("15", "killing everybody")
async def kill_everybody(context: CaseContext) -> str:
    result = await context.run(
        "import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept ProcessLookupError:\n    pass"
    )
    if await context.output("print('alive')") != "alive":
        raise Unclear("the next program did not run")
    if result.exit_code not in (0, None) and outcome_of(result, "has no attribute", "PermissionError") == REFUSED:
        return REFUSED
    return CONTAINED


@case("16", "stopping and killing process 1")
async def kill_first(context: CaseContext) -> str:
    code = "import os, signal\nos.kill(1, signal.SIGSTOP)\nos.kill(1, signal.SIGKILL)\nprint('still here')"
    result = await context.run(code, wall_s=5.0)
    if result.lost is not None or (result.fault == "" and result.stdout.text == "still here\n"):
        return CONTAINED
    if "PermissionError" in result.stderr.text:
        return CONTAINED
    return outcome_of(result, "has no attribute")


@case("17", "tracing its parent, and writing into process 1")
async def trace(context: CaseContext) -> str:
    return await context.try_forbidden("""
def attach(pid):
    numbers = {'x86_64': 101, 'aarch64': 117}
    return system_call(numbers[os.uname().machine], 16, pid, 0, 0)
attempt('attach to the parent', lambda: attach(os.getppid() or 1))
attempt('attach to process 1', lambda: attach(1))
for path in ('/proc/1/mem', '/proc/1/task/1/mem'):
    attempt(path, lambda: open(path, 'r+b'))
""")


@case("40", "its supervisor is killed")
async def supervisor_killed(context: CaseContext) -> str:
    mark = secrets.token_hex(8)
    victim = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace_sandbox.conformance.victim", context.runtime.name, context.way, mark),
        stdin=asyncio.subprocess.DEVNULL,
    )
    until = time.monotonic() + START_S
    try:
        while not set(pids_with_mark(mark)) - {victim.pid}:  # the victim's own arguments contain the mark
            if victim.returncode is not None:
                raise Unclear(f"the victim ended with {victim.returncode}")
            if time.monotonic() > until:
                raise Unclear("no program was started")
            if time.monotonic() > until - START_S + HIDDEN_S and descendants(victim.pid):
                break  # the processes of a sandbox with its own kernel are not visible
            await asyncio.sleep(0.02)
    finally:
        if victim.returncode is None:
            victim.kill()
        await victim.wait()
    await wait_gone(mark, within_s=START_S)
    if isinstance(context.runtime, SupportsSweep):
        await context.runtime.sweep()  # a daemon still holds the ended sandbox
    return CONTAINED


@case("41", "starts that fail, and calls that are cancelled", harmless=True)
async def failing_starts(context: CaseContext) -> str:
    await context.output("print(1)")
    before = traces()
    for turn in range(8):
        with suppress(SandboxFailure):
            await _fail_to_start(context)
        call = asyncio.ensure_future(context.run("import time\ntime.sleep(300)"))
        await asyncio.sleep(0.02 * turn)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    until = time.monotonic() + 5
    while (after := traces()) != before and time.monotonic() < until:
        await asyncio.sleep(0.05)
    if _has_grown(after, before):
        raise Unclear(f"{after} remains; before it was {before}")
    return CONTAINED


async def _fail_to_start(context: CaseContext) -> None:
    if context.way == "code":
        await context.runtime.run_code(PythonProgram(code="", preload=("no_such_module",)), Limits())
    else:
        await context.runtime.run(SandboxCommand(arguments=["/no/such/program"]), Limits())


def _has_grown(after: Traces, before: Traces) -> bool:
    # A runtime may keep warm parts: a group, and an interpreter with another preload.
    return (
        after.descriptors > before.descriptors + 8
        or after.mounts > before.mounts
        or after.children > before.children + 4
        or after.groups > before.groups + 2
    )


SERVER = """
import json, os, sys
def answer(request, result):
    print(json.dumps({'jsonrpc': '2.0', 'id': request['id'], 'result': result}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request['method'] == 'initialize':
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp('sleep', [MARK, '300'])
            os._exit(0)
        answer(request, {'protocolVersion': '2025-06-18', 'capabilities': {'tools': {}}, 'serverInfo': {'name': 'x'}})
    elif request['params']['name'] == 'flood':
        sys.stderr.write('x' * 5_000_000)
        answer(request, {'content': []})
    else:
        while True:
            pass
"""


@case("42", "a tool server (MCP) that daemonises, floods and then never answers")
async def tool_server(context: CaseContext) -> str:
    mark = secrets.token_hex(8)
    calls = [("initialize", {}), ("tools/call", {"name": "flood"}), ("tools/call", {"name": "hang"})]
    requests = [
        json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": parameters})
        for number, (method, parameters) in enumerate(calls)
    ]
    result = await context.run(f"MARK = '{mark}'\n" + SERVER, stdin="\n".join([*requests, ""]).encode(), wall_s=3.0)
    await wait_gone(mark)
    if any(error in result.stderr.text for error in NO_FORK):
        return REFUSED
    answers = [json.loads(line)["id"] for line in result.stdout.text.splitlines()]
    if answers != [0, 1]:
        raise Unclear(f"answers to {answers}")
    return outcome_of(result)
