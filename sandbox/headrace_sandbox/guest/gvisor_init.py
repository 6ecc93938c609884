"""Runs as process 1 of a gVisor sandbox: starts programs on request, and forwards their input and output.

* Each program and each session has its own namespace of process ids; when its first process ends, everything that was
  started there ends with it.
* A program runs as a user without privileges. This process and the first one of each namespace are root in the sandbox,
  which has no rights on the machine; programs cannot reach them.
* A program's end is reported by the first process of its namespace, over a pipe that the program does not have.
* One process waits in a prepared namespace, already bounded, so that the next program need not wait for that.
* The sandbox ends with its standard input, so that it does not outlive its supervisor, and at its expiry.

Frames go both ways, over standard input and output: kind, number of the program, length, content. The content of START
is JSON: ``do`` (command, files, session), and its arguments.
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
    PR_SET_DUMPABLE,
    check_call,
    drop_capability_bounds,
    drop_privileges,
    is_full,
    libc,
    make_mounts_private,
    mount_proc,
    prctl,
    restore_signals,
    set_rlimits,
)

HEADER = struct.Struct(">BII")
START, INPUT, KILL = 1, 2, 3
READY, STARTED, STDOUT, STDERR, INPUT_TAKEN, ENDED, FAILED = 1, 2, 3, 4, 5, 6, 7
END = struct.Struct(">iI?")  # wait status, -1 if unknown; after a failure: other threads, and if scratch was full

MNT_DETACH = 2
LONGEST_S = 1e9  # a timer accepts it, and it exceeds any machine's uptime
MOST_FILES = 1024  # descriptors of this process
READ_BYTES = 64 << 10
MOST_DRAINED_BYTES = 1 << 20  # read from a pipe after a program's end
USER = 1000
SCRATCH, SHARED_MEMORY, SESSION = "/scratch", "/dev/shm", "/dev/session"
SESSION_BYTES = 4 << 20  # for the text of a cell, and two pipes
REPORT, REQUEST = 3, 4  # descriptors in a namespace: reports of its first process, and the request


def send(kind: int, number: int, content: bytes = b"") -> None:
    files.write_all(1, HEADER.pack(kind, number, len(content)) + content)


class Program:
    """A program that runs, or waits for its request on ``request_pipe``. ``init_pid``: the first process of its
    namespace, which reports on ``report_pipe``; ``outputs``: the kind of frame by descriptor; ``pending_input``: input
    that it has not read yet."""

    def __init__(self, init_pid: int, request_pipe: int, stdin: int, report_pipe: int, outputs: dict[int, int]) -> None:
        self.number = 0
        self.init_pid = init_pid
        self.request_pipe = request_pipe
        self.stdin = stdin
        self.report_pipe = report_pipe
        self.outputs = outputs
        self.pending_input = b""
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
        self.spare = self.make_namespace(None)
        while True:
            for descriptor, _events in self.poll.poll():
                if descriptor == 0:
                    if not self.receive():
                        return
                elif descriptor in self.by_descriptor:
                    self.handle_event(descriptor, self.by_descriptor[descriptor])

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
                os.kill(program.init_pid, signal.SIGKILL)
            elif kind == INPUT:
                self.write_input(program, content)

    def start(self, number: int, content: bytes) -> None:
        request = json.loads(content)
        if request["do"] == "session":
            program = self.make_namespace(request)
        else:
            program, self.spare = self.spare or self.make_namespace(None), None
        program.number = number
        self.programs[number] = program
        for descriptor in (program.report_pipe, *program.outputs):
            self.by_descriptor[descriptor] = program
            self.poll.register(descriptor, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the report shows
            files.write_all(program.request_pipe, content)
        os.close(program.request_pipe)

    def make_namespace(self, session_request: dict[str, Any] | None) -> Program:
        """Make a namespace with its first process, which hosts a session, or has a program that waits for a request."""
        request_end, request_pipe = os.pipe()
        stdin, our_stdin = os.pipe()
        our_stdout, stdout = os.pipe()
        our_stderr, stderr = os.pipe()
        our_report, report_pipe = os.pipe()
        check_call(libc.unshare(CLONE_NEWPID), "unshare")
        init_pid = os.fork()
        if init_pid == 0:
            try:
                keep_only(stdin, stdout, stderr, report_pipe, request_end)
                NamespaceInit(self.bounds).run(session_request)
            except BaseException:  # noqa: BLE001 - printed before this process ends
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        for descriptor in (stdin, stdout, stderr, report_pipe, request_end):
            os.close(descriptor)
        os.set_blocking(our_stdin, False)
        return Program(init_pid, request_pipe, our_stdin, our_report, {our_stdout: STDOUT, our_stderr: STDERR})

    def handle_event(self, descriptor: int, program: Program) -> None:
        """Handle a program's descriptor that can be read or written."""
        if descriptor == program.stdin:
            self.write_input(program, b"")
            return
        data = os.read(descriptor, READ_BYTES)
        if descriptor == program.report_pipe:
            self.read_report(program, data)
        elif data:
            send(program.outputs[descriptor], program.number, data)
        else:
            self.close_descriptor(descriptor)

    def write_input(self, program: Program, content: bytes) -> None:
        """Write input to a program, as far as it has room. The supervisor sends more once this is written; empty
        content is the end."""
        if program.stdin < 0:
            return
        if not content and not program.pending_input:
            self.close_input(program)
            return
        program.pending_input += content
        try:
            program.pending_input = program.pending_input[os.write(program.stdin, program.pending_input) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.close_input(program)
            return
        if program.pending_input:
            self.by_descriptor[program.stdin] = program
            self.poll.register(program.stdin, select.POLLOUT)
        else:
            if self.by_descriptor.pop(program.stdin, None):
                self.poll.unregister(program.stdin)
            send(INPUT_TAKEN, program.number)

    def close_input(self, program: Program) -> None:
        if program.stdin >= 0:
            if self.by_descriptor.pop(program.stdin, None):
                self.poll.unregister(program.stdin)
            os.close(program.stdin)
            program.stdin, program.pending_input = -1, b""

    def read_report(self, program: Program, data: bytes) -> None:
        """Read a report of a namespace's first process: the start or the end of its program."""
        if not program.report and data[:1] == b"s":
            send(STARTED, program.number)
        program.report += data
        if data:
            return
        self.close_descriptor(program.report_pipe)
        os.waitpid(program.init_pid, 0)  # everything in its namespace has ended too
        for descriptor in program.outputs:
            self.drain(descriptor, program)
        self.close_input(program)
        del self.programs[program.number]
        if program.report[:1] == b"s":
            send(ENDED, program.number, program.report[1:] or END.pack(-1, 0, False))
        else:
            send(FAILED, program.number)
        if self.spare is None:
            self.spare = self.make_namespace(None)

    def drain(self, descriptor: int, program: Program) -> None:
        """Forward the rest of a program's output. Only processes that received the descriptor from it may still
        write."""
        if descriptor not in self.by_descriptor:
            return
        os.set_blocking(descriptor, False)
        remaining = MOST_DRAINED_BYTES
        try:
            while remaining > 0 and (data := os.read(descriptor, READ_BYTES)):
                remaining -= len(data)
                send(program.outputs[descriptor], program.number, data)
        except BlockingIOError:
            pass
        self.close_descriptor(descriptor)

    def close_descriptor(self, descriptor: int) -> None:
        del self.by_descriptor[descriptor]
        self.poll.unregister(descriptor)
        os.close(descriptor)


class NamespaceInit:
    """The first process of a namespace. It is root, so programs cannot signal it, write into it, or report in its
    place; that of a session acts as the programs' user, who owns the session's files too."""

    def __init__(self, bounds: GuestBounds) -> None:
        self.bounds = bounds
        self.request: dict[str, Any] = {}

    def run(self, session_request: dict[str, Any] | None) -> None:
        prctl(PR_SET_DUMPABLE, 0)
        check_call(libc.unshare(CLONE_NEWNS), "unshare")
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
                status = self.run_program()
            except BaseException:  # noqa: BLE001 - printed before this process ends
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)
        for descriptor in (0, 1, 2, REQUEST):
            os.close(descriptor)
        while True:
            pid, status = os.wait()
            if pid == program:
                failed = status != 0
                os.write(REPORT, END.pack(status, count_other_threads() if failed else 0, failed and is_full(SCRATCH)))
                os._exit(0)

    def run_program(self) -> int:
        """Wait for the request, and run a command, or a file operation with the same rights. Returns the exit code
        unless a command replaced this process."""
        os.setsid()
        self.become_user()
        self.set_limits()
        with os.fdopen(REQUEST, "rb") as request_end:
            self.request = json.load(request_end)
        os.write(REPORT, b"s")
        os.close(REPORT)
        if self.request["do"] == "files":
            return files.run(self.request)
        restore_signals()
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
        os.write(REPORT, b"s")
        session_host.GuestSessionHost(self.request, channel, SESSION, self.become_program, output).serve()

    def become_program(self) -> None:
        """Drop privileges, in a process that will be the program of a session."""
        os.seteuid(0)
        self.become_user()
        self.set_limits()

    def become_user(self) -> None:
        """Become the programs' user, irreversibly."""
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        prctl(PR_SET_DUMPABLE, 1)

    def set_limits(self) -> None:
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, processors[: math.ceil(self.bounds.cpus)])
        set_rlimits(self.bounds.rlimits)
        drop_privileges(self.bounds.filter)


def keep_only(*descriptors: int) -> None:
    """Make these descriptors 0, 1, 2 and so on, and close all others."""
    for target, descriptor in enumerate([os.dup(descriptor) for descriptor in descriptors]):
        os.dup2(descriptor, target)
    os.closerange(len(descriptors), MOST_FILES)
    for descriptor in (REPORT, REQUEST):
        os.set_inheritable(descriptor, False)


def count_other_threads() -> int:
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
    """Mount a folder of the programs' user in bounded memory; gVisor cannot bound the number of its files."""
    options = f"size={size_bytes},mode=0700,uid={USER},gid={USER}".encode()
    check_call(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), f"mount {folder}")


def prepare_files(disk_bytes: int) -> None:
    """Mount the folders that programs may write to. An old runsc fails here: it cannot list folders on newer
    kernels."""
    if "usr" not in os.listdir("/"):
        raise OSError("the root has no files")
    for folder in ("/tmp", "/sys"):  # mounted by gVisor; the first is unbounded, and hides a link to the scratch folder
        libc.umount2(folder.encode(), MNT_DETACH)
    for folder in (SCRATCH, SHARED_MEMORY):
        if not os.path.isdir(folder):  # an image may not have it
            os.mkdir(folder)
        mount_memory(folder, disk_bytes)
    os.mkdir(SESSION)


def main() -> None:
    options = json.loads(sys.argv[1])
    # The timer's signal ends this process, and with it the sandbox.
    signal.setitimer(signal.ITIMER_REAL, min(options["ttl_s"], LONGEST_S))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    prepare_files(options["disk_bytes"])
    drop_capability_bounds()
    gc.collect()
    gc.freeze()  # so that a child's collector does not copy shared pages
    GuestServer(GuestBounds(bytes.fromhex(options["filter"]), options["cpus"], options["rlimits"])).serve()
