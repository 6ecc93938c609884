"""Runs as process 1 of a gVisor sandbox: starts programs on request, and carries their input and output.

* Each program, and each session, has a namespace of process ids of its own; when its first process ends, or is killed,
  all that was started there ends with it.
* It runs as a user without privileges. This process and the first one of each namespace are root of the sandbox, which
  is nobody on the machine, and out of its reach.
* How a program ended is told by the first process of its namespace, over a pipe that the program does not have.
* One waits in a namespace that was made before it was asked for, bounded already, so that a program does not wait for
  that.
* It ends with its standard input, so that no sandbox outlives its supervisor, and after the time that it is given.

Frames go both ways, over standard input and output: kind, number of the program, length, content. Content of START is
JSON: ``do`` (command, files, session), and what each needs.
"""

import contextlib
import gc
import json
import math
import os
import select
import signal
import struct
import sys
from typing import Any, NamedTuple

from headrace_sandbox.guest import files, session_host
from headrace_sandbox.guest.isolation import (
    CLONE_NEWNS,
    CLONE_NEWPID,
    MS_NODEV,
    MS_NOSUID,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    default_signals,
    give_up_privileges,
    is_full,
    libc,
    limit,
    make_mounts_private,
    mount_proc,
    must,
    prctl,
)

HEADER = struct.Struct(">BII")
START, INPUT, KILL = 1, 2, 3
READY, STARTED, STDOUT, STDERR, TOOK, ENDED, FAILED = 1, 2, 3, 4, 5, 6, 7
END = struct.Struct(">iI?")  # wait status, or -1 if unknown; if it failed, threads left and whether scratch was full

MNT_DETACH = 2
LONGEST_S = 1e9  # that a timer takes, and more than any machine runs
MOST_FILES = 1024  # of this process
READ_BYTES = 64 << 10
MOST_LEFT_BYTES = 1 << 20  # of a pipe
USER = 1000
SCRATCH, SHARED_MEMORY, SESSION = "/scratch", "/dev/shm", "/dev/session"
SESSION_BYTES = 4 << 20  # for the text of a cell, and two pipes
TOLD, ASKED = 3, 4  # descriptors: where the first process of a namespace tells, and the request is read


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def send(kind: int, number: int, content: bytes = b"") -> None:
    write_all(1, HEADER.pack(kind, number, len(content)) + content)


class Program:
    """One that runs, or waits for ``asks``, the request. ``first``: the first process of its namespace, which tells on
    ``told``; ``outputs``: the kind of frame by descriptor; ``waiting``: input that it has not taken yet."""

    def __init__(self, first: int, asks: int, stdin: int, told: int, outputs: dict[int, int]) -> None:
        self.number = 0
        self.first = first
        self.asks = asks
        self.stdin = stdin
        self.told = told
        self.outputs = outputs
        self.waiting = b""
        self.report = b""


class GuestBounds(NamedTuple):
    """Bounds shared by all programs."""

    filter: bytes
    cpus: float
    rlimits: dict[str, int]


class GuestServer:
    def __init__(self, bounds: GuestBounds) -> None:
        self.bounds = bounds
        self.programs: dict[int, Program] = {}
        self.by_descriptor: dict[int, Program] = {}
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN)
        self.received = b""
        self.spare: Program | None = None

    def serve(self) -> None:
        send(READY, 0)
        self.spare = self.make(None)
        while True:
            for descriptor, _events in self.poll.poll():
                if descriptor == 0:
                    if not self.receive():
                        return
                elif descriptor in self.by_descriptor:
                    self.move(descriptor, self.by_descriptor[descriptor])

    def receive(self) -> bool:
        data = os.read(0, READ_BYTES)
        self.received += data
        while len(self.received) >= HEADER.size:
            kind, number, length = HEADER.unpack_from(self.received)
            pieces = [self.received[HEADER.size :]]
            missing = length - len(pieces[0])
            while missing > 0:
                if not (piece := os.read(0, 16 * READ_BYTES)):
                    return False
                pieces.append(piece)
                missing -= len(piece)
            joined = b"".join(pieces)
            self.received = joined[length:]
            self.handle(kind, number, joined[:length])
        return bool(data)

    def handle(self, kind: int, number: int, content: bytes) -> None:
        if kind == START:
            self.start(number, content)
        elif number in self.programs:
            program = self.programs[number]
            if kind == KILL:
                os.kill(program.first, signal.SIGKILL)
            elif kind == INPUT:
                self.feed(program, content)

    def start(self, number: int, content: bytes) -> None:
        request = json.loads(content)
        if request["do"] == "session":
            program = self.make(request)
        else:
            program, self.spare = self.spare or self.make(None), None
        program.number = number
        self.programs[number] = program
        for descriptor in (program.told, *program.outputs):
            self.by_descriptor[descriptor] = program
            self.poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):  # it is gone, and will be found so
            write_all(program.asks, content)
        os.close(program.asks)

    def make(self, session_request: dict[str, Any] | None) -> Program:
        """A namespace with its first process, which hosts a session; or it has a program, which waits for a request."""
        asked, asks = os.pipe()
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        our_stderr, stderr = os.pipe()
        our_told, told = os.pipe()
        must(libc.unshare(CLONE_NEWPID), "unshare")
        first = os.fork()
        if first == 0:
            try:
                keep_only(stdin, stdout, stderr, told, asked)
                NamespaceInit(self.bounds).be(session_request)
            except BaseException:  # noqa: BLE001 - shown, and the end of this process
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        for descriptor in (stdin, stdout, stderr, told, asked):
            os.close(descriptor)
        os.set_blocking(our_stdin, False)
        return Program(first, asks, our_stdin, our_told, {our_stdout: STDOUT, our_stderr: STDERR})

    def move(self, descriptor: int, program: Program) -> None:
        """Something can be done with a descriptor of a program."""
        if descriptor == program.stdin:
            self.feed(program, b"")
            return
        data = os.read(descriptor, READ_BYTES)
        if descriptor == program.told:
            self.hear(program, data)
        elif data:
            send(program.outputs[descriptor], program.number, data)
        else:
            self.forget(descriptor)

    def feed(self, program: Program, content: bytes) -> None:
        """More input, or room for what waits. The supervisor sends the next only when this is taken; empty is its
        end."""
        if program.stdin < 0:
            return
        if not content and not program.waiting:
            self.close_input(program)
            return
        program.waiting += content
        try:
            program.waiting = program.waiting[os.write(program.stdin, program.waiting) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.close_input(program)
            return
        if program.waiting:
            self.by_descriptor[program.stdin] = program
            self.poll.register(program.stdin, select.POLLOUT)
        else:
            if self.by_descriptor.pop(program.stdin, None):
                self.poll.unregister(program.stdin)
            send(TOOK, program.number)

    def close_input(self, program: Program) -> None:
        if program.stdin >= 0:
            if self.by_descriptor.pop(program.stdin, None):
                self.poll.unregister(program.stdin)
            os.close(program.stdin)
            program.stdin, program.waiting = -1, b""

    def hear(self, program: Program, data: bytes) -> None:
        """Read a report of a namespace's first process: that its program starts, or how it ended."""
        if not program.report and data[:1] == b"s":
            send(STARTED, program.number)
        program.report += data
        if data:
            return
        self.forget(program.told)
        os.waitpid(program.first, 0)  # and everything in its namespace is gone
        for descriptor in program.outputs:
            self.drain(descriptor, program)
        self.close_input(program)
        del self.programs[program.number]
        if program.report[:1] == b"s":
            send(ENDED, program.number, program.report[1:] or END.pack(-1, 0, False))
        else:
            send(FAILED, program.number)
        if self.spare is None:
            self.spare = self.make(None)

    def drain(self, descriptor: int, program: Program) -> None:
        """Read what a program left in a pipe. Only processes that got the descriptor from it may still write there."""
        if descriptor not in self.by_descriptor:
            return
        os.set_blocking(descriptor, False)
        left = MOST_LEFT_BYTES
        try:
            while left > 0 and (data := os.read(descriptor, READ_BYTES)):
                left -= len(data)
                send(program.outputs[descriptor], program.number, data)
        except BlockingIOError:
            pass
        self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        del self.by_descriptor[descriptor]
        self.poll.unregister(descriptor)
        os.close(descriptor)


class NamespaceInit:
    """The first process of a namespace. It is root, so no program can signal it, write into it, or tell in its place;
    that of a session acts as the programs' user, for the session's files are theirs too."""

    def __init__(self, bounds: GuestBounds) -> None:
        self.bounds = bounds
        self.request: dict[str, Any] = {}

    def be(self, session_request: dict[str, Any] | None) -> None:
        prctl(PR_SET_DUMPABLE, 0)
        must(libc.unshare(CLONE_NEWNS), "unshare")
        make_mounts_private()
        mount_proc()
        os.chdir(SCRATCH)
        os.umask(0o022)
        os.setgroups([])
        if session_request is not None:
            self.request = session_request
            self.host_session()
            os._exit(0)
        program = os.fork()
        if program == 0:
            status = 126
            try:
                status = self.be_program()
            except BaseException:  # noqa: BLE001 - shown, and the end of this process
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        for descriptor in (0, 1, 2, ASKED):
            os.close(descriptor)
        while True:
            pid, status = os.wait()
            if pid == program:
                failed = status != 0
                os.write(TOLD, END.pack(status, threads_left() if failed else 0, failed and is_full(SCRATCH)))
                os._exit(0)

    def be_program(self) -> int:
        """A command, or what is done with files by the same rights. Waits for the request; gives the exit code if it is
        not another program by then."""
        os.setsid()
        self.become_user()
        self.be_bounded()
        with os.fdopen(ASKED, "rb") as asked:
            self.request = json.load(asked)
        os.write(TOLD, b"s")
        os.close(TOLD)
        if self.request["do"] == "files":
            return files.run(self.request)
        default_signals()
        arguments = self.request["arguments"]
        try:
            os.execvpe(arguments[0], arguments, self.request["environment"])
        except OSError as error:
            os.write(2, f"{arguments[0]}: {error.strerror}\n".encode(errors="replace"))
            return 127 if isinstance(error, FileNotFoundError) else 126

    def host_session(self) -> None:
        channel, output = os.dup(0), os.dup(1)
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        mount_memory(SESSION, SESSION_BYTES)
        os.setegid(USER)
        os.seteuid(USER)
        os.write(TOLD, b"s")
        session_host.Host(self.request, channel, SESSION, self.become_program, output).serve()

    def become_program(self) -> None:
        """Give up privileges, in a process that will be the program of a session."""
        os.seteuid(0)
        self.become_user()
        self.be_bounded()

    def become_user(self) -> None:
        """Become the programs' user, irreversibly."""
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        prctl(PR_SET_DUMPABLE, 1)

    def be_bounded(self) -> None:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, processors[: math.ceil(self.bounds.cpus)])
        limit(self.bounds.rlimits)
        give_up_privileges(self.bounds.filter)


def keep_only(*descriptors: int) -> None:
    """Make these descriptors 0, 1, 2 and so on, and close all others."""
    for target, descriptor in enumerate([os.dup(descriptor) for descriptor in descriptors]):
        os.dup2(descriptor, target)
    os.closerange(len(descriptors), MOST_FILES)
    for descriptor in (TOLD, ASKED):
        os.set_inheritable(descriptor, False)


def drop_bounds() -> None:
    """No program that is started from here on can have a capability, whatever it is."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            return


def threads_left() -> int:
    """The number of other threads in this namespace."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def mount_memory(folder: str, size_bytes: int) -> None:
    """A folder of the programs' user, in bounded memory; gVisor cannot bound how many files there are."""
    options = f"size={size_bytes},mode=0700,uid={USER},gid={USER}".encode()
    must(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), f"mount {folder}")


def prepare_files(disk_bytes: int) -> None:
    """The folders that programs may write to. An old runsc fails here: it cannot list a folder on a newer kernel."""
    if "usr" not in os.listdir("/"):
        raise OSError("the root has no files")
    for folder in ("/tmp", "/sys"):  # gVisor's own: the first has no bound, and is a link to the scratch folder
        libc.umount2(folder.encode(), MNT_DETACH)
    for folder in (SCRATCH, SHARED_MEMORY):
        if not os.path.isdir(folder):  # in an image
            os.mkdir(folder)
        mount_memory(folder, disk_bytes)
    os.mkdir(SESSION)


def main() -> None:
    options = json.loads(sys.argv[1])
    # Its signal ends this process, and all that runs here.
    signal.setitimer(signal.ITIMER_REAL, min(options["ttl_s"], LONGEST_S))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prepare_files(options["disk_bytes"])
    drop_bounds()
    gc.collect()
    gc.freeze()  # so that a child's collector does not copy the pages of what is shared
    GuestServer(GuestBounds(bytes.fromhex(options["filter"]), options["cpus"], options["rlimits"])).serve()
