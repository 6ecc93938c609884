"""Replay at a start: scheduler, index and projection are restored from the newest control state and the log behind it.

* Nothing acknowledged is lost when the process is killed: all events behind the state are applied in their order.
* The first terminal record of an episode wins.
* A damaged record costs only itself; it is logged with file and offset, and counted. The same holds for missing files
  and missing ends of files.
* A damaged state costs nothing: the previous one and more of the log give the same result.
* Frames that are projected already are not read again; a projection of another log is rebuilt.
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
from headrace_orchestrator.service.storage.frames import events_of
from headrace_orchestrator.service.storage.store import Store

log = logs.logger(__name__)

_UNUSABLE = (HeadraceError, msgspec.MsgspecError, ValueError, KeyError)
"""Errors of a record that is damaged in a way that its checksum does not show, or that builds on a lost one."""

_FILE_FRAMES = frozenset((FrameType.FILE_HEAD, FrameType.FOOTER))

PROJECT_BATCH = 5000
"""Entries of one transaction while the projection catches up: large enough to be fast, small enough for memory."""


def replay(
    core: Scheduler, store: Store, now: float, *, damaged: Callable[[], None], stopping: Callable[[], bool]
) -> None:
    """Read the part of the log that a start needs; blocking. ``damaged`` is called for each lost record. Returns early,
    without opening the log for appending, once ``stopping`` returns True. Raises StoreError or SetupError."""
    cursor = store.projection.cursor
    if cursor > store.log.initial_end:
        # The projection never runs ahead of the disk, so the end of the log was removed.
        log.error(
            "the log lost its end: the projection is ahead of it, and is rebuilt",
            log_ends_at=Location.from_position(store.log.initial_end, 0),
            projected_up_to=Location.from_position(cursor, 0),
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
        for error in _replay_frame(core, store, item, now, apply=position >= base, project=position >= cursor):
            log.error("record skipped", position=item.location, error=repr(error))
            damaged()
        if store.unprojected >= PROJECT_BATCH:
            store.project_blocking(item.end)
    store.log.start(lambda: store.state(core), new_file=store.state_due)
    store.project_blocking(store.log.tail)


def _restore(core: Scheduler, store: Store, now: float, damaged: Callable[[], None]) -> int:
    """Restore the newest usable control state; returns the position from which on events follow it."""
    while store.log.state is not None:
        try:
            store.restore(store.log.state, core, now)
        except (CorruptRecord, msgspec.MsgspecError) as error:
            log.error("control state skipped", position=store.log.base, error=repr(error))
            damaged()
            store.log.use_previous_state()
        else:
            store.log.state = None  # it is large
            return store.log.base
    return 0


def _replay_frame(
    core: Scheduler, store: Store, located: LocatedFrame, now: float, *, apply: bool, project: bool
) -> Iterator[Exception]:
    """Apply the events of a frame; yields the error of each one that had to be skipped."""
    if located.frame.type in _FILE_FRAMES:
        return
    try:
        events, source = events_of(located.frame)
    except _UNUSABLE as error:
        yield error
        return
    if project:
        store.add_entries(events, source, located.location)
    for event in events if apply else ():
        try:
            core.apply(event, now)
            store.replay(event, source, located.location)
        except _UNUSABLE as error:
            yield error
