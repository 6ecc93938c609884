"""Server process of bounded calls: ``python -m headrace_workers.bounded_calls.server``, with its socket on stdin.

* Calls run in child processes. The module of a call is imported here, once, before a child is forked.
* A child is reused after a normal call; after a long or memory-hungry one it is not.
* A call that exceeds its time is killed with its child, and a new child replaces it. The kernel limits memory.
* Long calls get a lower priority than new ones, so a call that never ends does not delay others.
* A busy machine does not fail a call: one that got hardly any CPU time gets a longer deadline.
* When the socket closes or this process dies, every call ends.
* The server ends with its worker, even while it imports a module.

Requests and answers are lines of JSON. A request has ``id``, ``function`` (``module:name``), ``arguments``, ``time_s``
and ``memory_bytes``. An answer has ``id`` and one of ``value``, ``exhausted`` (time, memory or stack), ``raised`` (the
text of an error) or ``lost`` (the child was killed from outside).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import time
from collections import deque
from typing import Any

from headrace_workers.bounded_calls.child import serve_calls

SHORT_CALL_S = 0.2
"""CPU time after which a call counts as long. With less it counts as new, however much time has passed."""

CHECK_INTERVAL_S = 0.1
"""Interval between checks of a call's CPU time."""

STARVATION_FACTOR = 10
"""Multiple of its time limit that a call may wait for a CPU. After that it is reported as lost, not as exhausted."""

LONG_CALL_NICENESS = 19
"""Lowest priority."""

MAX_CHILDREN, MAX_IDLE = 64, 8
"""Limits on all children and on idle ones. More calls wait; more idle children are ended."""

READ_BYTES = 1 << 16

TICKS = os.sysconf("SC_CLK_TCK")

PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None)

CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL)
"""Signals that end a process whose stack overflowed."""


class CallProcess:
    """A child process that runs calls. ``call`` is the current one, if any."""

    def __init__(self, pid: int, requests: int, answers: int, modules: int) -> None:
        self.pid = pid
        self.requests = requests
        self.answers = answers
        self.modules = modules
        self.call: dict[str, Any] | None = None
        self.started_at = 0.0
        self.cpu_before_s = 0.0
        self.is_long = False
        self.check_at = 0.0
        self.answer_data = b""

    def start(self, call: dict[str, Any]) -> None:
        """Send a call to this process."""
        self.call, self.started_at, self.answer_data = call, time.monotonic(), b""
        self.cpu_before_s = self.cpu_s()
        self.check_at = self.started_at + min(SHORT_CALL_S, call["time_s"])
        data = json.dumps(call).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it was killed; the server finds its pipe closed next
            while data:
                data = data[os.write(self.requests, data) :]

    def cpu_s(self) -> float:
        """CPU time used so far."""
        return sum(map(int, self._status()[11:13])) / TICKS

    def is_runnable(self) -> bool:
        """Return whether the process is running or ready to run."""
        return self._status()[0] == "R"

    def _status(self) -> list[str]:
        with open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()


class CallServer:
    """Server that distributes calls to child processes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._children: dict[int, CallProcess] = {}
        self._idle: list[CallProcess] = []
        self._queue: deque[dict[str, Any]] = deque()
        self._request_data = b""
        self._modules: dict[str, Any] = {}

    def serve(self) -> None:
        """Serve requests until the socket closes."""
        while True:
            for key, _ in self._selector.select(self._pause_s()):
                if key.fileobj is not self._connection:
                    self._read_answer(self._children[key.fd])
                elif not self._read_requests():
                    return
            self._check_deadlines()
            self._start_next_call()

    def _pause_s(self) -> float | None:
        if self._queue and (self._idle or len(self._children) < MAX_CHILDREN):
            return 0.0
        check_times = [child.check_at for child in self._children.values() if child.call is not None]
        return max(0.0, min(check_times) - time.monotonic()) if check_times else None

    def _read_requests(self) -> bool:
        data = self._connection.recv(READ_BYTES)
        *lines, self._request_data = (self._request_data + data).split(b"\n")
        self._queue += map(json.loads, lines)
        return bool(data)

    def _start_next_call(self) -> None:
        """Start one call. Only one at a time: a fork takes a while, and children may become idle meanwhile."""
        if not self._queue:
            return
        call = self._queue[0]
        module = call["function"].partition(":")[0]
        if module not in self._modules:
            try:
                self._modules[module] = importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - reported to the caller
                self._queue.popleft()
                self._answer(call, {"raised": f"{type(error).__name__}: {error}"})
                return
            gc.collect()
            gc.freeze()  # a child's garbage collector must not copy shared pages
            for child in self._idle:
                self._close_requests(child)
            self._idle.clear()
        if self._idle:
            self._idle.pop().start(self._queue.popleft())
        elif len(self._children) < MAX_CHILDREN:
            self._fork().start(self._queue.popleft())

    def _fork(self) -> CallProcess:
        request_end, requests = os.pipe()
        answers, answer_end = os.pipe()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                end_with_parent()
                if os.getppid() == server:  # it may have ended just before
                    self._connection.close()
                    for child in self._children.values():
                        self._close_requests(child)
                    os.close(requests)
                    serve_calls(request_end, answer_end)
            finally:
                os._exit(0)
        os.close(request_end)
        os.close(answer_end)
        child = self._children[answers] = CallProcess(pid, requests, answers, len(self._modules))
        self._selector.register(answers, selectors.EVENT_READ)
        return child

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.call is not None and now >= child.check_at:
                self._check_call(child, child.call, now)

    def _check_call(self, child: CallProcess, call: dict[str, Any], now: float) -> None:
        if not child.is_long and child.cpu_s() - child.cpu_before_s >= SHORT_CALL_S:
            child.is_long = True
            os.setpriority(os.PRIO_PROCESS, child.pid, LONG_CALL_NICENESS)
        due_at = child.started_at + call["time_s"]
        if now < due_at:
            child.check_at = due_at if child.is_long else min(due_at, now + CHECK_INTERVAL_S)
        elif not child.is_long and child.is_runnable():
            child.check_at = now + CHECK_INTERVAL_S
            if now >= child.started_at + STARVATION_FACTOR * call["time_s"]:
                self._kill(child, call, {"lost": "it got no CPU time"})
        else:
            self._kill(child, call, {"exhausted": "time"})

    def _kill(self, child: CallProcess, call: dict[str, Any], answer: dict[str, Any]) -> None:
        os.kill(child.pid, signal.SIGKILL)  # it may take a while to end; do not wait
        child.call = None
        self._answer(call, answer)

    def _read_answer(self, child: CallProcess) -> None:
        data = os.read(child.answers, READ_BYTES)
        child.answer_data += data
        if not data:
            self._reap(child)
        elif child.answer_data.endswith(b"\n") and child.call is not None:
            answer = json.loads(child.answer_data)
            is_used_up = answer.pop("last") or child.is_long or child.modules < len(self._modules)
            self._answer(child.call, answer)
            child.call = None
            if is_used_up or len(self._idle) >= MAX_IDLE:
                self._close_requests(child)
            else:
                self._idle.append(child)

    def _close_requests(self, child: CallProcess) -> None:
        """Close the child's request pipe, so that it exits. ``_reap`` removes it."""
        if child.requests >= 0:
            os.close(child.requests)
            child.requests = -1

    def _reap(self, child: CallProcess) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.answers)
        os.close(child.answers)
        del self._children[child.answers]
        self._close_requests(child)
        if child in self._idle:
            self._idle.remove(child)
        if child.call is not None:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            crashed = number in CRASH_SIGNALS or not number
            self._answer(child.call, {"exhausted": "stack"} if crashed else {"lost": f"signal {number}"})

    def _answer(self, call: dict[str, Any], answer: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps({"id": call["id"], **answer}).encode() + b"\n")


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Serve the socket on stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()  # a worker that ended earlier has closed the socket
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    CallServer(connection).serve()


if __name__ == "__main__":
    main()
