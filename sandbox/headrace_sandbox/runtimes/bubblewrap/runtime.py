"""The runtime named ``bubblewrap``: a fresh sandbox of namespaces for each command, the default on Linux.

* The program starts only when its control group bounds it.
* Its process ids are its own, so its end is the end of all that it started.
* It cannot make namespaces, and the root of its files is read-only; the scratch folder is in bounded memory.
* What reaches beyond its namespaces is refused by a filter of system calls.
* It cannot reach the process that tells how it ended.
* A sandbox that lives on is kept by a process 1 of ours.
* Python programs are forks of a warm interpreter, one for each set of preloaded modules and domain of trust. Domains
  come and go; the interpreters that were used last are kept.
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
from headrace_sandbox.host import bwrap
from headrace_sandbox.host.bwrap import SCRATCH, Bwrap
from headrace_sandbox.host.cgroups import Cgroup, Driver, Groups, find_driver
from headrace_sandbox.host.descriptors import Descriptors, is_readable, refused_by_machine
from headrace_sandbox.host.scratch import scratch_come
from headrace_sandbox.host.seccomp import require_filter
from headrace_sandbox.host.watch import KILL_S, Started, ended, supervise, to_the_end
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram, Sandbox, Template, check_room, check_ttl, not_offered
from headrace_sandbox.runtimes.bubblewrap.fork_server import ForkServer
from headrace_sandbox.runtimes.bubblewrap.persistent import MODULES, KeptSandbox, Surroundings
from headrace_sandbox.runtimes.shared import guest_programs
from headrace_sandbox.runtimes.shared.outcome import admit, isolation_of, result_of, weak_limits

OWN_PIDS = 2
"""Processes of bubblewrap in a group: its own, and process 1."""

MOST_SERVERS = 8
"""Warm interpreters that are kept, each with some children that wait: 10 MB and more."""


class Bubblewrap:
    """The runtime. ``driver`` makes control groups; the best one that works is found if none is given."""

    name = "bubblewrap"

    def __init__(self, driver: Driver | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing`` or ``no-filter``."""
        self._bwrap = Bwrap()
        self._filter = require_filter()
        self._groups = Groups(driver if driver is not None else find_driver())
        self._servers: dict[tuple[tuple[str, ...], str], ForkServer] = {}
        self._uses: Counter[ForkServer] = Counter()
        self._kept: set[KeptSandbox] = set()
        self._programs: dict[str, bytes] = {}
        self._compiling = asyncio.Lock()
        self.isolation = isolation_of("bubblewrap", self._bwrap, self._groups.driver)

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command in a sandbox of its own. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        check_room(command.files, limits)
        group = await self._groups.taken(msgspec.structs.replace(limits, pids=limits.pids + OWN_PIDS))
        try:
            with refused_by_machine(), contextlib.ExitStack() as stack:
                made = await self._make(command, limits, group, stack)
                start_s = time.monotonic() - begun_at
                verdict = await supervise(made.started, command.stdin, limits)
                if is_readable(made.waits):  # it ended before it would have started the program
                    raise bwrap.not_made(verdict.stderr.text.strip())
                await ended(made.first, KILL_S)
                usage = group.usage()
                if made.scratch is not None and verdict.returncode != 0:
                    usage = msgspec.structs.replace(usage, disk_full=is_full(made.scratch))
                if verdict.returncode == 1 and (code := bwrap.not_begun(made.status, verdict.stderr.text)) is not None:
                    verdict = verdict._replace(returncode=code)
                if bwrap.was_killed(made.first):
                    verdict = verdict._replace(returncode=None)
                bwrap.reap_orphan(made.first)
        finally:
            await self._groups.given_back(group)
        return result_of(verdict, usage, start_s, self.isolation)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a fork of a warm interpreter. Raises SandboxFailure; cancelling the call kills it."""
        async with self._server(program) as server:
            return await server.run(program, limits)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """A sandbox that lives on. Raises SandboxFailure."""
        check_ttl(ttl_s)
        if template.image is not None:
            raise not_offered(self.name, "images: its sandboxes have the programs of this machine")
        async with self._compiling:
            if not self._programs:
                self._programs = await guest_programs.compiled(self.run, *MODULES)
        around = Surroundings(self._bwrap, self._filter, self._groups, self.isolation, self._programs)
        sandbox = KeptSandbox(around, template, ttl_s)
        await sandbox.start()
        self._kept = {one for one in self._kept if not one.is_closed} | {sandbox}
        return sandbox

    async def close(self) -> None:
        """End all sandboxes and the warm interpreters, and remove what is kept between executions."""
        while self._kept:
            await self._kept.pop().close()
        while self._servers:
            await self._servers.popitem()[1].close()
        await asyncio.to_thread(self._groups.close)

    @contextlib.asynccontextmanager
    async def _server(self, program: PythonProgram) -> AsyncIterator[ForkServer]:
        key = (program.preload, program.domain)
        server = self._servers.pop(key, None) or ForkServer(self._groups.driver, program.preload)
        self._servers[key] = server  # the last, for it was used last
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
            await to_the_end(server.close())

    def _weak_limits(self, limits: Limits) -> list[str]:
        if self._groups.driver.active:
            return []
        return ["/usr/bin/prlimit", *(f"--{name}={value}" for name, value in weak_limits(limits).items()), "--"]

    async def _make(self, command: Command, limits: Limits, group: Cgroup, stack: contextlib.ExitStack) -> _Made:
        """Make the sandbox, bound it, and let the program begin."""
        made = stack.enter_context(Descriptors())
        (status, told), (waits, go) = made.pipe(), made.pipe()
        ours, theirs = made.leash()
        process = self._begin(command, limits, group, made, told, waits, theirs)
        made.close(told, theirs)
        stack.callback(bwrap.reap, process)
        joining = asyncio.ensure_future(_joined(group, process.pid))
        try:
            child = await bwrap.first_process(status)
        finally:
            await asyncio.shield(joining)
        pidfd = None if child is None else admit(child, group, limits, stack)
        if pidfd is None:
            process.kill()
            raise bwrap.not_made(process.communicate()[1].decode(errors="replace").strip())
        assert child is not None
        scratch = await scratch_come(child, pidfd, ours, stack)
        group.count()
        started = _started(process, pidfd, group, made)
        os.write(go, b"x")
        return _Made(started, pidfd, status, waits, scratch)

    def _begin(
        self, command: Command, limits: Limits, group: Cgroup, made: Descriptors, told: int, waits: int, mounting: int
    ) -> subprocess.Popen[bytes]:
        """Start bubblewrap, which tells of itself by ``told``, waits at ``waits``, and closes ``mounting`` when it has
        mounted what there is."""
        # It holds the pipe's other end too: if this process is killed now nobody lets the program go, and it never
        # starts. At a plain end of the pipe it would.
        waits_inside = made.own(os.open(f"/proc/self/fd/{waits}", os.O_RDWR))
        filter_ = made.own(bwrap.memory_file(self._filter))
        contents = {path: made.own(bwrap.memory_file(data)) for path, data in command.files.items()}
        variables = bwrap.environment(command.environment).items()
        arguments = [
            *("--disable-userns", "--cap-drop", "ALL", *bwrap.system()),
            *("--size", f"{limits.disk_bytes}", "--tmpfs", SCRATCH, *bwrap.scratch_files(contents)),
            # Process 1 tells how the program ended, and is of the same user: its memory must be out of reach.
            *("--tmpfs", "/proc/1", "--file", f"{mounting}", "/dev/null", "--remount-ro", "/proc"),
            *("--remount-ro", "/", "--chdir", SCRATCH),
            *(part for name, value in variables for part in ("--setenv", name, value)),
            *("--seccomp", f"{filter_}", "--json-status-fd", f"{told}", "--block-fd", f"{waits_inside}"),
            *("--", *self._weak_limits(limits), *command.arguments),
        ]
        handed = [waits_inside, filter_, *contents.values()]
        process = self._bwrap.start(arguments, limits, [told, mounting, *handed], subprocess.PIPE, group.entries)
        made.close(*handed)
        return process


class _Made(NamedTuple):
    """A sandbox whose program may begin. ``first``: a descriptor of its process 1. ``status``: where bubblewrap
    tells of it. ``waits``: where it waits until the program may begin. ``scratch``: its scratch folder, if that can be
    seen."""

    started: Started
    first: int
    status: int
    waits: int
    scratch: int | None


def _started(process: subprocess.Popen[bytes], first: int, group: Cgroup, made: Descriptors) -> Started:
    streams = [made.own(bwrap.taken(stream)) for stream in (process.stdin, process.stdout, process.stderr)]
    end = os.pidfd_open(process.pid)
    made.give(*streams)
    stdin, stdout, stderr = streams
    return Started(
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        end=end,
        returncode=lambda: _of_shell(process.wait()),
        kill=lambda: bwrap.kill(first),
        cpu_s=lambda: group.usage().cpu_s,
    )


async def _joined(group: Cgroup, pid: int) -> None:
    """Put bubblewrap into a group that it cannot enter by itself, while it makes the sandbox: both wait for the
    kernel."""
    if not group.entries:
        with contextlib.suppress(ProcessLookupError):
            await asyncio.to_thread(group.add, pid)


def _of_shell(code: int) -> int:
    """bubblewrap ends with 128 + n for a program that signal n ended, as a shell does; here that is -n."""
    return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code
