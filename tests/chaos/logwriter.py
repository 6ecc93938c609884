"""The process that writes the log, with points to die at: an orchestrator of a campaign starts it in place of its own.

* At a point it takes the orchestrator with it, as one crash does; it dies alone only where the phase is to lose it.
* When the power goes with the orchestrator, it goes at that moment; otherwise it ends as it does.

``python -m tests.chaos.logwriter PLAN ORCHESTRATOR PATH OPENING``: the plan as JSON, the orchestrator's process, and
what that says.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.store.log_format import FrameType
from headrace_orchestrator.buffer.log import writer_process
from headrace_orchestrator.buffer.log.file_writer import LogFileWriter, PendingFrame
from headrace_orchestrator.buffer.log.writer import WriteResult
from tests.chaos.disk import Disk
from tests.chaos.plan import Plan
from tests.chaos.points import PR_SET_PDEATHSIG, Points, die

LOST = "losing the writer"
"""The phase in which it dies alone, at any of its points."""

REFUSES_S = 0.2
"""A moment in which each sync fails; the service tries again about a second later."""

ACK = b"BatchAcked"
"""The name of the record that an ack is, as a control frame has it."""


def main(plan: Plan, orchestrator: int, path: str, opening: str) -> None:
    """Write the log for an orchestrator until that is gone, or the point to die at has come."""
    random.seed(plan.seed)
    if plan.is_cut:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        crash = _crash(plan, os.pidfd_open(orchestrator))
    except ProcessLookupError:
        return
    if os.getppid() != orchestrator:
        return  # it died before this one could know
    points = _AnyPoint(plan.passes, crash) if plan.phase == LOST else Points(plan.phase, plan.passes, crash)
    syncs = _Syncs(points)
    Disk(plan.data, plan.vault, syncs, sync_s=plan.sync_s, refuses=_Refusal(plan)).install()
    if plan.mutant:
        from tests.chaos.mutants import MUTANTS  # they know the whole service, which takes a while to load

        MUTANTS[plan.mutant]()
    _watch_writes(points)
    _watch_acks(syncs)
    _watch_jobs(points)
    writer_process.serve(path, opening)


def _crash(plan: Plan, orchestrator: int) -> Callable[[], None]:
    """What ends this process, and the one behind the descriptor if both are to die."""

    def both() -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(orchestrator, signal.SIGKILL)
        die()

    def alone() -> None:
        plan.lost.touch()
        die()

    return alone if plan.phase == LOST else both


class _AnyPoint(Points):
    """All points are of the phase."""

    def __init__(self, passes: int, die: Callable[[], None]) -> None:
        super().__init__(LOST, passes, die)

    def is_due(self, phase: str) -> bool:
        return super().is_due(LOST)


class _Refusal:
    """Whether a sync fails: for a moment, or as long as the file ``refuse`` is there."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._left = plan.refuses_at
        self._until = 0.0

    def __call__(self, path: Path) -> bool:
        if path.suffix != ".log":
            return False
        self._left -= 1
        if self._left == 0:
            self._until = time.monotonic() + REFUSES_S
        return time.monotonic() < self._until or (self._plan.folder / "refuse").exists()


class _Syncs:
    """Points in each sync of the log and of the names of its files."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._has_ack = False

    def appends(self, frames: Iterable[PendingFrame]) -> Iterator[PendingFrame]:
        """The next sync of the log is one of these."""
        self._has_ack = False
        for frame in frames:
            self._has_ack |= frame.kind is FrameType.CONTROL and ACK in bytes(frame.payload)
            yield frame

    def starts(self, path: Path) -> None:
        self._points.here("syncing" if path.suffix == ".log" else "rotating")

    def still_unsafe(self, path: Path) -> None:
        self.starts(path)
        if self._has_ack and path.suffix == ".log":
            self._points.here("syncing an ack")

    def safe(self, path: Path) -> None:
        self.starts(path)


def _watch_writes(points: Points) -> None:
    """Appends of the log, of which the last one before the end may be a part only; new files of it."""
    write, writev, opened = os.write, os.writev, os.open

    def is_log(descriptor: int) -> bool:
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith(".log")

    def torn(descriptor: int, data: Any) -> int:
        if is_log(descriptor) and points.is_due("appending"):
            write(descriptor, memoryview(data)[: random.randrange(len(data) + 1)])
            points.die()
        return write(descriptor, data)

    def torn_vector(descriptor: int, buffers: Any) -> int:
        if is_log(descriptor) and points.is_due("appending"):
            data = b"".join(buffers)
            write(descriptor, data[: random.randrange(len(data) + 1)])
            points.die()
        return writev(descriptor, buffers)

    def made(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        is_new = bool(flags & os.O_CREAT) and str(path).endswith(".log") and not Path(path).exists()
        if is_new:
            points.here("rotating")
        descriptor = opened(path, flags, *args, **kwargs)
        if is_new:
            points.here("rotating")
        return descriptor

    os.write, os.writev, os.open = torn, torn_vector, made


def _watch_acks(syncs: _Syncs) -> None:
    append = LogFileWriter._append

    def watched(self: LogFileWriter, frames: Iterable[PendingFrame]) -> int:
        return append(self, syncs.appends(frames))

    LogFileWriter._append = watched  # type: ignore[method-assign]


def _watch_jobs(points: Points) -> None:
    """It can be lost behind a job too: the orchestrator is told of the job, or not, or waits for nothing."""
    done = writer_process._carry_out

    def watched(*args: Any) -> WriteResult:
        outcome = done(*args)
        if points.is_due(LOST):
            threading.Timer(random.uniform(0, 0.01), points.die).start()
        return outcome

    writer_process._carry_out = watched  # type: ignore[assignment]


if __name__ == "__main__":
    main(Plan.from_json(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    os._exit(0)  # as the one that it stands for
