"""Runs inside a sandbox: a warm interpreter that forks one isolated child for each execution.

* Each execution has namespaces, a scratch folder, limits and a filter of its own; the next one finds nothing of it.
* The program is a child of its own process 1, which it cannot reach, and which reports its end.
* A child is forked in its control group, and waits there for its program, already isolated.
* The server and its slots hold no secret, and run no code of a program.

For each slot the server gets a packet on standard input with a socket and the entries of the slot's control group, and
forks a process. On that socket the slot, and each process 1 that it forks, send these packets with their credentials:

* ``s``: the slot runs, and is in its group if that has entries; it waits for a byte, before which the supervisor adds
  it to the group otherwise;
* ``r``: a process 1 runs, and its child waits for a request: the descriptors stdin, stdout, stderr and a JSON file;
* ``f`` and the reason: the child could not be isolated, and ran nothing;
* ``e`` and eight bytes: the program's wait status, and 1 if it failed with a full scratch folder; if this packet is
  missing, process 1 was killed;
* ``g``: process 1 has ended, and with it everything that the program started.
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
    check_call,
    drop_privileges,
    is_full,
    make_mounts_private,
    map_user,
    mount_memory,
    mount_proc,
    mount_terminals,
    prctl,
    set_rlimits,
)

NAMESPACES = CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
CLONE = {"x86_64": 56, "aarch64": 220}  # the number of the system call
MADV_DONTNEED = 4
MOST_REASON_BYTES = 500
MOST_RECEIVED = 16  # descriptors in a packet
MOST_DESCRIPTORS = 256  # far above the number of open ones

libc_with_gil = ctypes.PyDLL(None, use_errno=True)  # does not release Python's lock during a call


def serve(requests: socket.socket, filter_: bytes) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # slots are reaped by the kernel
    clone = CLONE[os.uname().machine]
    uid, gid = os.getuid(), os.getgid()
    while descriptors := receive_descriptors(requests):
        if os.fork() == 0:
            try:
                requests.close()
                enter_group(descriptors[1:])
                run_slot(socket.socket(fileno=descriptors[0]), clone, uid, gid, filter_)
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def enter_group(entries: list[int]) -> None:
    """Enter a control group; this process must have one thread."""
    for entry in entries:
        os.write(entry, b"0")
        os.close(entry)


def receive_descriptors(requests: socket.socket) -> list[int]:
    """Receive the descriptors of the next packet; empty at the end."""
    _, ancillary, _, _ = requests.recvmsg(1, socket.CMSG_SPACE(4 * MOST_RECEIVED))
    descriptors = array.array("i")
    for _level, _type, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)


def run_slot(requests: socket.socket, clone: int, uid: int, gid: int, filter_: bytes) -> None:
    """Fork one process 1 after the other, each in namespaces of its own, until the supervisor closes the socket."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.send(b"s")
    if not requests.recv(1):
        return
    while True:
        # A fork and its namespaces in one call; for one thread it is equivalent to the C library's fork.
        init = libc_with_gil.syscall(clone, NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
        check_call(init, "clone")
        if init == 0:
            try:
                run_init(requests, uid, gid, filter_)
            finally:
                os._exit(0)
        os.waitpid(init, 0)
        requests.send(b"g")


def run_init(requests: socket.socket, uid: int, gid: int, filter_: bytes) -> None:
    """Serve as process 1: start a program, and report its end. The end of process 1 kills everything that the program
    started. It does nothing else, because each page of memory that it touches is copied."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    map_user(uid, gid)
    prctl(PR_SET_DUMPABLE, 0)  # so that the program cannot write into this memory
    program = os.fork()
    if program == 0:
        run_program(requests, filter_)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 does not receive it, and Python would handle it
    requests.send(b"r")
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            requests.send(b"e" + struct.pack("=II", status, status != 0 and is_full("/scratch")))
            return


def run_program(requests: socket.socket, filter_: bytes) -> None:
    """Serve as the program's process: isolate it, wait for the program, run it, and exit as the interpreter would."""
    try:
        make_mounts_private()
        mount_terminals()
        mount_proc()
        bring_loopback_up()
        descriptors = receive_descriptors(requests)
        if not descriptors:
            os._exit(0)
        with os.fdopen(descriptors.pop(), "rb") as file:
            request = json.load(file)
        prepare_files(request)
        become_unprivileged(request, descriptors, filter_)
    except BaseException as error:  # noqa: BLE001 - reported to the supervisor, as its failure
        requests.send(b"f" + repr(error).encode()[:MOST_REASON_BYTES])
        os._exit(1)
    status = 127
    try:
        status = run(request)
    except SystemExit as end:
        status = exit_code(end)
    except BaseException as error:  # noqa: BLE001 - the program's own, shown as Python shows it
        sys.excepthook(*without_server_frames(error))
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
    """Mount a scratch folder and shared memory, and write the program's files."""
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
    """Keep three descriptors, and drop all privileges."""
    prctl(PR_SET_DUMPABLE, 1)
    raise_oom_score()
    if request["processors"]:
        os.sched_setaffinity(0, request["processors"])
    set_rlimits(request["rlimits"])
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    drop_privileges(filter_)
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


def raise_oom_score() -> None:
    """Have the kernel kill this process, not the waiting ones, when memory runs out."""
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


def without_server_frames(error: BaseException) -> tuple[type[BaseException], BaseException, TracebackType | None]:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return type(error), error.with_traceback(trace), trace


def release_memory() -> None:
    """Release memory that only the start needed: freed memory, and pages of code, which stay in the page cache."""
    libc_with_gil.malloc_trim(0)
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0] for line in maps if " r-xp " in line and "/" in line]
    for start, end in (span.split("-") for span in spans):
        length = int(end, 16) - int(start, 16)
        libc_with_gil.madvise(ctypes.c_void_p(int(start, 16)), ctypes.c_size_t(length), MADV_DONTNEED)


def main() -> None:
    filter_descriptor = int(sys.argv[1])
    with os.fdopen(filter_descriptor, "rb") as file:
        filter_ = file.read()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site` defines them, and programs use them
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    requests.send(b"ready")
    gc.collect()
    release_memory()
    gc.freeze()  # so that a child's collector does not copy shared pages
    serve(requests, filter_)
