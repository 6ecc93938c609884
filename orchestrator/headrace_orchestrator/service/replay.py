"""Starting: the log is read through, and gives scheduler, index and projection back.

* Nothing acknowledged is lost: every fact is taken in the order in which it was decided.
* The first terminal record of an episode wins.
* Damage costs the damaged record only; it is logged with file and offset, and counted.
* The projection is brought up to the log, or built anew if it is not of this log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from headrace.errors import HeadraceError
from headrace_orchestrator import logs
from headrace_orchestrator.buffer.log import Lost, Placed
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.service.store import Store

log = logs.logger(__name__)

_UNUSABLE = (HeadraceError, msgspec.MsgspecError, ValueError, KeyError)
"""A record is damaged in a way that its checksum does not see, or builds on one that is lost."""

PROJECT_ROWS = 5000
"""Rows of one transaction while the projection catches up: large enough to be fast, small enough for memory."""


def replay(
    core: Scheduler, store: Store, now: float, *, damaged: Callable[[], None], stopping: Callable[[], bool]
) -> None:
    """Read the log through; blocking. ``damaged`` is called for each record that is lost. Ends early, with the log not
    open for appending, once ``stopping`` says so."""
    cursor = store.projection.cursor
    if cursor > store.log.found_end:
        log.warning("the projection is ahead of the log, building it anew")
        store.projection.reset()
        cursor = 0
    for item in store.log.scan():
        if stopping():
            return
        if isinstance(item, Lost):
            log.error("log damaged", file=item.file, offset=item.offset, bytes=item.length, problem=item.problem)
            damaged()
            continue
        for error in _take(core, store, item, now):
            log.error("record passed over", position=item.location, error=repr(error))
            damaged()
        if item.location.position < cursor:
            store.skip_projected()
        elif store.unprojected >= PROJECT_ROWS:
            store.project_now(item.location.position + 1)
    store.project_now(store.log.tail)


def _take(core: Scheduler, store: Store, placed: Placed, now: float) -> Iterator[Exception]:
    """Take the facts of a frame; gives the reason for each that had to be passed over."""
    try:
        facts, source = store.facts_of(placed.frame)
    except _UNUSABLE as error:
        yield error
        return
    for fact in facts:
        try:
            core.apply(fact, now)
            store.note(fact, source, placed.location)
        except _UNUSABLE as error:
            yield error
