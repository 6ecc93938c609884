"""The log writer process with crash points: an orchestrator of a campaign starts it in place of its own.

* At a crash point it kills the orchestrator too, as one crash would; in the phase ``losing the writer`` it dies alone.
* If the orchestrator's death is a power cut, it dies at that moment; otherwise it ends as the real one does.

``python -m tests.chaos.log_writer PLAN ORCHESTRATOR PATH SETUP``: the plan as JSON, the orchestrator's process id, and
the arguments of the real log writer.
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
from tests.chaos.crash_points import PR_SET_PDEATHSIG, CrashPoints, die
from tests.chaos.disk import SimulatedDisk
from tests.chaos.plan import Plan

LOST = "losing the writer"
"""The phase in which the log writer dies alone, at any of its crash points."""

FAILING_S = 0.2
"""Seconds in which each sync fails; the service tries again about a second later."""

ACK = b"BatchAcked"
"""Tag of the event of an ack in a control frame."""


def main(plan: Plan, orchestrator: int, path: str, setup: str) -> None:
    """Write the log for an orchestrator until it ends, or until the crash point is reached."""
    random.seed(plan.seed)
    if plan.is_cut:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        crash = _crash(plan, os.pidfd_open(orchestrator))
    except ProcessLookupError:
        return
    if os.getppid() != orchestrator:
        return  # it died before PR_SET_PDEATHSIG was set
    points = _AnyPointIsDue(plan.passes, crash) if plan.phase == LOST else CrashPoints(plan.phase, plan.passes, crash)
    syncs = _SyncPoints(points)
    SimulatedDisk(plan.data, plan.synced_dir, syncs, sync_s=plan.sync_s, fails=_SyncFailure(plan)).install()
    if plan.fault:
        from tests.chaos.faults import FAULTS  # it imports the whole service, which takes a while

        FAULTS[plan.fault]()
    _watch_writes(points)
    _watch_acks(syncs)
    _watch_requests(points)
    writer_process.serve(path, setup)


def _crash(plan: Plan, orchestrator: int) -> Callable[[], None]:
    """A function that kills this process, and also the one behind the descriptor unless only this one is to die."""

    def both() -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(orchestrator, signal.SIGKILL)
        die()

    def alone() -> None:
        plan.lost.touch()
        die()

    return alone if plan.phase == LOST else both


class _AnyPointIsDue(CrashPoints):
    """Crash points that all belong to the phase ``LOST``."""

    def __init__(self, passes: int, die: Callable[[], None]) -> None:
        super().__init__(LOST, passes, die)

    def is_due(self, phase: str) -> bool:
        return super().is_due(LOST)


class _SyncFailure:
    """A function that decides whether a sync fails: for a moment, or while the file ``fail-syncs`` exists."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._left = plan.fails_at
        self._until = 0.0

    def __call__(self, path: Path) -> bool:
        if path.suffix != ".log":
            return False
        self._left -= 1
        if self._left == 0:
            self._until = time.monotonic() + FAILING_S
        return time.monotonic() < self._until or (self._plan.folder / "fail-syncs").exists()


class _SyncPoints:
    """Crash points in each sync of the log and of the names of its files."""

    def __init__(self, points: CrashPoints) -> None:
        self._points = points
        self._has_ack = False

    def appends(self, frames: Iterable[PendingFrame]) -> Iterator[PendingFrame]:
        """Pass frames on; the next sync of the log is a sync of these."""
        self._has_ack = False
        for frame in frames:
            self._has_ack |= frame.kind is FrameType.CONTROL and ACK in bytes(frame.payload)
            yield frame

    def on_start(self, path: Path) -> None:
        self._points.reach("syncing" if path.suffix == ".log" else "rotating")

    def before_durable(self, path: Path) -> None:
        self.on_start(path)
        if self._has_ack and path.suffix == ".log":
            self._points.reach("syncing an ack")

    def on_durable(self, path: Path) -> None:
        self.on_start(path)


def _watch_writes(points: CrashPoints) -> None:
    """Make crash points of appends to the log, of which the last may be written in part, and of new files."""
    write, writev, open_file = os.write, os.writev, os.open

    def is_log(descriptor: int) -> bool:
        return os.readlink(f"/proc/self/fd/{descriptor}").endswith(".log")

    def torn_write(descriptor: int, data: Any) -> int:
        if is_log(descriptor) and points.is_due("appending"):
            write(descriptor, memoryview(data)[: random.randrange(len(data) + 1)])
            points.die()
        return write(descriptor, data)

    def torn_writev(descriptor: int, buffers: Any) -> int:
        if is_log(descriptor) and points.is_due("appending"):
            data = b"".join(buffers)
            write(descriptor, data[: random.randrange(len(data) + 1)])
            points.die()
        return writev(descriptor, buffers)

    def watched_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        is_new = bool(flags & os.O_CREAT) and str(path).endswith(".log") and not Path(path).exists()
        if is_new:
            points.reach("rotating")
        descriptor = open_file(path, flags, *args, **kwargs)
        if is_new:
            points.reach("rotating")
        return descriptor

    os.write, os.writev, os.open = torn_write, torn_writev, watched_open


def _watch_acks(syncs: _SyncPoints) -> None:
    append = LogFileWriter._append

    def watched(self: LogFileWriter, frames: Iterable[PendingFrame]) -> int:
        return append(self, syncs.appends(frames))

    LogFileWriter._append = watched  # type: ignore[method-assign]


def _watch_requests(points: CrashPoints) -> None:
    """Let the log writer also die shortly after a request, before or after the orchestrator has its result."""
    carry_out = writer_process._carry_out

    def watched(*args: Any) -> WriteResult:
        result = carry_out(*args)
        if points.is_due(LOST):
            threading.Timer(random.uniform(0, 0.01), points.die).start()
        return result

    writer_process._carry_out = watched  # type: ignore[assignment]


if __name__ == "__main__":
    main(Plan.from_json(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    os._exit(0)  # as the real one does
