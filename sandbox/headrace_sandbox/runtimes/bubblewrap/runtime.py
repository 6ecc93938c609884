"""The runtime named ``bubblewrap``: a fresh sandbox of namespaces for each command, the default on Linux.

* The program starts only when its control group bounds it.
* Its process ids are its own, so its end is the end of all that it started.
* It cannot make namespaces, and the root of its files is read-only; the scratch folder is in bounded memory.
* System calls that reach beyond its namespaces are refused by a filter.
* It cannot reach the process that reports its end.
* A persistent sandbox is held by an init process of ours.
* Python programs are forks of a warm interpreter, one for each set of preloaded modules and trust domain. Domains come
  and go; the interpreters that were used last are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from headrace_sandbox.guest.isolation import is_full
from headrace_sandbox.host.cgroups.cgroup import Cgroup, CgroupDriver, look_at_group
from headrace_sandbox.host.cgroups.detection import find_driver
from headrace_sandbox.host.cgroups.pool import CgroupPool
from headrace_sandbox.host.descriptors import (
    Descriptors,
    detach_descriptor,
    is_readable,
    memory_file,
    os_errors_as_failures,
)
from headrace_sandbox.host.layout import SCRATCH, program_environment
from headrace_sandbox.host.processes import KILL_S, kill_pidfd, wait_for_exit, was_killed_by_signal
from headrace_sandbox.host.scratch_folder import wait_scratch_folder
from headrace_sandbox.host.seccomp import require_filter
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.host.watch import ProgramOutcome, RunningProgram, watch_program
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import (
    PythonProgram,
    Sandbox,
    SandboxCommand,
    Template,
    check_room,
    check_ttl,
    not_offered,
)
from headrace_sandbox.runtimes.bubblewrap.admission import admit_first
from headrace_sandbox.runtimes.bubblewrap.bwrap import (
    Bwrap,
    end_bwrap,
    exit_code_if_not_executed,
    first_process,
    reap_orphan,
    sandbox_not_made,
    scratch_files,
    system_mounts,
)
from headrace_sandbox.runtimes.bubblewrap.fork_server import ForkServer
from headrace_sandbox.runtimes.bubblewrap.guest_files import compile_modules
from headrace_sandbox.runtimes.bubblewrap.init_process import BubblewrapResources
from headrace_sandbox.runtimes.bubblewrap.sandbox import BubblewrapSandbox
from headrace_sandbox.runtimes.shared.exec_result import exec_result, fallback_rlimits

OWN_PIDS = 2
"""Processes of bubblewrap in a group: bubblewrap itself, and process 1."""

MOST_SERVERS = 8
"""Warm interpreters that are kept, each with some waiting children: 10 MB and more."""

INIT_MODULES = ("isolation", "python_cells", "files", "session_host", "bubblewrap_init")
"""The guest modules of the init process."""


class BubblewrapRuntime:
    """The runtime. ``driver`` makes control groups; without one, the best driver that works here."""

    name = "bubblewrap"

    def __init__(self, driver: CgroupDriver | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing`` or ``no-filter``."""
        self._bwrap = Bwrap()
        self._filter = require_filter()
        self._groups = CgroupPool(driver if driver is not None else find_driver())
        self._servers: dict[tuple[tuple[str, ...], str], ForkServer] = {}
        self._uses: Counter[ForkServer] = Counter()
        self._sandboxes: set[BubblewrapSandbox] = set()
        self._init_modules: dict[str, bytes] = {}
        self._compile_lock = asyncio.Lock()
        self.isolation = self._bwrap.isolation(self._groups.driver)

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        started_at = time.monotonic()
        check_room(command.files, limits)
        group = await self._groups.acquire(msgspec.structs.replace(limits, pids=limits.pids + OWN_PIDS))
        try:
            with os_errors_as_failures(), contextlib.ExitStack() as stack:
                fresh = await self._make(command, limits, group, stack)
                start_s = time.monotonic() - started_at
                outcome = await watch_program(fresh.program, command.stdin, limits)
                if is_readable(fresh.waits):  # it ended before it would have started the program
                    raise sandbox_not_made(outcome.stderr.text.strip())
                await wait_for_exit(fresh.first, KILL_S)
                usage = group.usage()
                if fresh.scratch is not None and outcome.returncode != 0:
                    usage = msgspec.structs.replace(usage, disk_full=is_full(fresh.scratch))
                outcome = _corrected(outcome, fresh)
                reap_orphan(fresh.first)
        finally:
            await self._groups.release(group)
        return exec_result(outcome, usage, start_s, self.isolation)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a fork of a warm interpreter. Raises SandboxFailure; cancelling the call kills it."""
        async with self._server(program) as server:
            return await server.run(program, limits)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """A persistent sandbox. Raises SandboxFailure."""
        check_ttl(ttl_s)
        if template.image is not None:
            raise not_offered(self.name, "images: its sandboxes have the programs of this machine")
        async with self._compile_lock:
            if not self._init_modules:
                self._init_modules = await compile_modules(self.run, *INIT_MODULES)
        resources = BubblewrapResources(self._bwrap, self._filter, self._groups, self.isolation, self._init_modules)
        sandbox = BubblewrapSandbox(resources, template, ttl_s)
        await sandbox.start()
        self._sandboxes = {one for one in self._sandboxes if not one.is_closed} | {sandbox}
        return sandbox

    async def close(self) -> None:
        """End all sandboxes and the warm interpreters, and remove everything that is kept between executions."""
        while self._sandboxes:
            await self._sandboxes.pop().close()
        while self._servers:
            await self._servers.popitem()[1].close()
        await asyncio.to_thread(self._groups.close)

    @contextlib.asynccontextmanager
    async def _server(self, program: PythonProgram) -> AsyncIterator[ForkServer]:
        key = (program.preload, program.domain)
        server = self._servers.pop(key, None) or ForkServer(self._groups.driver, program.preload)
        self._servers[key] = server  # at the end, because it was used last
        self._uses[server] += 1
        try:
            yield server
        finally:
            self._uses[server] -= 1
            await self._end_spare_servers()

    async def _end_spare_servers(self) -> None:
        unused = [key for key, server in self._servers.items() if not self._uses[server]]
        for key in unused[: max(0, len(self._servers) - MOST_SERVERS)]:
            server = self._servers.pop(key)
            del self._uses[server]
            await run_to_completion(server.close())

    async def _make(
        self, command: SandboxCommand, limits: Limits, group: Cgroup, stack: contextlib.ExitStack
    ) -> _FreshSandbox:
        """Make the sandbox, bound it, and let the program start."""
        owned = stack.enter_context(Descriptors())
        (status, status_inside), (waits, go) = owned.pipe(), owned.pipe()
        mounted, mounting = owned.hangup_pair()
        process = self._start_bwrap(command, limits, group, owned, status_inside, waits, mounting)
        owned.close(status_inside, mounting)
        stack.callback(end_bwrap, process)
        joining = asyncio.ensure_future(_join_group(group, process.pid))
        try:
            child = await first_process(status)
        finally:
            await asyncio.shield(joining)
        pidfd = None if child is None else admit_first(child, group, limits.cpus, stack)
        if pidfd is None:
            process.kill()
            raise sandbox_not_made(process.communicate()[1].decode(errors="replace").strip())
        assert child is not None
        scratch = await wait_scratch_folder(child, pidfd, mounted, stack)
        group.count()
        program = _running_program(process, child, pidfd, group, owned)
        os.write(go, b"x")
        return _FreshSandbox(program, pidfd, status, waits, scratch)

    def _start_bwrap(
        self,
        command: SandboxCommand,
        limits: Limits,
        group: Cgroup,
        owned: Descriptors,
        status: int,
        waits: int,
        mounting: int,
    ) -> subprocess.Popen[bytes]:
        """Start bubblewrap, which reports to ``status``, waits at ``waits``, and closes ``mounting`` when its mounts
        are made."""
        # bubblewrap holds the other end of the pipe too: if this process is killed now, the program never starts. At
        # the plain end of a pipe it would.
        waits_inside = owned.own(os.open(f"/proc/self/fd/{waits}", os.O_RDWR))
        filter_ = owned.own(memory_file(self._filter))
        contents = {path: owned.own(memory_file(data)) for path, data in command.files.items()}
        variables = program_environment(command.environment).items()
        arguments = [
            *("--disable-userns", "--cap-drop", "ALL", *system_mounts()),
            *("--size", f"{limits.disk_bytes}", "--tmpfs", SCRATCH, *scratch_files(contents)),
            # Process 1, which reports the program's end, has the same user: its memory must be out of reach.
            *("--tmpfs", "/proc/1", "--file", f"{mounting}", "/dev/null", "--remount-ro", "/proc"),
            *("--remount-ro", "/", "--chdir", SCRATCH),
            *(part for name, value in variables for part in ("--setenv", name, value)),
            *("--seccomp", f"{filter_}", "--json-status-fd", f"{status}", "--block-fd", f"{waits_inside}"),
            *("--", *self._fallback_limits(limits), *command.arguments),
        ]
        passed_fds = [waits_inside, filter_, *contents.values()]
        process = self._bwrap.start(arguments, limits, [status, mounting, *passed_fds], subprocess.PIPE, group.entries)
        owned.close(*passed_fds)
        return process

    def _fallback_limits(self, limits: Limits) -> list[str]:
        if self._groups.driver.active:
            return []
        return ["/usr/bin/prlimit", *(f"--{name}={value}" for name, value in fallback_rlimits(limits).items()), "--"]


class _FreshSandbox(NamedTuple):
    """A sandbox whose program may start. ``first``: a descriptor of its process 1. ``status``: bubblewrap's reports.
    ``waits``: still readable at the end if the program never started. ``scratch``: its scratch folder, if it can be
    opened."""

    program: RunningProgram
    first: int
    status: int
    waits: int
    scratch: int | None


def _corrected(outcome: ProgramOutcome, fresh: _FreshSandbox) -> ProgramOutcome:
    """The outcome with the exit status that bubblewrap's own does not show."""
    if outcome.returncode == 1:
        code = exit_code_if_not_executed(fresh.status, outcome.stderr.text)
        outcome = outcome if code is None else outcome._replace(returncode=code)
    return outcome._replace(returncode=None) if was_killed_by_signal(fresh.first) else outcome


def _running_program(
    process: subprocess.Popen[bytes], child: int, first: int, group: Cgroup, owned: Descriptors
) -> RunningProgram:
    streams = [owned.own(detach_descriptor(stream)) for stream in (process.stdin, process.stdout, process.stderr)]
    end = os.pidfd_open(process.pid)
    owned.release(*streams)
    stdin, stdout, stderr = streams
    return RunningProgram(
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        end=end,
        returncode=lambda: _exit_status(process.wait()),
        kill=lambda: kill_pidfd(first),
        cpu_s=lambda: group.usage().cpu_s,
        look=lambda: look_at_group(group, child),
    )


async def _join_group(group: Cgroup, pid: int) -> None:
    """Put bubblewrap into a group that it cannot enter by itself, while it makes the sandbox: both wait for the
    kernel."""
    if not group.entries:
        with contextlib.suppress(ProcessLookupError):
            await asyncio.to_thread(group.add, pid)


def _exit_status(code: int) -> int:
    """The exit status as ``subprocess`` has it. Like a shell, bubblewrap ends with 128 + n for a program that signal n
    ended."""
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code
