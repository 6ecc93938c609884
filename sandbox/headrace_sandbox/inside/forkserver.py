"""Runs inside a sandbox: a warm interpreter that forks one isolated child for each execution.

* Each execution has namespaces, a scratch folder, limits and a filter of its own; nothing is left of it for the next.
* The program is a grandchild of a process 1 of its own, which it cannot reach, and which reports how it ended.
* It starts only when the supervisor, which knows its process by then, says so.
* The server holds no secret, and runs nothing of a program's in itself.

A request is one packet on standard input, a socket: the descriptors stdin, stdout, stderr, a socket to the supervisor,
and a file with JSON. On that socket process 1 sends a byte, with its credentials; gets a byte; and sends the wait
status of the program, four bytes. No status means that it was killed.
"""

import array
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from types import TracebackType
from typing import Any

from headrace_sandbox.inside.isolation import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    bring_loopback_up,
    give_up_privileges,
    limit,
    make_mounts_private,
    mount_memory,
    mount_proc,
    mount_terminals,
    prctl,
    unshare_user,
)

DESCRIPTORS = 5  # of a request


def serve(requests: socket.socket, filter_: bytes) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        packet, ancillary, _, _ = requests.recvmsg(16, socket.CMSG_SPACE(4 * DESCRIPTORS))
        if not packet:
            return
        descriptors = array.array("i")
        for _level, _type, data in ancillary:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if os.fork() == 0:
            status = 1
            try:
                requests.close()
                with os.fdopen(descriptors.pop(), "rb") as file:
                    request = json.load(file)
                isolate(request, list(descriptors), filter_)
                status = 0
            finally:
                os._exit(status)
        for descriptor in descriptors:
            os.close(descriptor)


def isolate(request: dict[str, Any], descriptors: list[int], filter_: bytes) -> None:
    """In a child: make namespaces, and a process 1 in them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    unshare_user(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
    if os.fork() == 0:
        status = 1
        try:
            be_first(request, descriptors, filter_)
            status = 0
        finally:
            os._exit(status)


def be_first(request: dict[str, Any], descriptors: list[int], filter_: bytes) -> None:
    """As process 1: meet the supervisor, run the program, report its end. With it all that it started ends."""
    prctl(PR_SET_DUMPABLE, 0)  # so that the program cannot write into this memory
    supervisor = socket.socket(fileno=descriptors[3])
    supervisor.send(b"1")
    if not supervisor.recv(1):
        return
    prepare_files(request)
    bring_loopback_up()
    limit(request["rlimits"])
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
    """A scratch folder of its own, a /proc of its own processes, and nothing that another one wrote below /dev."""
    make_mounts_private()
    for folder in ("/scratch", "/dev/shm"):
        mount_memory(folder, request["disk_bytes"], request["inodes"])
    mount_terminals()
    mount_proc()
    os.chdir("/scratch")
    for path, content in request["files"].items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="latin-1", newline="") as file:
            file.write(content)


def run(request: dict[str, Any], descriptors: list[int], filter_: bytes) -> int:
    """As the program's process: give up every privilege, then be the program."""
    prctl(PR_SET_DUMPABLE, 1)
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
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.collect()
    gc.freeze()  # so that a child's collector does not copy the pages of what is shared
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    requests.send(b"ready")
    serve(requests, filter_)
