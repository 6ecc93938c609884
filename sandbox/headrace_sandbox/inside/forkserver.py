"""Runs inside a sandbox: a warm interpreter that forks one isolated child for each execution.

This file is given to the sandbox's own Python as it stands, so it imports nothing but the standard library, and does
not belong to the package that it lies in.

* Each execution has namespaces, a scratch folder, limits and a filter of its own; nothing is left of it for the next.
* The program is a grandchild of a process 1 of its own, which it cannot reach, and which reports how it ended.
* It starts only when the supervisor, which knows its process by then, says so.
* The server holds no secret, and runs nothing of a program's in itself.

A request is one packet on standard input, a socket: JSON, and the descriptors stdin, stdout, stderr and a socket to
the supervisor. On that socket process 1 sends a byte, with its credentials; gets a byte; and sends the wait status of
the program, four bytes. No status means that it was killed.
"""

import array
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from types import TracebackType
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 22, 38
SECCOMP_MODE_FILTER = 2
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
CAPABILITY_VERSION_3 = 0x20080522
MOST_BYTES = 1 << 20  # of a request

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def serve(requests: socket.socket, filter_: bytes) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        packet, ancillary, _, _ = requests.recvmsg(MOST_BYTES, socket.CMSG_SPACE(4 * 4))
        if not packet:
            return
        descriptors = array.array("i")
        for _level, _type, data in ancillary:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if os.fork() == 0:
            status = 1
            try:
                requests.close()
                isolate(json.loads(packet), list(descriptors), filter_)
                status = 0
            finally:
                os._exit(status)
        for descriptor in descriptors:
            os.close(descriptor)


def isolate(request: dict[str, Any], descriptors: list[int], filter_: bytes) -> None:
    """In a child: make namespaces, and a process 1 in them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    must(libc.unshare(flags), "unshare")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(descriptor, line.encode())
        os.close(descriptor)
    if os.fork() == 0:
        status = 1
        try:
            be_first(request, descriptors, filter_)
            status = 0
        finally:
            os._exit(status)


def be_first(request: dict[str, Any], descriptors: list[int], filter_: bytes) -> None:
    """As process 1: meet the supervisor, run the program, report its end. With it all that it started ends."""
    must(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")  # so that the program cannot write into this memory
    supervisor = socket.socket(fileno=descriptors[3])
    supervisor.send(b"1")
    if not supervisor.recv(1):
        return
    prepare_files(request)
    bring_loopback_up()
    limit(request)
    program = os.fork()
    if program == 0:
        status = 127
        try:
            supervisor.close()
            status = run(request, descriptors[:3], filter_)
        except SystemExit as end:
            status = exit_code(end)
        except BaseException as error:  # noqa: BLE001 - the program's own, shown as Python shows it
            sys.excepthook(*without_own_frames(error))
            status = 1
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status & 0xFF)
    for descriptor in descriptors[:3]:
        os.close(descriptor)
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            supervisor.send(struct.pack("=I", status))
            return


def prepare_files(request: dict[str, Any]) -> None:
    """A scratch folder of its own, and a /proc of its own processes."""
    must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount /")
    options = f"size={request['disk_bytes']},nr_inodes={request['inodes']},mode=0700".encode()
    must(libc.mount(b"tmpfs", b"/scratch", b"tmpfs", MS_NOSUID | MS_NODEV, options), "mount /scratch")
    must(libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None), "mount /proc")
    os.chdir("/scratch")
    for path, content in request["files"].items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="latin-1", newline="") as file:
            file.write(content)


def bring_loopback_up() -> None:
    """Its own loopback interface, which leads nowhere else."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))


def limit(request: dict[str, Any]) -> None:
    for name, value in request["rlimits"].items():
        number = getattr(resource, name)
        resource.setrlimit(number, (value, value))


def run(request: dict[str, Any], descriptors: list[int], filter_: bytes) -> int:
    """As the program's process: give up every privilege, then be the program."""
    must(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.closerange(3, request["rlimits"]["RLIMIT_NOFILE"])
    give_up_privileges(filter_)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["main.py", *request["arguments"]]
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", errors="surrogateescape" if number < 2 else "backslashreplace")
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.path.insert(0, "/scratch")
    gc.unfreeze()
    code = compile(request["code"], "main.py", "exec", dont_inherit=True)
    main = type(sys)("__main__")
    main.__dict__.update(__file__="main.py", __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
    return 0


def give_up_privileges(filter_: bytes) -> None:
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    must(libc.capset(header, bytes(24)), "capset")
    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    code = ctypes.create_string_buffer(filter_, len(filter_))
    program = struct.pack("@HP", len(filter_) // 8, ctypes.addressof(code))
    must(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    sys.stderr.write(f"{end.code}\n")
    return 1


def without_own_frames(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return type(error), error.with_traceback(trace), trace


def main() -> None:
    filter_descriptor = int(sys.argv[1])
    with os.fdopen(filter_descriptor, "rb") as file:
        filter_ = file.read()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    must(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    gc.collect()
    gc.freeze()  # so that a child's collector does not copy the pages of what is shared
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    requests.send(b"ready")
    serve(requests, filter_)


if __name__ == "__main__":
    main()
