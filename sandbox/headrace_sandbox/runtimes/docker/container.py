"""A container of the daemon, and the programs in it: started by exec, or the only one that it was made for.

* A program's exit status is the daemon's; text never counts, not even the daemon's own among the output.
* A shell waits for a program that was started by exec, and kills its background processes.
* A program that cannot be killed inside ends with its container.
* A container that ended although no program in it could end it is a fault of ours; one that ran out of memory was lost
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
from headrace_sandbox.host.cgroups.cgroup import Cgroup, usage_between
from headrace_sandbox.host.cgroups.detection import foreign_group
from headrace_sandbox.host.layout import SCRATCH
from headrace_sandbox.host.scratch_folder import open_scratch_folder
from headrace_sandbox.host.watch import ProgramOutcome
from headrace_sandbox.result import ExecResult, Isolation, Limits, Output, Usage
from headrace_sandbox.runtimes.docker.container_settings import OWN_PIDS, USER
from headrace_sandbox.runtimes.docker.daemon import READ_BYTES, Daemon, NotRunning, Streams
from headrace_sandbox.runtimes.docker.exec_programs import ExecProgram
from headrace_sandbox.runtimes.docker.stream_watch import StreamOutcome, StreamWatcher, ignore_failure
from headrace_sandbox.runtimes.shared.exec_result import exec_result, sandbox_lost

T = TypeVar("T")

WAIT_BESIDE = 'printf .; unset HOSTNAME; exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; exec "$@")'
"""The shell script around a program: it marks the program's start, and waits for its end."""

WAIT = f"{WAIT_BESIDE}; code=$?; kill -9 -1; exit $code"
"""The same where its user runs nothing else: it also kills the program's background processes."""

OUT_OF_MEMORY = "It used up the memory of its sandbox, which ended."

SHELL_SIGNALS = 128
"""A shell ends with this + n for a program that signal n ended."""

KILLED = SHELL_SIGNALS + signal.SIGKILL

REMOVE_S = 12.0
"""Deadline for a container to be removed. The daemon itself gives up killing after 10 s."""

REMOVALS = 5

SHELL_S = 5.0
"""Deadline for a short script of ours inside."""

POLLS, POLL_S = 10, 0.05
"""Number and interval of the checks for the end of a killed program, which the daemon notices a little late."""

KillCall = Callable[[], Awaitable[None]]


class ContainerProgramOutcome(NamedTuple):
    """The end of a program. ``returncode`` as ``subprocess`` has it; None if it ended with its container, or was killed
    for a limit. ``lost``: the reason that its container cannot be used any more."""

    streams: StreamOutcome
    returncode: int | None
    usage: Usage
    lost: str | None


NOT_STARTED = StreamOutcome(
    started=False, limit=None, kills=0, stdout=Output(), stderr=Output(), wall_s=0.0, work_s=0.0
)


class ContainerState(NamedTuple):
    """The daemon's view of a container."""

    is_running: bool
    is_out_of_memory: bool
    exit_code: int


class DockerContainer:
    """A container. ``config``: its settings. It expires after ``ttl_s``."""

    def __init__(self, daemon: Daemon, config: dict[str, object], ttl_s: float) -> None:
        self._daemon = daemon
        self._config = config
        self._expires_at = time.monotonic() + ttl_s
        self._group: Cgroup | None = None
        self._used = Usage()
        self._init_input: Streams | None = None
        self._open_files = contextlib.ExitStack()
        self._scratch: int | None = None
        self.name = f"headrace-{uuid.uuid4().hex[:16]}"

    async def make(self) -> None:
        """Make it; it does not run yet."""
        create = self._daemon.call(lambda client: client.create_container_from_config(self._config, self.name))
        await not_running_as_failure(create)

    async def start(self) -> None:
        """Start it, to run programs by exec. Its process 1 reads a connection of ours, and ends with it."""
        self._init_input = await self._attach("stream=1&stdin=1")
        await not_running_as_failure(self._start())

    async def kill(self) -> None:
        """End it."""
        self.usage()  # the last chance to count it
        with contextlib.suppress(NotRunning):
            await self._daemon.call(lambda client: client.kill(self.name))

    async def remove(self) -> bool:
        """End and remove it, if it still exists; returns True once it is gone. Raises SandboxFailure
        ``daemon-unreachable``."""
        self._open_files.close()
        self._scratch = None
        if self._init_input is not None:
            self._init_input.end()
        removal = asyncio.ensure_future(self._try_remove())
        done, _ = await asyncio.wait([removal], timeout=REMOVE_S)
        if not done:
            removal.add_done_callback(ignore_failure)
            return False
        return removal.result()

    async def _try_remove(self) -> bool:
        for _ in range(REMOVALS):
            try:
                await self._daemon.call(lambda client: client.remove_container(self.name, v=True, force=True))
            except NotRunning:
                return True  # the daemon is removing it already
            except SandboxFailure as failure:
                if failure.kind == "sandbox-lost":
                    return True
                if failure.kind != "daemon-refused":
                    raise
                await asyncio.sleep(POLL_S)  # it could not be killed, or is about to end
                continue
            return True
        return False

    async def run(
        self, program: ExecProgram, limits: Limits, kills: Sequence[KillCall], *, beside: bool = False
    ) -> ContainerProgramOutcome:
        """Run a program by exec. ``kills``: calls that end it; of two, the first should not end the container.
        ``beside``: its user runs other processes in the container, which must survive the program. Raises
        SandboxFailure."""
        at_first = before = self.usage()

        def on_start() -> None:
            nonlocal before
            before = self.usage()

        try:
            wait = WAIT_BESIDE if beside else WAIT
            id_, streams = await self._exec(["/bin/sh", "-c", wait, "sh", *program.arguments], program.variables)
        except NotRunning:
            return ContainerProgramOutcome(NOT_STARTED, None, Usage(memory_kills=1), await self.why_gone())
        watcher = StreamWatcher(
            streams,
            limits,
            kills,
            lambda: self._usage_since(before).cpu_s,
            self.threads,
            marked=True,
            on_start=on_start,
        )
        outcome = await watcher.run(program.stdin)
        usage = self._usage_since(before)
        code, was_started = await self._exec_status(id_)
        if outcome.limit is not None:
            lost = "It could not be ended inside its sandbox, which was ended with it." if outcome.kills > 1 else None
            return ContainerProgramOutcome(outcome, None, usage, lost)
        if code is None or code == KILLED:
            if not await self.is_alive():
                usage = msgspec.structs.replace(usage, memory_kills=1)
                return ContainerProgramOutcome(outcome, None, usage, await self.why_gone())
            if code is None:
                raise sandbox_lost("The daemon does not report the program's exit status.")
            if self._group is None:
                usage = msgspec.structs.replace(usage, memory_kills=await self._count_events("oom", outcome.wall_s))
        if not was_started:  # then the output is the daemon's own
            usage = self._usage_since(at_first)
            if not usage.memory_kills:
                raise SandboxFailure(
                    f"The daemon could not start the program: {outcome.stdout.text.strip()}.",
                    kind="sandbox-not-made",
                    retryable=True,
                )
            outcome = outcome._replace(stdout=Output(), stderr=Output())
        return ContainerProgramOutcome(outcome, exit_status(code), usage, None)

    async def connect(self, program: ExecProgram) -> Streams:
        """Start a program of ours by exec; returns the connection to it. Raises SandboxFailure, or NotRunning."""
        _, streams = await self._exec(program.arguments, program.variables)
        streams.writer.write(program.stdin)
        return streams

    async def run_only(self, stdin: bytes, limits: Limits) -> ContainerProgramOutcome:
        """Start it, and with it the program that it was made for. Raises SandboxFailure."""
        streams = await self._attach("stream=1&stdin=1&stdout=1&stderr=1")
        try:
            await not_running_as_failure(self._start())
        except BaseException:
            streams.end()
            raise
        before = self.usage()
        watcher = StreamWatcher(
            streams, limits, [self.kill], lambda: self._usage_since(before).cpu_s, self.threads, marked=False
        )
        outcome = await watcher.run(stdin)
        usage = self._usage_since(before)
        state = await self.state()
        for _ in range(POLLS):
            if not state.is_running:
                break
            await asyncio.sleep(POLL_S)
            state = await self.state()
        if state.is_running:
            raise sandbox_lost("The program ended its output, and the daemon does not report its exit status.")
        if state.is_out_of_memory and not usage.memory_kills:
            usage = msgspec.structs.replace(usage, memory_kills=1)
        if outcome.limit is not None:
            return ContainerProgramOutcome(outcome, None, usage, None)
        was_signal = state.exit_code > SHELL_SIGNALS
        if was_signal and not usage.memory_kills and await self._count_events("kill", outcome.wall_s):
            raise self._lost(state)
        return ContainerProgramOutcome(outcome, exit_status(state.exit_code), usage, None)

    async def kill_programs(self) -> None:
        """Kill all processes in it but its own; does not report success."""
        with contextlib.suppress(NotRunning, SandboxFailure):
            await self.succeeds(ExecProgram(["/bin/sh", "-c", "kill -9 -1; exit 0"]))

    async def kill_until_clear(self) -> bool:
        """Kill all processes in it but its own; returns True once they are gone. Raises SandboxFailure."""
        for _ in range(POLLS):
            if await self._count_processes() <= OWN_PIDS:
                return True
            await self.kill_programs()
            await asyncio.sleep(POLL_S)
        return False

    async def is_alive(self) -> bool:
        """True if it goes on after one of its programs was killed. The daemon notices a container's end a little later
        than that of its programs; so it must start another program, or still run after a while."""
        for _ in range(POLLS):
            if not (await self.state()).is_running:
                return False
            with contextlib.suppress(NotRunning):
                if await self.succeeds(ExecProgram(["/bin/sh", "-c", "exit 0"])):
                    return True
            await asyncio.sleep(POLL_S)
        return True

    async def succeeds(self, program: ExecProgram) -> bool:
        """Run a short program of ours; returns True if it ends with 0 in time. Raises SandboxFailure, or NotRunning."""
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
        return (await self._exec_status(id_)) == (0, True)

    async def state(self) -> ContainerState:
        """The present state of the container. Raises SandboxFailure ``sandbox-lost`` if it was removed."""
        reply = (await self._daemon.call(lambda client: client.inspect_container(self.name)))["State"]
        return ContainerState(reply["Running"], reply["OOMKilled"], reply["ExitCode"])

    @property
    def is_disk_full(self) -> bool:
        """True if its scratch folder is full; False where it cannot be opened."""
        return self._scratch is not None and is_full(self._scratch)

    @property
    def is_counted(self) -> bool:
        """True if its control group can be read."""
        return self._group is not None

    async def _attach(self, options: str) -> Streams:
        return await not_running_as_failure(self._daemon.streams(f"/containers/{self.name}/attach?{options}", {}))

    async def _start(self) -> None:
        await self._daemon.call(lambda client: client.start(self.name))
        reply = await self._daemon.call(lambda client: client.inspect_container(self.name))
        pid = reply["State"]["Pid"]
        self._group = foreign_group(pid, reply["Id"])
        if self._group is not None:
            with contextlib.suppress(FileNotFoundError):
                self._scratch = open_scratch_folder(pid, self._open_files)

    async def _exec(self, arguments: Sequence[str], variables: Sequence[str]) -> tuple[str, Streams]:
        try:
            reply = await self._daemon.call(
                lambda client: client.exec_create(
                    self.name, list(arguments), stdin=True, user=USER, environment=list(variables), workdir=SCRATCH
                )
            )
            id_: str = reply["Id"]
            return id_, await self._daemon.streams(f"/exec/{id_}/start", {"Detach": False, "Tty": False})
        except SandboxFailure as failure:
            # The daemon notices a container's end a little late, and until then reports another error.
            if failure.kind == "daemon-refused" and await self._ends_soon():
                raise NotRunning(failure.detail) from failure
            raise

    async def _ends_soon(self) -> bool:
        """True if it has ended, or ends in a moment."""
        for _ in range(POLLS):
            if not (await self.state()).is_running:
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _exec_status(self, id_: str) -> tuple[int | None, bool]:
        """The exit code of an exec, and True if it was ever started."""
        for _ in range(POLLS):
            reply = await self._daemon.call(lambda client: client.exec_inspect(id_))
            if not reply["Running"]:
                # Podman forgets the process at its end, and answers with an error where it could start none.
                return reply["ExitCode"], bool(reply["Pid"]) or self._daemon.is_podman
            await asyncio.sleep(POLL_S)
        return None, True

    async def why_gone(self) -> str:
        """The reason of its end, if its programs brought that about. Raises SandboxFailure ``sandbox-lost`` if they
        could not."""
        state = await self.state()
        if state.is_out_of_memory:
            return OUT_OF_MEMORY
        raise self._lost(state)

    def _lost(self, state: ContainerState) -> SandboxFailure:
        if time.monotonic() >= self._expires_at:
            return sandbox_lost("The sandbox expired.")
        return sandbox_lost(f"The container ended with {state.exit_code}, and no program in it could end it.")

    async def _count_processes(self) -> int:
        if self._group is not None:
            with contextlib.suppress(OSError):
                return len(self._group.pids())
        try:
            reply = await self._daemon.call(lambda client: client.top(self.name, "-eo pid"))
        except NotRunning:
            return 0
        return len(reply["Processes"])

    async def _count_events(self, kind: str, within_s: float) -> int:
        """The number of events of a kind since shortly before the program's start."""
        now = int(time.time())
        filters = {"container": self.name, "event": kind}
        return await self._daemon.call(
            lambda client: sum(1 for _ in client.events(since=now - int(within_s) - 1, until=now + 1, filters=filters))
        )

    def usage(self) -> Usage:
        """The usage of all its programs so far."""
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._used = self._group.usage()
        return self._used

    def threads(self) -> list[int]:
        """The threads in it; none where its group cannot be read."""
        return [] if self._group is None else self._group.threads()

    def _usage_since(self, before: Usage) -> Usage:
        return usage_between(before, self.usage()) if self._group is not None else Usage()


async def not_running_as_failure(work: Awaitable[T]) -> T:
    """Await a call that makes or starts a container. Raises SandboxFailure ``sandbox-not-made`` if it does not run."""
    try:
        return await work
    except NotRunning as error:
        raise SandboxFailure(
            f"The container could not be made: {error}.", kind="sandbox-not-made", retryable=True
        ) from error


def exit_status(code: int) -> int:
    """A shell's exit code as ``subprocess`` has it."""
    return SHELL_SIGNALS - code if SHELL_SIGNALS < code <= SHELL_SIGNALS + signal.SIGRTMAX else code


def container_result(
    container: DockerContainer, outcome: ContainerProgramOutcome, called_at: float, isolation: Isolation
) -> ExecResult:
    """The result of a program that ended. Raises SandboxFailure ``sandbox-lost``."""
    streams = outcome.streams
    if container.is_counted:
        isolation = msgspec.structs.replace(isolation, active=[*isolation.active, "cpu_s"])
    start_s = max(0.0, time.monotonic() - called_at - streams.wall_s)
    usage = outcome.usage
    if outcome.returncode != 0:
        usage = msgspec.structs.replace(usage, disk_full=container.is_disk_full)
    program = ProgramOutcome(
        outcome.returncode, streams.limit, streams.stdout, streams.stderr, streams.wall_s, streams.work_s
    )
    return msgspec.structs.replace(exec_result(program, usage, start_s, isolation), lost=outcome.lost)


def container_unkillable() -> SandboxFailure:
    """The failure of a container that does not end."""
    return SandboxFailure(
        "The sandbox could not be ended.",
        hint="A process in it is blocked in the kernel by a disk or a network file system, or the daemon is very busy.",
        kind="unkillable",
        retryable=True,
    )
