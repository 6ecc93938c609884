"""Runs as process 1 of a gVisor sandbox: starts programs on request, and carries their input and output.

* Each program has a namespace of process ids of its own; when it ends, or is killed, all that it started ends with it.
* It runs as a user without privileges. This process and the first one of each namespace are root of the sandbox, which
  is nobody on the machine, and out of its reach.
* How a program ended is told by the first process of its namespace, over a pipe that the program does not have.
* It ends with its standard input, so that no sandbox outlives its supervisor, and after the time that it is given.

Frames go both ways, over standard input and output: kind, number of the program, length, content. Content of START is
the length of a JSON document, the document, and the contents of its files one after the other.
"""

import errno
import json
import os
import select
import signal
import stat
import struct
import sys
from collections.abc import Iterator
from typing import Any

from headrace_sandbox.inside.isolation import (
    CLONE_NEWNS,
    CLONE_NEWPID,
    MS_NODEV,
    MS_NOSUID,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    give_up_privileges,
    libc,
    limit,
    make_mounts_private,
    mount_proc,
    must,
    prctl,
)

HEADER = struct.Struct(">BII")
START, INPUT, KILL, RESET = 1, 2, 3, 4
READY, STARTED, STDOUT, STDERR, TOOK, ENDED, FAILED = 1, 2, 3, 4, 5, 6, 7
END = struct.Struct(">iI")  # wait status, or -1 if it is not known; how many threads there were at the end

MNT_DETACH = 2
CHUNK = 64 << 10
USER = 1000
SCRATCH = "/scratch"


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def send(kind: int, number: int, content: bytes = b"") -> None:
    write_all(1, HEADER.pack(kind, number, len(content)) + content)


class Program:
    """One that runs. ``streams``: what is read of it, by descriptor."""

    def __init__(self, number: int, first: int, stdin: int, told: int, streams: dict[int, int]) -> None:
        self.number = number
        self.first = first
        self.stdin = stdin
        self.told = told
        self.streams = streams
        self.pending = b""
        self.report = b""


class Server:
    def __init__(self, filter_: bytes) -> None:
        self.filter = filter_
        self.programs: dict[int, Program] = {}
        self.by_descriptor: dict[int, Program] = {}
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN)
        self.received = b""

    def serve(self) -> None:
        send(READY, 0)
        while True:
            for descriptor, _events in self.poll.poll():
                if descriptor == 0:
                    data = os.read(0, CHUNK)
                    if not data:
                        return
                    self.received += data
                    for kind, number, content in self.frames():
                        self.handle(kind, number, content)
                elif descriptor in self.by_descriptor:
                    self.move(descriptor, self.by_descriptor[descriptor])

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        while len(self.received) >= HEADER.size:
            kind, number, length = HEADER.unpack_from(self.received)
            while len(self.received) < HEADER.size + length:
                data = os.read(0, 1 << 20)
                if not data:
                    sys.exit(0)
                self.received += data
            content = self.received[HEADER.size : HEADER.size + length]
            self.received = self.received[HEADER.size + length :]
            yield kind, number, content

    def handle(self, kind: int, number: int, content: bytes) -> None:
        if kind == START:
            self.start(number, content)
        elif kind == RESET:
            self.reset(number, json.loads(content))
        elif number in self.programs:
            program = self.programs[number]
            if kind == KILL:
                os.kill(program.first, signal.SIGKILL)
            elif kind == INPUT:
                self.feed(program, content)

    def start(self, number: int, content: bytes) -> None:
        size = struct.unpack_from(">I", content)[0]
        request = json.loads(content[4 : 4 + size])
        stdin, ours_in = os.pipe()
        ours_out, stdout = os.pipe()
        ours_err, stderr = os.pipe()
        ours_told, told = os.pipe()
        must(libc.unshare(CLONE_NEWPID), "unshare")
        first = os.fork()
        if first == 0:
            try:
                keep_only(stdin, stdout, stderr, told)
                be_first(request, content[4 + size :], self.filter)
            except BaseException:  # noqa: BLE001 - shown, and the end of this process
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(1)
        for descriptor in (stdin, stdout, stderr, told):
            os.close(descriptor)
        os.set_blocking(ours_in, False)
        program = Program(number, first, ours_in, ours_told, {ours_out: STDOUT, ours_err: STDERR})
        self.programs[number] = program
        for descriptor in (ours_told, ours_out, ours_err):
            self.by_descriptor[descriptor] = program
            self.poll.register(descriptor, select.POLLIN)

    def move(self, descriptor: int, program: Program) -> None:
        """Something can be done with a descriptor of a program."""
        if descriptor == program.stdin:
            self.feed(program, b"")
            return
        data = os.read(descriptor, CHUNK)
        if descriptor == program.told:
            self.hear(program, data)
        elif data:
            send(program.streams[descriptor], program.number, data)
        else:
            self.forget(descriptor)

    def feed(self, program: Program, content: bytes) -> None:
        """More input, or room for what waits. The supervisor sends the next only when this is taken; empty is its
        end."""
        if program.stdin < 0:
            return
        if not content and not program.pending:
            self.close_input(program)
            return
        program.pending += content
        try:
            program.pending = program.pending[os.write(program.stdin, program.pending) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.close_input(program)
            return
        if program.pending:
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
            program.stdin, program.pending = -1, b""

    def hear(self, program: Program, data: bytes) -> None:
        """What the first process of a namespace tells: that its program starts, and how it ended."""
        if not program.report and data[:1] == b"s":
            send(STARTED, program.number)
        program.report += data
        if data:
            return
        self.forget(program.told)
        os.waitpid(program.first, 0)  # and everything in its namespace is gone
        for descriptor in list(program.streams):
            self.drain(descriptor, program)
        self.close_input(program)
        del self.programs[program.number]
        if program.report[:1] == b"s":
            send(ENDED, program.number, program.report[1:] or END.pack(-1, 0))
        else:
            send(FAILED, program.number, program.report[1:5])

    def drain(self, descriptor: int, program: Program) -> None:
        """What a program left in a pipe; nobody but a thief of its descriptor can write any more."""
        if descriptor not in self.by_descriptor:
            return
        os.set_blocking(descriptor, False)
        left = 1 << 20
        try:
            while left > 0 and (data := os.read(descriptor, CHUNK)):
                left -= len(data)
                send(program.streams[descriptor], program.number, data)
        except BlockingIOError:
            pass
        self.forget(descriptor)

    def forget(self, descriptor: int) -> None:
        del self.by_descriptor[descriptor]
        self.poll.unregister(descriptor)
        os.close(descriptor)

    def reset(self, number: int, options: dict[str, Any]) -> None:
        """End every program, and begin with an empty scratch folder."""
        for program in list(self.programs.values()):
            os.kill(program.first, signal.SIGKILL)
            while program.number in self.programs:
                self.hear(program, os.read(program.told, CHUNK))
        for folder in (SCRATCH, "/dev/shm"):
            libc.umount2(folder.encode(), MNT_DETACH)
            mount_memory(folder, options["disk_bytes"])
        send(ENDED, number, END.pack(0, 0))


def keep_only(*descriptors: int) -> None:
    """These become 0, 1, 2 and 3; every other one is closed."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target + 100)
    for target in range(len(descriptors)):
        os.dup2(target + 100, target)
    os.closerange(len(descriptors), 1024)


def be_first(request: dict[str, Any], contents: bytes, filter_: bytes) -> None:
    """As process 1 of a namespace: run the program, and tell how it ended."""
    prctl(PR_SET_DUMPABLE, 0)
    must(libc.unshare(CLONE_NEWNS), "unshare")
    make_mounts_private()
    mount_proc()
    program = os.fork()
    if program == 0:
        status = 126
        try:
            status = be_program(request, contents, filter_)
        except BaseException:  # noqa: BLE001 - shown, and the end of this process
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            os.write(3, END.pack(status, threads()))
            os._exit(0)


def threads() -> int:
    """How many there are in this namespace beside this one."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def be_program(request: dict[str, Any], contents: bytes, filter_: bytes) -> int:
    """Give up every privilege, then be the program."""
    os.setsid()
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.umask(0o022)
    os.chdir(SCRATCH)
    try:
        for path, size in request["files"]:
            write_file(path, contents[:size])
            contents = contents[size:]
    except OSError as error:
        os.write(3, b"f" + struct.pack(">i", error.errno or 0))
        return 1
    os.write(3, b"s")
    os.close(3)
    limit(request["rlimits"])
    give_up_privileges(filter_)
    arguments, environment = request["arguments"], request["environment"]
    try:
        os.execvpe(arguments[0], arguments, environment)
    except OSError as error:
        os.write(2, f"{arguments[0]}: {error.strerror}\n".encode(errors="replace"))
        return 126 if error.errno == errno.EACCES else 127


def folder_of(path: str, *, make: bool) -> tuple[int, str]:
    """A descriptor of the folder of a path below the scratch folder, reached through no link, and the last name."""
    *folders, name = path.split("/")
    at = os.open(SCRATCH, os.O_RDONLY | os.O_DIRECTORY)
    for folder in folders:
        try:
            deeper = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(folder, dir_fd=at)
            deeper = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
        os.close(at)
        at = deeper
    return at, name


def write_file(path: str, content: bytes) -> None:
    at, name = folder_of(path, make=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags, 0o644, dir_fd=at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    os.ftruncate(descriptor, 0)
    write_all(descriptor, content)
    os.close(descriptor)
    os.close(at)


def mount_memory(folder: str, size_bytes: int) -> None:
    """A folder of the programs' user, in bounded memory."""
    options = f"size={size_bytes},mode=0700,uid={USER},gid={USER}".encode()
    must(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), f"mount {folder}")


def prepare_files(disk_bytes: int) -> None:
    """The folders that programs may write to. An old runsc fails here: it cannot list a folder on a newer kernel."""
    if "usr" not in os.listdir("/"):
        raise OSError("the root has no files")
    for folder in ("/tmp", "/sys"):  # gVisor's own: the first has no bound, and is a link to the scratch folder
        libc.umount2(folder.encode(), MNT_DETACH)
    mount_memory(SCRATCH, disk_bytes)
    mount_memory("/dev/shm", disk_bytes)


def main() -> None:
    options = json.loads(sys.argv[1])
    signal.setitimer(signal.ITIMER_REAL, options["ttl_s"])  # whose signal ends it, and all that runs here
    prepare_files(options["disk_bytes"])
    Server(bytes.fromhex(options["filter"])).serve()
