"""The process that carries out bounded calls: ``python -m headrace_workers.bounded_calls.server``, socket on stdin.

* Calls run in children of this process. What a call's module imports is imported here, once, before a child is forked.
* A child that answered well takes the next call; one that took long, or much, is not used again.
* A call that takes longer than its time is killed with its child, which another replaces. Memory is bounded by the
  kernel.
* Calls that take long give way to those that have just begun: one that never ends delays no other.
* A call is not blamed for a busy machine: one that hardly got a processor is given more time.
* When the socket closes, or this process dies, every call ends.

Lines of JSON come and go. Asked: ``id``, ``function`` (``module:name``), ``arguments``, ``time_s``, ``memory_bytes``.
Answered: ``id`` and one of ``value``, ``exhausted`` (time, memory or stack), ``raised`` (an error, with its text) or
``lost`` (the child was killed by somebody else).
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

from headrace_workers.bounded_calls.child import work

BEGUN_S = 0.2
"""A call that computed for longer is one that takes long; one that did not has just begun, whatever the clock says."""

LOOK_S = 0.1
"""Between looks at what a call has computed."""

STARVED_TIMES = 10
"""So many times its time a call may wait for a processor. Then it is lost, and no fault of its own."""

LONG_NICE = 19
"""Below everything."""

MOST_CHILDREN, MOST_IDLE = 64, 8
"""More calls wait; more children without a call are ended."""

READ_BYTES = 1 << 16

TICKS = os.sysconf("SC_CLK_TCK")

PR_SET_PDEATHSIG = 1

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL)
"""Ends of a process whose stack overflowed."""


class CallProcess:
    """A process for calls. ``call``: the one that it carries out."""

    def __init__(self, pid: int, requests: int, answers: int, modules: int) -> None:
        self.pid = pid
        self.requests = requests
        self.answers = answers
        self.modules = modules
        self.call: dict[str, Any] | None = None
        self.begun_at = 0.0
        self.computed_before_s = 0.0
        self.is_long = False
        self.look_at = 0.0
        self.said = b""

    def begin(self, call: dict[str, Any]) -> None:
        """Give it a call."""
        self.call, self.begun_at, self.said = call, time.monotonic(), b""
        self.computed_before_s = self.computed_s()
        self.look_at = self.begun_at + min(BEGUN_S, call["time_s"])
        data = json.dumps(call).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it was killed; that is seen next
            while data:
                data = data[os.write(self.requests, data) :]

    def computed_s(self) -> float:
        """Its processor time so far."""
        return sum(map(int, self._status()[11:13])) / TICKS

    def waits(self) -> bool:
        """Whether it would compute, if it got a processor."""
        return self._status()[0] == "R"

    def _status(self) -> list[str]:
        with open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()


class CallServer:
    """All children."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._children: dict[int, CallProcess] = {}
        self._idle: list[CallProcess] = []
        self._queue: deque[dict[str, Any]] = deque()
        self._asked = b""
        self._libc = ctypes.CDLL(None)
        self._modules: dict[str, Any] = {}

    def serve(self) -> None:
        """Until the socket closes."""
        while True:
            for key, _ in self._selector.select(self._pause_s()):
                if key.fileobj is not self._connection:
                    self._read_answer(self._children[key.fd])
                elif not self._read_requests():
                    return
            self._look_at_clocks()
            self._begin_one()

    def _pause_s(self) -> float | None:
        if self._queue and (self._idle or len(self._children) < MOST_CHILDREN):
            return 0.0
        looks = [child.look_at for child in self._children.values() if child.call is not None]
        return max(0.0, min(looks) - time.monotonic()) if looks else None

    def _read_requests(self) -> bool:
        data = self._connection.recv(READ_BYTES)
        *lines, self._asked = (self._asked + data).split(b"\n")
        self._queue += map(json.loads, lines)
        return bool(data)

    def _begin_one(self) -> None:
        """One at a time, since a fork takes a while: meanwhile others may have answered."""
        if not self._queue:
            return
        call = self._queue[0]
        module = call["function"].partition(":")[0]
        if module not in self._modules:
            try:
                self._modules[module] = importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - told to whoever asked
                self._queue.popleft()
                self._answer(call, {"raised": f"{type(error).__name__}: {error}"})
                return
            gc.collect()
            gc.freeze()  # so that a child's collector does not copy what is shared
            for child in self._idle:
                self._dismiss(child)
            self._idle.clear()
        if self._idle:
            self._idle.pop().begin(self._queue.popleft())
        elif len(self._children) < MOST_CHILDREN:
            self._fork().begin(self._queue.popleft())

    def _fork(self) -> CallProcess:
        theirs, requests = os.pipe()
        answers, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                self._connection.close()
                for child in self._children.values():
                    self._dismiss(child)
                os.close(requests)
                work(theirs, said)
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(said)
        child = self._children[answers] = CallProcess(pid, requests, answers, len(self._modules))
        self._selector.register(answers, selectors.EVENT_READ)
        return child

    def _look_at_clocks(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if child.call is not None and now >= child.look_at:
                self._look_at(child, child.call, now)

    def _look_at(self, child: CallProcess, call: dict[str, Any], now: float) -> None:
        if not child.is_long and child.computed_s() - child.computed_before_s >= BEGUN_S:
            child.is_long = True
            os.setpriority(os.PRIO_PROCESS, child.pid, LONG_NICE)
        due_at = child.begun_at + call["time_s"]
        if now < due_at:
            child.look_at = due_at if child.is_long else min(due_at, now + LOOK_S)
        elif not child.is_long and child.waits():
            child.look_at = now + LOOK_S
            if now >= child.begun_at + STARVED_TIMES * call["time_s"]:
                self._kill(child, call, {"lost": "it got no processor"})
        else:
            self._kill(child, call, {"exhausted": "time"})

    def _kill(self, child: CallProcess, call: dict[str, Any], answer: dict[str, Any]) -> None:
        os.kill(child.pid, signal.SIGKILL)  # its end may take a while; nobody waits for it
        child.call = None
        self._answer(call, answer)

    def _read_answer(self, child: CallProcess) -> None:
        data = os.read(child.answers, READ_BYTES)
        child.said += data
        if not data:
            self._ended(child)
        elif child.said.endswith(b"\n") and child.call is not None:
            answer = json.loads(child.said)
            is_done = answer.pop("last") or child.is_long or child.modules < len(self._modules)
            self._answer(child.call, answer)
            child.call = None
            if is_done or len(self._idle) >= MOST_IDLE:
                self._dismiss(child)
            else:
                self._idle.append(child)

    def _dismiss(self, child: CallProcess) -> None:
        """Let it end; it is forgotten when it has."""
        if child.requests >= 0:
            os.close(child.requests)
            child.requests = -1

    def _ended(self, child: CallProcess) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.answers)
        os.close(child.answers)
        del self._children[child.answers]
        self._dismiss(child)
        if child in self._idle:
            self._idle.remove(child)
        if child.call is not None:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            crashed = number in CRASHES or not number
            self._answer(child.call, {"exhausted": "stack"} if crashed else {"lost": f"signal {number}"})

    def _answer(self, call: dict[str, Any], answer: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps({"id": call["id"], **answer}).encode() + b"\n")


def main() -> None:
    """Serve the socket that is the input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    CallServer(connection).serve()


if __name__ == "__main__":
    main()
