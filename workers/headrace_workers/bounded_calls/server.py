"""Server process of bounded calls: ``python -m headrace_workers.bounded_calls.server``, with its socket on stdin.

* Calls run in child processes. The module of a call is imported here, once, before a child is forked.
* A child is reused after a normal call; after a long or memory-hungry one it is not.
* A call that exceeds its time is killed with its child, and a new child replaces it. The kernel limits memory.
* The time of a call is its own work: waiting in the queue, for a new child, for an import or for a CPU does not count.
* Long calls get a lower priority than new ones, so a call that never ends does not delay others.
* A call that its caller gave up is removed from the queue, or killed.
* When the socket closes or this process dies, every call ends.
* The server ends with its worker, even while it imports a module.

Requests and answers are lines of JSON. A request has ``id``, ``function`` (``module:name``), ``arguments``, ``time_s``
and ``memory_bytes``, or only ``cancel``, an id. An answer has ``id``, ``work_s`` and one of ``value``, ``exhausted``
(time, memory or stack), ``raised`` (the text of an error) or ``lost`` (the child was killed from outside).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import time
from collections import deque
from typing import Any

from headrace_workers.bounded_calls.child import serve_calls
from headrace_workers.process_work import SAMPLE_S, WorkMeter

SHORT_CALL_S = 0.2
"""Work after which a call counts as long. With less it counts as new, however much time has passed."""

LONG_CALL_NICENESS = 12
"""Priority of long calls: low, but above that of batch jobs on the machine, so that they end."""

MAX_NEW, MAX_CHILDREN, MAX_IDLE = 64, 128, 8
"""Limits on children with new calls, on all children, and on idle ones. More calls wait; more idle children are ended.
Calls that never end cannot occupy the places of new ones alone."""

READ_BYTES = 1 << 16

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
        self.work: WorkMeter | None = None
        self.is_long = False
        self.check_at = 0.0
        self.answer_data = b""

    def start(self, call: dict[str, Any]) -> None:
        """Send a call to this process."""
        now = time.monotonic()
        self.call, self.answer_data = call, b""
        self.work = WorkMeter(self.pid, now)
        self.check_at = now + min(SAMPLE_S, call["time_s"])
        data = json.dumps(call).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it was killed; the server finds its pipe closed next
            while data:
                data = data[os.write(self.requests, data) :]

    def work_s(self) -> float:
        """The work of its call so far."""
        return 0.0 if self.work is None else self.work.sample(time.monotonic())


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
        if self._queue and self._has_place():
            return 0.0
        check_times = [child.check_at for child in self._children.values() if child.call is not None]
        return max(0.0, min(check_times) - time.monotonic()) if check_times else None

    def _has_place(self) -> bool:
        new = sum(child.call is not None and not child.is_long for child in self._children.values())
        return bool(self._idle) or (new < MAX_NEW and len(self._children) < MAX_CHILDREN)

    def _read_requests(self) -> bool:
        data = self._connection.recv(READ_BYTES)
        *lines, self._request_data = (self._request_data + data).split(b"\n")
        for request in map(json.loads, lines):
            if "cancel" in request:
                self._cancel(request["cancel"])
            else:
                self._queue.append(request)
        return bool(data)

    def _cancel(self, number: int) -> None:
        """End a call whose caller gave up; it gets no answer."""
        self._queue = deque(call for call in self._queue if call["id"] != number)
        for child in self._children.values():
            if child.call is not None and child.call["id"] == number:
                child.call = None
                os.kill(child.pid, signal.SIGKILL)

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
        elif self._has_place():
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
        work_s = child.work_s()
        if not child.is_long and work_s >= SHORT_CALL_S:
            child.is_long = True
            os.setpriority(os.PRIO_PROCESS, child.pid, LONG_CALL_NICENESS)
        if work_s < call["time_s"]:
            child.check_at = now + min(SAMPLE_S, max(0.01, call["time_s"] - work_s))
        elif select.select([child.answers], [], [], 0)[0]:
            child.check_at = now  # it answered since this server last looked
        else:
            self._kill(child, call, {"exhausted": "time", "work_s": work_s})

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
            answer["work_s"] = child.work_s()
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
