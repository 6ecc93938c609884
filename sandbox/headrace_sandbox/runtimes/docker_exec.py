"""A container, and programs in it: by exec, or as all that it was made for.

* How a program ended is what the daemon says of it; text never counts, not even the daemon's own among its output.
* A shell waits for a program that came by exec, and kills what it left in the background.
* A program that cannot be killed inside ends with its container.
* A container that ended although no program in it could end it is a fault of ours; one that ran out of memory is lost
  by its program.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.bwrap import SCRATCH
from headrace_sandbox.cgroups import Cgroup, group_of
from headrace_sandbox.result import Limits, Usage
from headrace_sandbox.runtimes import docker_container as made
from headrace_sandbox.runtimes.docker_daemon import READ_BYTES, Daemon, NotRunning
from headrace_sandbox.runtimes.docker_watch import Seen, Watch
from headrace_sandbox.runtimes.verdicts import sandbox_lost

WAIT = 'printf .; unset HOSTNAME; exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; exec "$@"); code=$?; kill -9 -1; exit $code'
"""What a shell does in a container: tells that the program starts, waits for it, and kills what it left behind."""

SHELL_SIGNALS = 128
"""A shell ends with this and n more for a program that signal n ended."""

KILLED = SHELL_SIGNALS + signal.SIGKILL

SHELL_S = 5.0
"""For a short script of ours inside."""

LOOKS, LOOK_S = 10, 0.05
"""For what was killed to be gone, and for the daemon to know it."""


class Ended(NamedTuple):
    """How a program ended. ``returncode`` as ``subprocess`` has it; None where it ended with its container, or was
    killed for a limit. ``lost``: why its container cannot be used any more."""

    seen: Seen
    returncode: int | None
    usage: Usage
    lost: str | None


class State(NamedTuple):
    """A container as the daemon sees it."""

    is_running: bool
    is_out_of_memory: bool
    exit_code: int


class Container:
    """A container. ``config``: what it is made of. It lives for ``ttl_s`` at most."""

    def __init__(self, daemon: Daemon, config: dict[str, object], ttl_s: float) -> None:
        self._daemon = daemon
        self._config = config
        self._ends_at = time.monotonic() + ttl_s
        self._group: Cgroup | None = None
        self._used = Usage()
        self.name = f"headrace-{uuid.uuid4().hex[:16]}"

    async def make(self) -> None:
        """Make it; it does not run yet."""
        await self._daemon.call(lambda client: client.create_container_from_config(self._config, self.name))

    async def start(self) -> None:
        """Start it."""
        await self._daemon.call(lambda client: client.start(self.name))
        found = await self._daemon.call(lambda client: client.inspect_container(self.name))
        self._group = group_of(found["State"]["Pid"], found["Id"])

    async def kill(self) -> None:
        """End it."""
        self._usage()  # of a container that is gone nothing is counted any more
        with contextlib.suppress(NotRunning):
            await self._daemon.call(lambda client: client.kill(self.name))

    async def remove(self) -> None:
        """End and remove it, if it is still there."""
        try:
            await self._daemon.call(lambda client: client.remove_container(self.name, v=True, force=True))
        except NotRunning:
            pass  # it is being removed
        except SandboxFailure as failure:
            if failure.kind != "sandbox-lost":
                raise

    async def run(
        self, arguments: Sequence[str], stdin: bytes, variables: Sequence[str], limits: Limits, *, only: bool
    ) -> Ended:
        """Run a program by exec. ``only``: nothing else ever runs in it, so that killing the program is killing the
        container. Raises SandboxFailure."""
        self._count()
        try:
            id_ = await self._exec(["/bin/sh", "-c", WAIT, "sh", *arguments], variables)
            streams = await self._daemon.streams(f"/exec/{id_}/start", {"Detach": False, "Tty": False})
        except NotRunning:
            raise await self._fate() from None
        kills = [self.kill] if only else [self.kill_programs, self.kill]
        seen = await Watch(streams, limits, kills, self.cpu_s, marked=True).run(stdin)
        usage = self._usage()
        code, was_started = await self._ended(id_)
        if seen.limit is not None:
            lost = "It could not be ended inside its sandbox, which was ended with it." if seen.kills > 1 else None
            return Ended(seen, None, usage, lost)
        if code is None or code == KILLED:
            if not await self._is_alive():
                state = await self.state()
                if not state.is_out_of_memory:
                    raise await self._fate()
                usage = msgspec.structs.replace(usage, memory_kills=1)
                return Ended(seen, None, usage, "It used up the memory of its sandbox, which ended.")
            if code is None:
                raise sandbox_lost("The daemon does not say how the program ended.")
            if self._group is None:
                usage = msgspec.structs.replace(usage, memory_kills=await self._events("oom", seen.wall_s))
        if not was_started and not usage.memory_kills:
            raise SandboxFailure(
                f"The daemon could not start the program: {seen.stdout.text.strip()}.",
                kind="sandbox-not-made",
                retryable=True,
            )
        return Ended(seen, of_shell(code), usage, None)

    async def run_only(self, stdin: bytes, limits: Limits) -> Ended:
        """Start it, and with it the program that it was made for. Raises SandboxFailure."""
        streams = await self._daemon.streams(f"/containers/{self.name}/attach?stream=1&stdin=1&stdout=1&stderr=1", {})
        try:
            await self.start()
        except BaseException:
            streams.end()
            raise
        seen = await Watch(streams, limits, [self.kill], self.cpu_s, marked=False).run(stdin)
        usage = self._usage()
        state = await self.state()
        for _ in range(LOOKS):
            if not state.is_running:
                break
            await asyncio.sleep(LOOK_S)
            state = await self.state()
        if state.is_running:
            raise sandbox_lost("The program ended its output, and the daemon does not say how it ended.")
        if state.is_out_of_memory and not usage.memory_kills:
            usage = msgspec.structs.replace(usage, memory_kills=1)
        if seen.limit is not None:
            return Ended(seen, None, usage, None)
        if state.exit_code > SHELL_SIGNALS and not usage.memory_kills and await self._events("kill", seen.wall_s):
            raise await self._fate()
        return Ended(seen, of_shell(state.exit_code), usage, None)

    async def kill_programs(self) -> None:
        """Kill all that runs in it but its keepers; no word on whether that worked."""
        with contextlib.suppress(NotRunning, SandboxFailure):
            await self._shell("kill -9 -1; exit 0")

    async def is_clear(self) -> bool:
        """Whether nothing runs in it but its keepers; what does is killed."""
        for _ in range(LOOKS):
            if await self._processes() <= made.KEEPER_PIDS:
                return True
            await self.kill_programs()
            await asyncio.sleep(LOOK_S)
        return False

    async def _is_alive(self) -> bool:
        """Whether it goes on after a program of it was killed. The daemon learns of a container's end a little later
        than of that of its programs; so it must take another one, or still run after a while."""
        for _ in range(LOOKS):
            if not (await self.state()).is_running:
                return False
            with contextlib.suppress(NotRunning):
                if await self._shell("exit 0"):
                    return True
            await asyncio.sleep(LOOK_S)
        return True

    async def _shell(self, script: str) -> bool:
        """Whether a script of ours ran in it, and ended with 0 in good time."""
        id_ = await self._exec(["/bin/sh", "-c", script], [])
        streams = await self._daemon.streams(f"/exec/{id_}/start", {"Detach": False, "Tty": False})
        try:
            async with asyncio.timeout(SHELL_S):
                while await streams.reader.read(READ_BYTES):
                    pass
        except (TimeoutError, ConnectionError):
            return False
        finally:
            streams.end()
        return (await self._ended(id_)) == (0, True)

    async def state(self) -> State:
        """How it is now. Raises SandboxFailure ``sandbox-lost`` if it was removed."""
        found = (await self._daemon.call(lambda client: client.inspect_container(self.name)))["State"]
        return State(found["Running"], found["OOMKilled"], found["ExitCode"])

    def cpu_s(self) -> float | None:
        """Processor time since the program came; None where nothing counts it."""
        return self._usage().cpu_s

    @property
    def is_counted(self) -> bool:
        """Whether what is used can be seen from here."""
        return self._group is not None

    async def _exec(self, arguments: list[str], variables: Sequence[str]) -> str:
        found = await self._daemon.call(
            lambda client: client.exec_create(
                self.name, arguments, stdin=True, user=made.USER, environment=list(variables), workdir=SCRATCH
            )
        )
        id_: str = found["Id"]
        return id_

    async def _ended(self, id_: str) -> tuple[int | None, bool]:
        """How an exec ended, and whether it was ever started."""
        for _ in range(LOOKS):
            found = await self._daemon.call(lambda client: client.exec_inspect(id_))
            if not found["Running"]:
                return found["ExitCode"], bool(found["Pid"])
            await asyncio.sleep(LOOK_S)
        return None, True

    async def _fate(self) -> SandboxFailure:
        """Why it runs no more, by nothing that a program in it could do."""
        state = await self.state()
        if time.monotonic() >= self._ends_at:
            return sandbox_lost("The sandbox's time of life ended.")
        return sandbox_lost(f"The container ended with {state.exit_code}, and no program in it could end it.")

    async def _processes(self) -> int:
        if self._group is not None:
            with contextlib.suppress(OSError):
                return len(self._group.pids())
        try:
            found = await self._daemon.call(lambda client: client.top(self.name, "-eo pid"))
        except NotRunning:
            return 0
        return len(found["Processes"])

    async def _events(self, kind: str, within_s: float) -> int:
        """How many of a kind there were, from somewhat before the program began."""
        now = int(time.time())
        about = {"container": self.name, "event": kind}
        return await self._daemon.call(
            lambda client: sum(1 for _ in client.events(since=now - int(within_s) - 1, until=now + 1, filters=about))
        )

    def _count(self) -> None:
        self._used = Usage()
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.count()

    def _usage(self) -> Usage:
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._used = self._group.usage()
        return self._used


def environment(variables: Mapping[str, str]) -> list[str]:
    """The variables that a program gets beside those of its image."""
    return [f"{name}={value}" for name, value in {"HOME": SCRATCH, "LANG": "C.UTF-8", **variables}.items()]


def of_shell(code: int) -> int:
    """An exit code of a shell as ``subprocess`` has it."""
    return SHELL_SIGNALS - code if SHELL_SIGNALS < code <= SHELL_SIGNALS + signal.SIGRTMAX else code
