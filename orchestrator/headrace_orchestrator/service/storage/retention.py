"""Retention: deletes old files of the log as the rules say, and what is left of them elsewhere.

* No file goes that a group in flight, an open batch or a start needs; a start may need the last two control states.
* A file is deleted first; then listings forget what was in it, and assets that only it referred to go.
* What it waits for is said, once for each file that it waits for.
* What a refusing disk left half done is done once it takes data again; whatever else stands in the way is named.
* How much is stored is told to the scheduler, which admits nothing at the bound of the disk: what is appended at once,
  assets and what was deleted when it is looked at again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.errors import HeadraceError
from headrace.server import logs
from headrace_orchestrator.buffer.assets.store import AssetStore
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.retention_rules import FileUse, RetentionRules, removable_files
from headrace_orchestrator.scheduler.state.admission.bounds import SharedBounds
from headrace_orchestrator.service.storage.location_index import FileInUse
from headrace_orchestrator.service.storage.store import Store

log = logs.logger(__name__)

RETAIN_EVERY_S = 1.0
"""How often it is looked at what is stored: assets that come meanwhile may overshoot a bound, and a second of them is
little beside any bound worth setting."""


class RetentionLoop:
    """Of one store. ``end_file`` has the log go on in a new file; ``deleted`` is told of the bytes of each file that
    went; ``now_s`` gives Unix time."""

    def __init__(
        self,
        store: Store,
        assets: AssetStore,
        retention: RetentionRules,
        bounds: SharedBounds,
        *,
        end_file: Callable[[], None],
        deleted: Callable[[int], None],
        now_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._assets = assets
        self._retention = retention
        self._bounds = bounds
        self._end_file = end_file
        self._deleted = deleted
        self._now_s = now_s
        #: Trajectories of files that are sealed, by number.
        self._counts: dict[int, int] = {}
        #: What held it up when it was last looked at.
        self._waits_for: FileInUse | None = None
        #: Files that were deleted and are still listed.
        self._unforgotten: list[int] = []

    async def run(self) -> None:
        """Step for ever. What stands in the way, a disk that refuses or a file that does not belong there, is named
        once, and tried again at the next step."""
        told = ""
        while True:
            problem = ""
            try:
                await self.step()
            except (HeadraceError, OSError) as error:
                problem = error.detail if isinstance(error, HeadraceError) else str(error)
            if problem and problem != told:
                log.error("retention could not do its work; tried again", problem=problem)
            told = problem
            await asyncio.sleep(RETAIN_EVERY_S)

    async def step(self) -> list[int]:
        """Delete what may go now; gives the numbers of the files. Raises StoreError, SetupError, OSError."""
        self._measure()
        gone: list[int] = []
        if self._retention.deletes:
            files = await asyncio.to_thread(self._uses)
            if self._is_file_due(files):
                self._end_file()
            gone = await self._choose(files)
        for number in gone:
            size_bytes = await self._store.log.remove(number)
            self._unforgotten.append(number)
            self._deleted(size_bytes)
            log.info("an old file of the log was deleted", number=number, bytes=size_bytes)
        if self._unforgotten:
            doubtful = await self._store.files_gone(self._unforgotten)
            self._unforgotten.clear()
            self._assets.doubt(doubtful)
            self._measure()
        return gone

    def _measure(self) -> None:
        self._bounds.disk_bytes = self._store.log.size_bytes + self._assets.size_bytes

    def _is_file_due(self, files: Sequence[FileUse]) -> bool:
        """Whether to end the file that is written: what is in it gets old, or keeps older ones, of which a start needs
        all that the last two states are not behind. What is in use keeps them too, and no new file ends that."""
        file_age_s = self._retention.file_age_s
        if file_age_s is None or self._now_s() - self._store.log.opened_at_s <= file_age_s:
            return False
        if self._store.has_events:
            return True
        in_use = self._store.index.oldest_in_use(files[0].number if files else 0)
        return any(file.trajectories for file in files[:-1] if in_use is None or file.number < in_use.file)

    async def _choose(self, files: Sequence[FileUse]) -> list[int]:
        if not self._removable(files, needed=None):
            return []
        start = await asyncio.to_thread(self._store.log.needed_by_a_start)
        # From here on nothing waits, so that nothing comes to need a file that is chosen.
        in_use = self._store.index.oldest_in_use(files[0].number)
        if in_use is None:
            return self._removable(files, needed=start)
        gone = self._removable(files, needed=min(start, in_use.file))
        self._tell_waiting(in_use if len(gone) < len(self._removable(files, needed=start)) else None)
        return gone

    def _tell_waiting(self, in_use: FileInUse | None) -> None:
        """Say what retention waits for: it may be a run that everybody has forgotten."""
        if in_use is not None and in_use != self._waits_for:
            log.warning(
                "retention waits: an old file of the log is in use; pull and ack, or close the run, to let it go",
                number=in_use.file,
                run=in_use.run,
                needed_by=in_use.what,
            )
        self._waits_for = in_use

    def _removable(self, files: Sequence[FileUse], needed: int | None) -> list[int]:
        if not files:
            return []
        last = files[-1].number if needed is None else needed
        return removable_files(files, self._retention, now_s=self._now_s(), needed=last)

    def _uses(self) -> list[FileUse]:
        """All files, in order. Blocking. Raises StoreError."""
        sizes = self._store.log.files.sizes()
        self._counts = {number: count for number, count in self._counts.items() if number in sizes}
        newest = max(sizes, default=0)
        projected = Location.at(self._store.projection.cursor, 0).file
        found = []
        for number, (size_bytes, written_at) in sorted(sizes.items()):
            count = self._counts.get(number)
            if count is None:
                count = self._store.projection.count(number)
                # Files behind the cursor are listed whole; the newest one still grows.
                if number < newest and number < projected:
                    self._counts[number] = count
            found.append(FileUse(number, size_bytes, count, written_at))
        return found
