"""Starting: the newest control state and the log behind it give scheduler and index back, and bring the projection up.

* Nothing acknowledged is lost: every event behind the state is taken in the order in which it was decided.
* The first terminal record of an episode wins.
* Damage costs the damaged record only; it is logged with file and offset, and counted. So are files that are missing,
  and ends of files that are.
* A damaged state costs nothing: the one before it and more of the log give the same.
* The projection is brought up to the log from where it is, or built anew if it is not of this log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from headrace.errors import CorruptRecord, HeadraceError
from headrace.server import logs
from headrace.store.log_format import FrameType
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import LocatedFrame, LostRange
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.service.storage.store import Store, events_of

log = logs.logger(__name__)

_UNUSABLE = (HeadraceError, msgspec.MsgspecError, ValueError, KeyError)
"""A record is damaged in a way that its checksum does not see, or builds on one that is lost."""

_OF_FILES = frozenset((FrameType.FILE_HEAD, FrameType.FOOTER))

PROJECT_ROWS = 5000
"""Frames of one transaction while the projection catches up: large enough to be fast, small enough for memory."""


def replay(
    core: Scheduler, store: Store, now: float, *, damaged: Callable[[], None], stopping: Callable[[], bool]
) -> None:
    """Read what a start needs of the log; blocking. ``damaged`` is called for each record that is lost. Ends early,
    with the log not open for appending, once ``stopping`` says so. Raises StoreError or SetupError."""
    cursor = store.projection.cursor
    if cursor > store.log.found_end:
        # It never runs ahead of the disk: the end of the log was taken away.
        log.error(
            "the log lost its end: the projection has more than there is, and is built anew",
            log_ends_at=Location.at(store.log.found_end, 0),
            projected_up_to=Location.at(cursor, 0),
        )
        damaged()
        store.projection.reset()
        cursor = 0
    base = _restore(core, store, now, damaged)
    for item in store.log.scan(min(cursor, base)):
        if stopping():
            return
        if isinstance(item, LostRange):
            log.error("log damaged", file=item.file, offset=item.offset, bytes=item.length, problem=item.problem)
            damaged()
            continue
        position = item.location.position
        for error in _take(core, store, item, now, apply=position >= base, project=position >= cursor):
            log.error("record passed over", position=item.location, error=repr(error))
            damaged()
        if store.unprojected >= PROJECT_ROWS:
            store.project_now(item.end)
    store.log.begin(lambda: store.state(core), anew=store.state_due)
    store.project_now(store.log.tail)


def _restore(core: Scheduler, store: Store, now: float, damaged: Callable[[], None]) -> int:
    """Take the newest control state that can be taken; gives the position from which on events come on top of it."""
    while store.log.state is not None:
        try:
            store.restore(store.log.state, core, now)
        except (CorruptRecord, msgspec.MsgspecError) as error:
            log.error("control state passed over", position=store.log.base, error=repr(error))
            damaged()
            store.log.drop_state()
        else:
            store.log.state = None  # it is large
            return store.log.base
    return 0


def _take(
    core: Scheduler, store: Store, placed: LocatedFrame, now: float, *, apply: bool, project: bool
) -> Iterator[Exception]:
    """Take the events of a frame; gives the reason for each that had to be passed over."""
    if placed.frame.type in _OF_FILES:
        return
    try:
        events, source = events_of(placed.frame)
    except _UNUSABLE as error:
        yield error
        return
    if project:
        store.list_frame(events, source, placed.location)
    for event in events if apply else ():
        try:
            core.apply(event, now)
            store.note(event, source, placed.location)
        except _UNUSABLE as error:
            yield error
