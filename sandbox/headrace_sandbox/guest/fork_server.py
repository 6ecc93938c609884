"""Runs inside a sandbox: a warm interpreter that forks one isolated child for each execution.

* Each execution has namespaces, a scratch folder, limits and a filter of its own; nothing is left of it for the next.
* The program is a child of a process 1 of its own, which it cannot reach, and which reports how it ended.
* A child is forked in its control group, and waits there for its program, isolated already.
* The server and its slots hold no secret, and run nothing of a program's in themselves.

The server gets a socket for each slot, with the entries of its control group, as one packet on standard input, and
forks a process for it. On its socket that one, and each process 1 that it forks, tell with their credentials where they
are:

* ``s``: the slot is there, and in its group if that has entries; it waits for a byte, before which the supervisor puts
  it there if not;
* ``r``: a process 1 is there, and a child of it waits for a request: the descriptors stdin, stdout, stderr and a file
  with JSON;
* ``f`` and why: that child could not be isolated, and ran nothing;
* ``e`` and eight bytes: the program ended with this wait status, and whether its scratch folder was full then, if it
  failed; without it process 1 was killed;
* ``g``: process 1 is gone, and with it everything that the program started.
"""

import array
import atexit
import builtins
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import threading
from types import TracebackType
from typing import Any

from headrace_sandbox.guest.isolation import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    bring_loopback_up,
    give_up_privileges,
    is_full,
    limit,
    make_mounts_private,
    map_user,
    mount_memory,
    mount_proc,
    mount_terminals,
    must,
    prctl,
)

NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
CLONE = {"x86_64": 56, "aarch64": 220}  # the number of the system call
MADV_DONTNEED = 4
MOST_TOLD = 500  # bytes of why it failed
MOST_RECEIVED = 16  # descriptors in a packet
MOST_DESCRIPTORS = 256  # far above what this has open

keeping_the_lock = ctypes.PyDLL(None, use_errno=True)


def serve(requests: socket.socket, filter_: bytes) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # slots are reaped by the kernel
    clone = CLONE[os.uname().machine]
    uid, gid = os.getuid(), os.getgid()
    while descriptors := received(requests):
        if os.fork() == 0:
            try:
                requests.close()
                enter(descriptors[1:])
                be_slot(socket.socket(fileno=descriptors[0]), clone, uid, gid, filter_)
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def enter(entries: list[int]) -> None:
    """Enter a control group: this process has one thread."""
    for entry in entries:
        os.write(entry, b"0")
        os.close(entry)


def received(requests: socket.socket) -> list[int]:
    """The descriptors of the next packet; empty at the end."""
    _, ancillary, _, _ = requests.recvmsg(1, socket.CMSG_SPACE(4 * MOST_RECEIVED))
    descriptors = array.array("i")
    for _level, _type, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)


def be_slot(requests: socket.socket, clone: int, uid: int, gid: int, filter_: bytes) -> None:
    """Fork one process 1 after the other, in namespaces of its own, until nobody listens any more."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.send(b"s")
    if not requests.recv(1):
        return
    while True:
        # One fork that makes the namespaces too; it is that of the C library in all that matters to one thread.
        first = keeping_the_lock.syscall(clone, NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
        must(first, "clone")
        if first == 0:
            try:
                be_first(requests, uid, gid, filter_)
            finally:
                os._exit(0)
        os.waitpid(first, 0)
        requests.send(b"g")


def be_first(requests: socket.socket, uid: int, gid: int, filter_: bytes) -> None:
    """Serve as process 1: start a program, and report its end. Its own end kills all that it started. It does no
    more, since each page of memory that it touches is copied."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    map_user(uid, gid)
    prctl(PR_SET_DUMPABLE, 0)  # so that the program cannot write into this memory
    program = os.fork()
    if program == 0:
        be_program(requests, filter_)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a process 1 does not get, and Python would handle
    requests.send(b"r")
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            requests.send(b"e" + struct.pack("=II", status, status != 0 and is_full("/scratch")))
            return


def be_program(requests: socket.socket, filter_: bytes) -> None:
    """Serve as the program's process: isolate it, wait for the program, run it, and end as the interpreter would."""
    try:
        make_mounts_private()
        mount_terminals()
        mount_proc()
        bring_loopback_up()
        descriptors = received(requests)
        if not descriptors:
            os._exit(0)
        with os.fdopen(descriptors.pop(), "rb") as file:
            request = json.load(file)
        prepare_files(request)
        become_unprivileged(request, descriptors, filter_)
    except BaseException as error:  # noqa: BLE001 - told to the supervisor, whose failure it is
        requests.send(b"f" + repr(error).encode()[:MOST_TOLD])
        os._exit(1)
    status = 127
    try:
        status = run(request)
    except SystemExit as end:
        status = exit_code(end)
    except BaseException as error:  # noqa: BLE001 - the program's own, shown as Python shows it
        sys.excepthook(*without_own_frames(error))
        status = 1
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)


def prepare_files(request: dict[str, Any]) -> None:
    """A scratch folder of its own, and shared memory."""
    for folder in ("/scratch", "/dev/shm"):
        mount_memory(folder, request["disk_bytes"], request["inodes"])
    os.chdir("/scratch")
    for path, content in request["files"].items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="latin-1", newline="") as file:
            file.write(content)


def become_unprivileged(request: dict[str, Any], descriptors: list[int], filter_: bytes) -> None:
    """Keep three descriptors, and give up every privilege."""
    prctl(PR_SET_DUMPABLE, 1)
    be_killed_first()
    if request["processors"]:
        os.sched_setaffinity(0, request["processors"])
    limit(request["rlimits"])
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    give_up_privileges(filter_)
    os.closerange(3, MOST_DESCRIPTORS)


def run(request: dict[str, Any]) -> int:
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


def be_killed_first() -> None:
    """Make the kernel choose this process, not the waiting ones, when memory runs out."""
    descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
    os.write(descriptor, b"1000")
    os.close(descriptor)


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


def give_back_memory() -> None:
    """Return what only the start needed: freed memory, and pages of code, which stay in the page cache."""
    keeping_the_lock.malloc_trim(0)
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0] for line in maps if " r-xp " in line and "/" in line]
    for start, end in (span.split("-") for span in spans):
        length = int(end, 16) - int(start, 16)
        keeping_the_lock.madvise(ctypes.c_void_p(int(start, 16)), ctypes.c_size_t(length), MADV_DONTNEED)


def main() -> None:
    filter_descriptor = int(sys.argv[1])
    with os.fdopen(filter_descriptor, "rb") as file:
        filter_ = file.read()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site` has them, and programs use them
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    requests.send(b"ready")
    gc.collect()
    give_back_memory()
    gc.freeze()  # so that a child's collector does not copy the pages of what is shared
    serve(requests, filter_)
