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
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.guest.isolation import is_full
from headrace_sandbox.host.bwrap import SCRATCH
from headrace_sandbox.host.cgroups import Cgroup, group_of, since
from headrace_sandbox.host.scratch import scratch_of
from headrace_sandbox.host.watch import Verdict
from headrace_sandbox.result import ExecResult, Isolation, Limits, Output, Usage
from headrace_sandbox.runtimes.docker import container as made
from headrace_sandbox.runtimes.docker.daemon import READ_BYTES, Daemon, NotRunning, Streams
from headrace_sandbox.runtimes.docker.watch import Seen, Watch, dropped
from headrace_sandbox.runtimes.shared.outcome import result_of, sandbox_lost

T = TypeVar("T")

WAIT_BESIDE = 'printf .; unset HOSTNAME; exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; exec "$@")'
"""What a shell does in a container: tells that the program starts, and waits for it."""

WAIT = f"{WAIT_BESIDE}; code=$?; kill -9 -1; exit $code"
"""The same where nothing else of its user runs: it kills what the program left behind."""

OUT_OF_MEMORY = "It used up the memory of its sandbox, which ended."

SHELL_SIGNALS = 128
"""A shell ends with this and n more for a program that signal n ended."""

KILLED = SHELL_SIGNALS + signal.SIGKILL

REMOVE_S = 12.0
"""For a container to be gone. The daemon gives up killing after 10 s."""

REMOVALS = 5

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


NOT_SEEN = Seen(started=False, limit=None, kills=0, stdout=Output(), stderr=Output(), wall_s=0.0)

Kill = Callable[[], Awaitable[None]]


class Brought(NamedTuple):
    """A program that is brought into a container. ``variables`` as NAME=VALUE, beside those of its image."""

    arguments: Sequence[str]
    stdin: bytes = b""
    variables: Sequence[str] = ()


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
        self._leash: Streams | None = None
        self._held = contextlib.ExitStack()
        self._scratch: int | None = None
        self.name = f"headrace-{uuid.uuid4().hex[:16]}"

    async def make(self) -> None:
        """Make it; it does not run yet."""
        await not_made(self._daemon.call(lambda client: client.create_container_from_config(self._config, self.name)))

    async def start(self) -> None:
        """Start it, to take programs by exec. It holds on to a connection of ours, and ends when that does."""
        self._leash = await self._attached("stream=1&stdin=1")
        await not_made(self._started())

    async def kill(self) -> None:
        """End it."""
        self.usage()  # of a container that is gone nothing is counted any more
        with contextlib.suppress(NotRunning):
            await self._daemon.call(lambda client: client.kill(self.name))

    async def remove(self) -> bool:
        """End and remove it, if it is still there; whether it is gone. Raises SandboxFailure ``daemon-unreachable``."""
        self._held.close()
        self._scratch = None
        if self._leash is not None:
            self._leash.end()
        removing = asyncio.ensure_future(self._removed())
        done, _ = await asyncio.wait([removing], timeout=REMOVE_S)
        if not done:
            removing.add_done_callback(dropped)
            return False
        return removing.result()

    async def _removed(self) -> bool:
        for _ in range(REMOVALS):
            try:
                await self._daemon.call(lambda client: client.remove_container(self.name, v=True, force=True))
            except NotRunning:
                return True  # it is being removed
            except SandboxFailure as failure:
                if failure.kind == "sandbox-lost":
                    return True
                if failure.kind != "daemon-refused":
                    raise
                await asyncio.sleep(LOOK_S)  # it could not be killed, or is about to end
                continue
            return True
        return False

    async def run(self, program: Brought, limits: Limits, kills: Sequence[Kill], *, beside: bool = False) -> Ended:
        """Run a program by exec. ``kills``: ways to end it, of which the first should leave the container alone where
        there are two. ``beside``: something else of this user runs in it, and is not to be killed with what the
        program leaves. Raises SandboxFailure."""
        at_first = before = self.usage()

        def begun() -> None:
            nonlocal before
            before = self.usage()

        try:
            wait = WAIT_BESIDE if beside else WAIT
            id_, streams = await self._exec(["/bin/sh", "-c", wait, "sh", *program.arguments], program.variables)
        except NotRunning:
            return Ended(NOT_SEEN, None, Usage(memory_kills=1), await self.why_gone())
        watch = Watch(streams, limits, kills, lambda: self._since(before).cpu_s, marked=True, begun=begun)
        seen = await watch.run(program.stdin)
        usage = self._since(before)
        code, was_started = await self._ended(id_)
        if seen.limit is not None:
            lost = "It could not be ended inside its sandbox, which was ended with it." if seen.kills > 1 else None
            return Ended(seen, None, usage, lost)
        if code is None or code == KILLED:
            if not await self.is_alive():
                usage = msgspec.structs.replace(usage, memory_kills=1)
                return Ended(seen, None, usage, await self.why_gone())
            if code is None:
                raise sandbox_lost("The daemon does not say how the program ended.")
            if self._group is None:
                usage = msgspec.structs.replace(usage, memory_kills=await self._events("oom", seen.wall_s))
        if not was_started:  # what was heard is the daemon's own
            usage = self._since(at_first)
            if not usage.memory_kills:
                raise SandboxFailure(
                    f"The daemon could not start the program: {seen.stdout.text.strip()}.",
                    kind="sandbox-not-made",
                    retryable=True,
                )
            seen = seen._replace(stdout=Output(), stderr=Output())
        return Ended(seen, of_shell(code), usage, None)

    async def talk(self, program: Brought) -> Streams:
        """Start a program of ours by exec, to talk to. Raises SandboxFailure, or NotRunning."""
        _, streams = await self._exec(program.arguments, program.variables)
        streams.writer.write(program.stdin)
        return streams

    async def run_only(self, stdin: bytes, limits: Limits) -> Ended:
        """Start it, and with it the program that it was made for. Raises SandboxFailure."""
        streams = await self._attached("stream=1&stdin=1&stdout=1&stderr=1")
        try:
            await not_made(self._started())
        except BaseException:
            streams.end()
            raise
        before = self.usage()
        watch = Watch(streams, limits, [self.kill], lambda: self._since(before).cpu_s, marked=False)
        seen = await watch.run(stdin)
        usage = self._since(before)
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
            raise self._lost(state)
        return Ended(seen, of_shell(state.exit_code), usage, None)

    async def kill_programs(self) -> None:
        """Kill all that runs in it but its keepers; no word on whether that worked."""
        with contextlib.suppress(NotRunning, SandboxFailure):
            await self.does(Brought(["/bin/sh", "-c", "kill -9 -1; exit 0"]))

    async def is_clear(self) -> bool:
        """Whether nothing runs in it but its keepers; what does is killed. Raises SandboxFailure."""
        for _ in range(LOOKS):
            if await self._processes() <= made.KEEPER_PIDS:
                return True
            await self.kill_programs()
            await asyncio.sleep(LOOK_S)
        return False

    async def is_alive(self) -> bool:
        """Whether it goes on after a program of it was killed. The daemon learns of a container's end a little later
        than of that of its programs; so it must take another one, or still run after a while."""
        for _ in range(LOOKS):
            if not (await self.state()).is_running:
                return False
            with contextlib.suppress(NotRunning):
                if await self.does(Brought(["/bin/sh", "-c", "exit 0"])):
                    return True
            await asyncio.sleep(LOOK_S)
        return True

    async def does(self, program: Brought) -> bool:
        """Whether a short program of ours ran in it, and ended with 0 in good time. Raises SandboxFailure, or
        NotRunning."""
        id_, streams = await self._exec(program.arguments, program.variables)
        try:
            async with timeout(SHELL_S):
                streams.writer.write(program.stdin)
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

    @property
    def is_disk_full(self) -> bool:
        """Whether its scratch folder is full, as far as it can be seen from here."""
        return self._scratch is not None and is_full(self._scratch)

    @property
    def is_counted(self) -> bool:
        """Whether what is used can be seen from here."""
        return self._group is not None

    async def _attached(self, which: str) -> Streams:
        return await not_made(self._daemon.streams(f"/containers/{self.name}/attach?{which}", {}))

    async def _started(self) -> None:
        await self._daemon.call(lambda client: client.start(self.name))
        found = await self._daemon.call(lambda client: client.inspect_container(self.name))
        pid = found["State"]["Pid"]
        self._group = group_of(pid, found["Id"])
        if self._group is not None:
            with contextlib.suppress(FileNotFoundError):
                self._scratch = scratch_of(pid, self._held)

    async def _exec(self, arguments: Sequence[str], variables: Sequence[str]) -> tuple[str, Streams]:
        try:
            found = await self._daemon.call(
                lambda client: client.exec_create(
                    self.name, list(arguments), stdin=True, user=made.USER, environment=list(variables), workdir=SCRATCH
                )
            )
            id_: str = found["Id"]
            return id_, await self._daemon.streams(f"/exec/{id_}/start", {"Detach": False, "Tty": False})
        except SandboxFailure as failure:
            # The daemon learns of a container's end a little late, and until then has another word for it.
            if failure.kind == "daemon-refused" and await self._ends():
                raise NotRunning(failure.detail) from failure
            raise

    async def _ends(self) -> bool:
        """Whether it runs no more, or will not in a moment."""
        for _ in range(LOOKS):
            if not (await self.state()).is_running:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    async def _ended(self, id_: str) -> tuple[int | None, bool]:
        """How an exec ended, and whether it was ever started."""
        for _ in range(LOOKS):
            found = await self._daemon.call(lambda client: client.exec_inspect(id_))
            if not found["Running"]:
                # Podman forgets the process at its end, and answers with an error where it could start none.
                return found["ExitCode"], bool(found["Pid"]) or self._daemon.is_podman
            await asyncio.sleep(LOOK_S)
        return None, True

    async def why_gone(self) -> str:
        """Why it runs no more, where its programs brought that about. Raises SandboxFailure ``sandbox-lost`` where
        they could not."""
        state = await self.state()
        if state.is_out_of_memory:
            return OUT_OF_MEMORY
        raise self._lost(state)

    def _lost(self, state: State) -> SandboxFailure:
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

    def usage(self) -> Usage:
        """What all that ran in it used so far."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._used = self._group.usage()
        return self._used

    def _since(self, before: Usage) -> Usage:
        return since(before, self.usage()) if self._group is not None else Usage()


async def not_made(work: Awaitable[T]) -> T:
    """Do what makes a container. Raises SandboxFailure ``sandbox-not-made`` where the daemon says that it does not
    run."""
    try:
        return await work
    except NotRunning as error:
        raise SandboxFailure(
            f"The container could not be made: {error}.", kind="sandbox-not-made", retryable=True
        ) from error


def of_shell(code: int) -> int:
    """An exit code of a shell as ``subprocess`` has it."""
    return SHELL_SIGNALS - code if SHELL_SIGNALS < code <= SHELL_SIGNALS + signal.SIGRTMAX else code


def told(container: Container, ended: Ended, begun_at: float, isolation: Isolation) -> ExecResult:
    """The result of a program that ended. Raises SandboxFailure ``sandbox-lost``."""
    seen = ended.seen
    if container.is_counted:
        isolation = msgspec.structs.replace(isolation, active=[*isolation.active, "cpu_s"])
    start_s = max(0.0, time.monotonic() - begun_at - seen.wall_s)
    usage = ended.usage
    if ended.returncode != 0:
        usage = msgspec.structs.replace(usage, disk_full=container.is_disk_full)
    verdict = Verdict(ended.returncode, seen.limit, seen.stdout, seen.stderr, seen.wall_s)
    return msgspec.structs.replace(result_of(verdict, usage, start_s, isolation), lost=ended.lost)


def unkillable() -> SandboxFailure:
    """The failure of a container that does not end."""
    return SandboxFailure(
        "The sandbox could not be ended.",
        hint="Something in it waits in the kernel for a disk or a network file system, or the daemon is very busy.",
        kind="unkillable",
        retryable=True,
    )
