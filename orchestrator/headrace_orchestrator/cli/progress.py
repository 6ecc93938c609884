"""Progress of long commands: a bar on a terminal, occasional lines in a pipe, nothing with ``--json``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from headrace_orchestrator.buffer.progress import OnProgress
from headrace_orchestrator.cli.output import note, notes, shared

REFRESH_S = 0.1
LINE_S = 5.0
"""Intervals between updates of the bar, and between lines in a pipe."""


@contextmanager
def progress(label: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """Show progress while the block runs; the block reports it by calling the yielded function."""
    if shared().json:
        yield lambda done, total: None
    elif not notes().is_terminal:
        yield _lines(label, clock)
    else:
        columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=notes(), transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield _every(REFRESH_S, clock, lambda done, total: bar.update(task, completed=done, total=total))


def _lines(label: str, clock: Callable[[], float]) -> OnProgress:
    def line(done: int, total: int) -> None:
        note(f"{label}: {done / total:.0%}" if total else label)

    return _every(LINE_S, clock, line)


def _every(interval_s: float, clock: Callable[[], float], show: OnProgress) -> OnProgress:
    last_shown = clock()

    def throttled(done: int, total: int) -> None:
        nonlocal last_shown
        if clock() - last_shown >= interval_s:
            last_shown = clock()
            show(done, total)

    return throttled
